from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from small_task import trainer
from torch import Tensor

from revzoo.data import Augment, Digits
from revzoo.training import Classifier

CLASSES = 5


def batch(count: int = 8) -> tuple[Tensor, Tensor]:
    """Images with the label as value of every pixel."""
    labels = torch.arange(count) % CLASSES
    return labels.double().view(-1, 1, 1, 1).expand(-1, 2, 8, 8).clone(), labels


@pytest.mark.parametrize(
    "options", [{"mixup": 1.0}, {"mixup": 1}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}]
)
def test_labels_are_mixed_in_the_shares_of_the_images(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    values = torch.arange(CLASSES, dtype=torch.float64)
    mixed = 0
    for _ in range(20):
        images, labels = Augment(**options).mix(*batch(), num_classes=CLASSES)
        assert (labels.shape, labels.dtype) == ((8, CLASSES), torch.float64)
        torch.testing.assert_close(labels.sum(1), torch.ones(8, dtype=torch.float64))
        means = images.mean((1, 2, 3))
        torch.testing.assert_close(labels @ values, means, atol=1e-6, rtol=0)
        mixed += bool(((labels > 0).sum(1) == 2).all())
    assert mixed >= 15


def kinds(**options: float) -> set[bool]:
    """Whether some batches hold averaged pixels, which are not whole labels."""
    torch.manual_seed(0)
    found = [Augment(**options).mix(*batch(), num_classes=CLASSES)[0] for _ in range(20)]
    return {bool((images % 1 > 0).any()) for images in found}


def test_each_batch_draws_one_of_both() -> None:
    assert kinds(mixup=1.0) == {True}
    assert kinds(cutmix=1.0) == {False}
    assert kinds(mixup=1.0, cutmix=1.0) == {True, False}


def test_without_options_the_batch_stays_and_nothing_is_drawn() -> None:
    state = torch.get_rng_state()
    images, labels = batch()
    mixed = Augment().mix(images, labels, num_classes=CLASSES)
    assert mixed[0] is images
    assert mixed[1] is labels
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("name", "alpha"), [("mixup", -1.0), ("mixup", float("nan")), ("cutmix", float("inf"))]
)
def test_nonsense_is_refused(name: str, alpha: float) -> None:
    with pytest.raises(ValueError, match=rf"augment\.{name}=.*expected a number in \[0, inf\)"):
        Augment.of({name: alpha})


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
def test_the_classifier_is_trained_on_mixed_batches_and_validated_on_plain_ones(
    tmp_path: Path, precision: str
) -> None:
    shapes: dict[str, torch.Size] = {}

    class Watch(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):  # type: ignore[no-untyped-def]
            shapes["train"] = batch[1].shape

        def on_validation_batch_end(self, trainer, module, outputs, batch, index):  # type: ignore[no-untyped-def]
            shapes["val"] = batch[1].shape

    spec = {"name": "revnet38", "num_classes": 10, "in_chans": 1, "units": [1, 1, 1]}
    module = Classifier(spec, optim={"label_smoothing": 0.1})
    limits = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1}
    runner = trainer(tmp_path, precision=precision, callbacks=[Watch()], **limits)
    runner.fit(module, Digits(batch_size=16, eval_batch_size=16, augment={"cutmix": 1.0}))
    assert shapes == {"train": (16, 10), "val": (16,)}
    assert 0 <= runner.callback_metrics["train/acc"] <= 1
    assert runner.callback_metrics["train/loss"] > 0
