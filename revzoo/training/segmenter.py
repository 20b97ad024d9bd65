"""Semantic segmentation as a Lightning module: a class for each position.

The loss is the mean of the cross-entropy and one minus the Dice coefficient (F. Milletari, N.
Navab, S. Ahmadi, "V-Net", 3DV 2016, arXiv 1606.04797), which counts small classes as much as large
ones. Both count all positions of a batch together.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

from revzoo.training.classifier import Classifier, class_count
from revzoo.training.lightning_compat import data_of
from revzoo.training.metrics import by_split, mean_loss
from revzoo.training.windows import by_windows

IGNORED = -1
"""The class of positions that neither train nor count."""

_EPSILON = 1e-5  # of the Dice loss; a class that a batch lacks and the network does not predict


class Dice(MulticlassStatScores):
    """The mean over the classes but the first, the background, of ``2 TP / (2 TP + FP + FN)``.

    Positions of all images count together. A class that is neither there nor predicted does not
    count.
    """

    first = 1
    doubled = 2

    def compute(self) -> Tensor:
        true, false, _, missed, _ = super().compute().unbind(1)
        doubled = self.doubled * true
        return (doubled / (doubled + false + missed))[self.first :].nanmean()  # 0 / 0 without any


class IoU(Dice):
    """The mean over all classes of ``TP / (TP + FP + FN)``, intersection over union."""

    first = 0
    doubled = 1


class Segmenter(Classifier):
    """Train, validate, test and predict with a network that classifies each position.

    As :class:`Classifier`, but labels are masks: int64 ``(B, H, W)``, -1 for positions that do not
    count. Logs ``train/acc``, ``val/acc``, ``test/acc``, the share of positions; ``val/dice``,
    ``val/iou`` and the same of the test.

    Args:
        model: a module ``(B, C, H, W) -> (B, num_classes, H, W)``, or the keywords of
            :func:`revzoo.create_model` for a U-Net, such as ``iunet2d``.
        options: see :class:`Classifier`.

    Example:
        >>> from revzoo.training import Segmenter
        >>> module = Segmenter({"name": "iunet2d", "num_classes": 4}, optim={"lr": 1e-3})
        >>> module(torch.zeros(1, 3, 16, 16)).shape
        torch.Size([1, 4, 16, 16])
    """

    window: tuple[int, ...] | None = None
    """Of an evaluation of volumes: the size of the data's patches."""

    def setup(self, stage: str) -> None:
        super().setup(stage)
        sizes: tuple[int, ...] = getattr(data_of(self.trainer), "sizes", ())
        self.window = sizes if len(sizes) == 3 else None

    def forward(self, images: Tensor) -> Tensor:
        """Logits (B, num_classes, *sizes), in evaluation from windows if a volume is no patch."""
        # in evaluation, volumes from files stay on the CPU
        here = images.shape[2:] == self.window and images.device == self.device
        if self.training or self.window is None or here:
            return super().forward(images)
        return by_windows(super().forward, images, self.window, device=self.device)

    def make_metrics(self) -> nn.ModuleDict:
        options: dict[str, Any] = {
            "num_classes": class_count(self.model),
            "ignore_index": IGNORED,
            "validate_args": False,
        }

        def metrics(split: str) -> MetricCollection:
            found: dict[str, Metric | MetricCollection] = {
                "loss": mean_loss(),
                "acc": MulticlassAccuracy(average="micro", **options),
            }
            if split != "train":
                found |= {"dice": Dice(average=None, **options)}
                found |= {"iou": IoU(average=None, **options)}
            return MetricCollection(found, prefix=f"{split}/", compute_groups=False)

        return by_split(metrics)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The mean loss () of a batch.

        In training the cross-entropy is smoothed and weighted as ``optim`` says.

        Args:
            logits: (B, num_classes, *sizes), float32 or float64.
            labels: int64 (B, *sizes), -1 for positions that do not count.
        """
        options: dict[str, Any] = {"ignore_index": IGNORED}
        if self.training:
            options["label_smoothing"] = self.optim.label_smoothing
            if self.optim.class_weights is not None:
                options["weight"] = self.weights_for(logits)
        entropy = functional.cross_entropy(logits, labels, **options)
        return (entropy + 1 - dice(logits.softmax(1), labels)) / 2


def dice(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The mean over the classes of the soft Dice coefficient of a batch, ().

    Args:
        probabilities: (B, K, *sizes).
        labels: int64 (B, *sizes), -1 for positions that do not count.
    """
    counted = labels != IGNORED
    # (B, *sizes, K), as one_hot returns it
    found = probabilities.movedim(1, -1) * counted.unsqueeze(-1)
    true = functional.one_hot(labels.clamp(min=0), found.shape[-1]) * counted.unsqueeze(-1)
    both, either = (t.flatten(0, -2).sum(0) for t in (found * true, found + true))
    return ((2 * both + _EPSILON) / (either + _EPSILON)).mean()


TASKS: dict[str, type[Classifier]] = {"classification": Classifier, "segmentation": Segmenter}
"""By ``ImageData.task``."""


def task_class(task: Any) -> type[Classifier]:
    """The Lightning module of a task; that of classifiers for states without one."""
    return TASKS.get(task, Classifier) if isinstance(task, str) else Classifier
