"""Runs on images that are not square."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from small_run import NO_EXTRAS

from revzoo.cli.main import main
from revzoo.training.checkpoint.restore import restore

FEW = ["trainer.max_epochs=1", "test=false", "data.batch_size=4", "data.num_workers=0"]
FEW += ["trainer=cpu", *NO_EXTRAS]


def _photos(root: Path, masks: bool = False) -> Path:
    """Images of 60 x 90 pixels, a gradient whose direction is the class; or with masks."""
    rng = np.random.default_rng(0)
    rows, columns = np.mgrid[:60, :90]
    for n in range(16):
        bright = (rows if n % 2 else columns) > 30
        pixels = np.uint8(bright * 180)[..., None] + rng.integers(0, 60, (60, 90, 3), np.uint8)
        name = f"train/{'images' if masks else 'ab'[n % 2]}/{n}.png"
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(root / name)
        if masks:
            (root / "train/masks").mkdir(exist_ok=True)
            Image.fromarray(np.uint8(bright)).save(root / f"train/masks/{n}.png")
    return root


def _train(root: Path, run: Path, cache_bytes: int) -> None:
    data = ["data=imagefolder", f"data.root={root}", "data.image_size=[48,80]"]
    data += [f"data.cache_bytes={cache_bytes}", "data.augment.mixup=0.2"]
    model = ["model=revnet38", "+model.units=[1,1,1]", f"hydra.run.dir={run}"]
    main(["train", *model, "model.stem_width=8", "model.widths=[8,8,8]", *data, *FEW])


def test_a_folder_is_trained_from_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _train(_photos(tmp_path / "photos"), tmp_path / "run", 2**30)
    assert "3x48x80" in capsys.readouterr().out


def test_a_folder_is_trained_evaluated_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = _photos(tmp_path / "photos"), tmp_path / "run"
    _train(root, run, 0)
    assert "3x48x80" in capsys.readouterr().out
    assert restore(run).facts["input_size"] == (3, 48, 80)
    main(["eval", str(run), "split=val", "trainer=cpu"])
    capsys.readouterr()
    main(["predict", str(run), str(root), "--tta", "flip", "--device", "cpu", "--json"])
    assert len(json.loads(capsys.readouterr().out)) == 16
    main(["export", str(run), "--output", str(tmp_path / "net.pt2")])
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert program(torch.zeros(2, 3, 48, 80)).shape == (2, 2)
    main(["info", str(run)])
    assert "forward, 3x48x80" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--image-size=46,81: images of 46 x 81 .* 48,80$"):
        main(["predict", str(run), str(root), "--device", "cpu", "--image-size", "46,81"])


def test_masks_are_trained_evaluated_and_predicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = _photos(tmp_path / "photos", masks=True), tmp_path / "run"
    data = ["data=masks", f"data.root={root}", "data.classes=[dark,bright]", "data.cache_bytes=0"]
    model = ["model=iunet2d", "model.channels=[8,16]", "model.units=[1,1]", f"hydra.run.dir={run}"]
    main(["train", *model, *data, "data.image_size=[48,80]", *FEW])
    main(["eval", str(run), "split=val", "trainer=cpu"])
    main(["predict", str(run), str(root / "train/images"), "--masks", str(tmp_path / "masks")])
    assert "16 masks" in capsys.readouterr().out
    with Image.open(tmp_path / "masks" / "3.png") as mask:
        assert mask.size == (90, 60)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("revvit_cifar", "images of 46 x 80 pixels: .*this one takes squares only"),
        ("revnet38", r"multiples of 4.* data.image_size=\[48,80\]"),
    ],
)
def test_sizes_that_a_model_does_not_take(model: str, message: str, tmp_path: Path) -> None:
    data = [f"data.root={_photos(tmp_path / 'photos')}", "data.image_size=[46,80]"]
    with pytest.raises(SystemExit, match=message):
        main(["train", f"model={model}", "data=imagefolder", *data, *FEW])
