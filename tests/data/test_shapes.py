"""The generated images with masks, and masks in a data module."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_task import trainer

from revzoo.data import DataError, Shapes
from revzoo.data.images import TensorImages
from revzoo.private.sample_norms import HardSamples
from revzoo.training import Segmenter, quiet


def test_pixels_have_the_colour_of_their_shape() -> None:
    images, masks = Shapes().read("test")[:]
    assert (images.dtype, masks.dtype) == (torch.uint8, torch.uint8)
    assert images.shape == (200, 3, 48, 48)
    assert masks.shape == (200, 48, 48)
    assert masks.unique().tolist() == [0, 1, 2, 3]
    # noise has a deviation of 12; a mask beside its shape would mix two colours
    spreads = [
        image[:, mask == 0].float().std(1).mean() for image, mask in zip(images, masks, strict=True)
    ]
    assert 11 < torch.stack(spreads).median() < 14


def test_images_are_the_same_each_time_and_differ_between_splits() -> None:
    data = Shapes()
    first, again = data.read("test")[:8], data.read("test")[:8]
    assert torch.equal(first[0], again[0])
    assert not torch.equal(first[0], data.read("train")[:8][0])


class Coded(Shapes):
    """Each pixel's colour is its class, 255 in the corner."""

    def read(self, split: Any) -> TensorImages | None:
        if split == "val":
            return None
        masks = torch.randint(4, (64, 8, 8), dtype=torch.uint8)
        masks[:, 0, 0] = 255
        return TensorImages(masks[:, None].repeat(1, 3, 1, 1), masks, classes=list("abcd"))


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_masks_follow_their_images(on_device: bool, training: bool) -> None:
    seen = []

    class Checks(Segmenter):
        def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            seen.append(labels)
            return super().loss(logits, labels)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images)
            return super().forward(images)

    data = Coded(augment={"crop_padding": 2}, on_device=on_device)
    model = {"name": "iunet2d", "num_classes": 4, "channels": [8, 16], "units": [1, 1]}
    with quiet():
        module, runner = Checks(model), trainer(max_steps=3)
        if training:
            runner.fit(module, data)
        else:
            runner.test(module, data, verbose=False)
    moved = 0
    for images, labels in zip(seen[::2], seen[1::2], strict=True):
        pixels = (images * data.normalisation.std + data.normalisation.mean).round()[:, 0].long()
        padding = pixels == 0
        assert labels.dtype == torch.int64
        assert ((labels == pixels) | (labels == -1)).all()
        assert ((labels != -1) | (pixels == 255) | padding).all()
        moved += int((labels[:, 0, 0] != -1).sum())
    assert bool(moved) == training, "crops move the corner"


@pytest.mark.parametrize("option", ["policy", "erasing", "mixup"])
def test_masks_follow_crops_and_flips_alone(option: str) -> None:
    value = "randaugment" if option == "policy" else 0.5
    with pytest.raises(DataError, match="masks, which do not follow data"):
        Coded(augment={option: value}).setup("fit")


def test_the_hardest_images_need_a_class() -> None:
    trainer = SimpleNamespace(datamodule=Shapes())
    with pytest.raises(ValueError, match="the data have masks"):
        HardSamples().on_fit_start(trainer, None)  # type: ignore[arg-type]
