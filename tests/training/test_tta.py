"""Test-time augmentation: the mean over an image and its mirror image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image

import revzoo
from revzoo.data import Shapes
from revzoo.training import Segmenter, quiet
from revzoo.training.predict import classify, segment
from revzoo.training.tta import flipped_mean


@pytest.fixture(scope="module")
def network() -> Any:
    return revzoo.from_pretrained("irevnet13.digits").eval()


def test_probabilities_are_the_mean_of_those_of_both_images(network: Any) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        expected = (network(images).softmax(1) + network(images.flip(-1)).softmax(1)) / 2
        found = flipped_mean(network, images).softmax(1)
    assert torch.allclose(found, expected, atol=1e-6)
    assert not torch.allclose(found, network(images).softmax(1), atol=1e-4)


def test_maps_are_mirrored_back() -> None:
    x = torch.randn(2, 3, 4, 6)
    shifted = flipped_mean(lambda images: images.roll(1, -1), x).softmax(1)
    expected = (x.roll(1, -1).softmax(1) + x.roll(-1, -1).softmax(1)) / 2
    assert torch.allclose(shifted, expected, atol=1e-6)


def test_a_prediction_is_that_of_the_mirror_image(network: Any) -> None:
    image = torch.arange(64, dtype=torch.uint8).view(1, 8, 8) * 3
    both = [next(classify(network, [i], tta="flip")) for i in (image, image.flip(-1))]
    assert both[0] == pytest.approx(both[1], abs=1e-6)
    assert both[0] != pytest.approx(next(classify(network, [image])), abs=1e-4)


def test_evaluations_take_the_mean() -> None:
    data = Shapes(eval_batch_size=100)
    model = {"name": "iunet2d", "num_classes": 4, "channels": [8, 16], "units": [1, 1]}
    torch.manual_seed(0)
    module, losses = Segmenter(model), {}
    for tta in (None, "flip"):
        module.tta = tta
        with quiet():
            trainer = pl.Trainer(
                accelerator="cpu",
                logger=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                enable_checkpointing=False,
                limit_test_batches=1,
            )
            (figures,) = trainer.test(module, data, verbose=False)
        losses[tta] = figures["test/loss"]
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))[:100]
    images, labels = data._images("test").subset(order, training=False)[:]
    with torch.no_grad():
        logits = flipped_mean(module.model.eval(), data.transform(images, training=False))
        expected = module.eval().loss(logits, labels.long())
    assert losses["flip"] == pytest.approx(expected.item(), rel=1e-4)
    assert losses["flip"] != pytest.approx(losses[None], rel=1e-5)


def test_a_symmetric_image_has_a_symmetric_mask(tmp_path: Path) -> None:
    facts = {"classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    torch.manual_seed(0)
    options = {"channels": [8, 16], "units": [1, 1]}
    network = revzoo.create_model("iunet2d", num_classes=2, **options)
    network.save_pretrained(tmp_path, **facts, input_size=(3, 16, 16))
    network = revzoo.create_model(tmp_path, pretrained=True)
    half = torch.randint(256, (16, 8, 3), dtype=torch.uint8)
    image = Image.fromarray(torch.cat([half, half.flip(1)], 1).numpy())
    masks = {tta: segment(network, image, tta=tta) for tta in (None, "flip")}
    assert torch.equal(masks["flip"], masks["flip"].flip(1))
    assert not torch.equal(masks[None], masks[None].flip(1))


def test_a_larger_image_has_the_mask_of_the_size_of_training(tmp_path: Path) -> None:
    """Its pixels were another scale for the network, which found less."""
    torch.manual_seed(0)
    network = revzoo.create_model("iunet2d", num_classes=2, channels=[8, 16], units=[1, 1])
    facts = {"classes": ("a", "b"), "mean": (0.5,) * 3, "std": (0.2,) * 3}
    network.save_pretrained(tmp_path, **facts, input_size=(3, 16, 16))
    network = revzoo.create_model(tmp_path, pretrained=True)
    image = Image.fromarray(torch.randint(256, (16, 16, 3), dtype=torch.uint8).numpy())
    mask, large = segment(network, image), image.resize((64, 64), Image.Resampling.NEAREST)
    same = {
        size: (segment(network, large, size=size)[2::4, 2::4] == mask).float().mean()
        for size in (16, None)
    }
    assert same[16] > max(0.8, same[None] + 0.1), same
