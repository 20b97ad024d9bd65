"""Several labels for each image as a Lightning module: each is there or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor
from torchmetrics import Metric

from revzoo._checks import shortened
from revzoo.data import DataError
from revzoo.training.classifier import Classifier, class_count
from revzoo.training.metrics import (
    AUROC,
    AveragePrecision,
    CalibrationError,
    Rate,
)
from revzoo.training.optim.optimizers import BALANCED
from revzoo.training.tasks.losses import MULTILABEL, Loss


class MultilabelClassifier(Classifier):
    """Train, validate, test and predict with a network that decides on each label by itself.

    As :class:`Classifier`, but labels are float ``(B, num_classes)``, 1 for the labels of an image
    and 0 for others. ``optim.class_weights`` are those of images that have a label; ``balanced`` is
    the number of images without it over the number with it. Every figure is the mean over the
    labels; a probability above 0.5 counts as present. Logs ``acc``, and of validation and test
    ``balanced_acc`` (the mean of sensitivity and specificity), ``sensitivity``, ``specificity``,
    ``f1``, ``auroc``, ``ap`` and ``ece``.

    Example:
        >>> from revzoo.training import MultilabelClassifier
        >>> module = MultilabelClassifier({"name": "revnet38", "num_classes": 3})
    """

    task = "multilabel"
    losses: ClassVar[Mapping[str, Loss]] = MULTILABEL
    monitor = "val/auroc"
    console = ("loss", "acc", "auroc", "ap", "f1")

    def figures(self, evaluated: bool) -> dict[str, Metric]:
        count = class_count(self.model)
        by_name: dict[str, Metric] = {"acc": Rate("accuracy", count, labels=True)}
        if evaluated:
            by_name |= {
                "balanced_acc": Rate("balanced", count, labels=True),
                "sensitivity": Rate("recall", count, labels=True),
                "specificity": Rate("specificity", count, labels=True),
                "f1": Rate("f1", count, labels=True),
                "auroc": AUROC(count, labels=True),
                "ap": AveragePrecision(count, labels=True),
                "ece": CalibrationError(count, labels=True),
            }
        return by_name

    def measured(self, logits: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"preds": logits, "target": labels}

    def predicted(self, logits: Tensor) -> Tensor:
        """The probability of each label, (B, num_classes)."""
        return logits.sigmoid()

    def balanced(self, labels: Tensor, classes: Sequence[str]) -> Tensor:
        own = labels.double().sum(0)
        others = len(labels) - own
        if one_sided := [n for n, a in zip(classes, (own * others).tolist(), strict=True) if not a]:
            raise DataError(
                f"optim.class_weights={BALANCED} compares the images with and without each label, "
                f"but all or none of the training images have {shortened(one_sided)}: give a list "
                "of numbers, one for each label"
            )
        return others / own
