"""A model that does not take the images' size is refused before images are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from small_images import image_folder
from torch import Tensor, nn

from revzoo.cli.commands._models import try_image
from revzoo.cli.main import main
from revzoo.cli.terminal import ConfigError
from revzoo.data import ImageFolder


class OfOneSize(nn.Module):
    """Takes images of 8 x 8 pixels, as many networks of timm take 224 x 224."""

    image_size = 8

    def __init__(self, error: Exception, *, always: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.error, self.always = error, always

    def forward(self, x: Tensor) -> Tensor:
        if self.always or x.shape[-1] != self.image_size:
            raise self.error
        return self.norm(x).mean((2, 3))


def test_the_message_names_both_sizes_and_the_remedy() -> None:
    for error, why in ((RuntimeError("bad shape"), r" \(bad shape\)"), (AssertionError(), "")):
        model = OfOneSize(error)
        expected = f"^OfOneSize fails on images of 9 x 9 pixels{why}: it is made for 8 x 8; try 8$"
        with pytest.raises(ConfigError, match=expected):
            try_image(model, (9, 9), 3, remedy="; try {size}")
    try_image(model, (8, 8), 3)
    assert model.training
    assert model.norm.num_batches_tracked == 0


def test_other_errors_keep_their_message() -> None:
    for side in (8, 9):
        with pytest.raises(RuntimeError, match="no memory"):
            try_image(OfOneSize(RuntimeError("no memory"), always=True), (side, side), 3)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("torchvision:vit_b_16", [], r"expected 224 x 224; resize .*data\.image_size=224"),
        ("timm:levit_128", [], r"made for 224 x 224; try data\.image_size=224 or model"),
        ("timm:levit_128", ["data.image_size=64"], "on images of 64 x 64 pixels"),
    ],
)
def test_a_run_ends_before_it_reads_the_images(
    name: str, options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(name.partition(":")[0])
    root = image_folder(tmp_path / "images", side=12)
    monkeypatch.setattr(ImageFolder, "read", lambda *_: pytest.fail("images were read"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=message):
        main(["train", f"model={name}", "data=imagefolder", f"data.root={root}", *options])


@pytest.mark.parametrize("command", ["audit", "info"])
def test_commands_name_their_option(command: str) -> None:
    pytest.importorskip("timm")
    message = "timm:botnet26t_256 fails on images of 64 x 64 pixels: .* 256 x 256: try --image-size"
    with pytest.raises(SystemExit, match=message):
        main([command, "timm:botnet26t_256", "--image-size", "64"])


def test_the_trial_runs_on_the_device_of_the_model() -> None:
    with torch.device("meta"):
        model = OfOneSize(RuntimeError("bad shape"))
    try_image(model, (8, 8), 3)
