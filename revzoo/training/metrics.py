"""Figures of a run: torchmetrics' interface, constant memory, no values read in a training step.

Training figures are logged once per epoch, at its end. An image that is evaluated twice counts
once: Lightning gives the loaders of validation and test a ``DistributedSampler``, which repeats the
first images to fill the last round.

Why not torchmetrics' own classes for most figures: its macro averages count a class without images
as 0, its calibration error keeps all predictions, its binned curves (thresholds evenly spaced in
the probability) see nothing of a class whose probabilities are all below 1/200, and few of them
give the figures of each class beside the mean. Here one state serves all figures of a kind.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.utils.data import DistributedSampler
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy

from revzoo.training.figure_names import ORDER
from revzoo.training.tasks.losses import IGNORED

BINS = 600  # of the log odds: 0.05 each
LARGEST = 15.0  # of the log odds that a bin tells apart: a probability of 1 - 3e-7
CONFIDENCES = 15  # bins of the calibration error, as in C. Guo et al. 2017 (arXiv 1706.04599)


class PerClass(Metric):
    """A figure of each class, label or target, and their mean; an undefined one does not count.

    Attributes:
        values: (C,), of the last ``compute``.
    """

    full_state_update = False
    higher_is_better = True
    values: Tensor | None = None
    first = 0  # the first class that counts in the mean

    def of_each(self) -> Tensor:
        """The figures (C,), NaN where undefined."""
        raise NotImplementedError

    def compute(self) -> Tensor:
        values = self.values = self.of_each()
        return values[self.first :].nanmean()


class Rate(PerClass):
    """A share of right decisions: the likeliest class, or labels with a probability above 0.5.

    Args:
        figure: a name of :data:`RATES`.
        count: of classes or labels.
        labels: whether each image has several labels.
        second: whether of two classes the second one alone counts, the "positive" one.
    """

    counts: Tensor  # true and false positives, true and false negatives: (4, C)

    def __init__(
        self, figure: str, count: int, *, labels: bool = False, second: bool = False
    ) -> None:
        super().__init__()
        self.figure, self.labels = figure, labels
        self.first = int(second and count == 2)
        self.add_state("counts", torch.zeros(4, count, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add logits (B, C), and labels as in the batch."""
        count = preds.shape[1]
        found = preds > 0 if self.labels else one_hot(preds.argmax(1), count).bool()
        true = target > 0.5 if self.labels else one_hot(target, count).bool()
        cells = found & true, found & ~true, ~found & ~true, ~found & true
        self.counts = self.counts + torch.stack([cell.sum(0) for cell in cells])

    def of_each(self) -> Tensor:
        return RATES[self.figure](*self.counts.float())


RATES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "accuracy": lambda tp, fp, tn, fn: (tp + tn) / (tp + fp + tn + fn),
    "recall": lambda tp, fp, tn, fn: tp / (tp + fn),
    "specificity": lambda tp, fp, tn, fn: tn / (tn + fp),
    "balanced": lambda tp, fp, tn, fn: (tp / (tp + fn) + tn / (tn + fp)) / 2,
    "f1": lambda tp, fp, tn, fn: 2 * tp / (2 * tp + fp + fn),
}
"""From true and false positives, true and false negatives of each class."""


class Curve(PerClass):
    """A figure of a class against all others at every threshold: of bins of the log odds.

    Probabilities in one bin are equal: near 0.5 those that differ by less than 0.0125. So a network
    whose probabilities are nearly constant gets a coarse figure.
    """

    bins: Tensor  # images of the others, and of the class: (2, C, BINS)

    def __init__(self, count: int, *, labels: bool = False, second: bool = False) -> None:
        super().__init__()
        self.labels, self.first = labels, int(second and count == 2)
        bins = torch.zeros(2, count, BINS, dtype=torch.long)
        self.add_state("bins", bins, dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """As :meth:`Rate.update`."""
        count = preds.shape[1]
        odds = preds if self.labels else preds.softmax(1).logit()
        true = target > 0.5 if self.labels else one_hot(target, count)
        scaled = (odds.clamp(-LARGEST, LARGEST) / LARGEST + 1) / 2 * BINS
        place = scaled.nan_to_num(0).long().clamp(0, BINS - 1)
        classes = torch.arange(count, device=preds.device)
        index = ((true.long() * count + classes) * BINS + place).flatten()
        flat = self.bins.flatten().scatter_add(0, index, torch.ones_like(index))
        self.bins = flat.view_as(self.bins)


class AUROC(Curve):
    """The area under the ROC curve: how often an image of the class gets the larger probability."""

    def of_each(self) -> Tensor:
        others, own = self.bins  # whole numbers: sums of floats are not deterministic on a GPU
        pairs = 2 * others.cumsum(1) - others  # equal probabilities count half
        return (own * pairs).sum(1) / (2 * others.sum(1) * own.sum(1))


class AveragePrecision(Curve):
    """The mean of the precision at each image of the class, ranked by probability."""

    def of_each(self) -> Tensor:
        others, own = self.bins.flip(2)
        found = own.cumsum(1)
        precision = found / (found + others.cumsum(1)).clamp(min=1)
        return (own * precision).sum(1) / own.sum(1)


class CalibrationError(PerClass):
    """The mean distance of probability and frequency: of the likeliest class, or of each label."""

    higher_is_better = False
    sums: Tensor  # numbers, probabilities and frequencies: (3, C, CONFIDENCES)

    def __init__(self, count: int = 1, *, labels: bool = False) -> None:
        super().__init__()
        self.labels = labels
        self.add_state("sums", torch.zeros(3, count, CONFIDENCES), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """As :meth:`Rate.update`."""
        if self.labels:
            shares, true = preds.sigmoid(), target
        else:
            shares, found = preds.softmax(1).max(1, keepdim=True)
            true = found == target[:, None]
        shares = shares.nan_to_num(0).float()
        place = (shares * CONFIDENCES).long().clamp(0, CONFIDENCES - 1)
        index = torch.arange(shares.shape[1], device=preds.device) * CONFIDENCES + place
        rows = torch.stack([torch.ones_like(shares), shares, true.float()]).flatten(1)
        flat = self.sums.flatten(1).scatter_add(1, index.flatten().expand(3, -1), rows)
        self.sums = flat.view_as(self.sums)

    def of_each(self) -> Tensor:
        number, shares, true = self.sums
        return (shares - true).abs().sum(1) / number.sum(1)


class Residual(PerClass):
    """An error of predicted numbers (B, K), for each target."""

    higher_is_better = False
    sums: Tensor  # of absolute and squared errors, of targets and their squares: (4, K)
    number: Tensor

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("sums", torch.zeros(4, count), dist_reduce_fx="sum")
        self.add_state("number", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add predictions and true values (B, K), both less the mean of the training rows."""
        error = preds - target
        parts = torch.stack([error.abs(), error.square(), target, target.square()])
        self.sums = self.sums + parts.sum(1).float()
        self.number = self.number + len(preds)


class MAE(Residual):
    """The mean absolute error."""

    def of_each(self) -> Tensor:
        return self.sums[0] / self.number


class RMSE(Residual):
    """The root of the mean squared error."""

    def of_each(self) -> Tensor:
        return (self.sums[1] / self.number).sqrt()


class R2(Residual):
    """The share of the variance that is explained: 1 less the squared errors over it."""

    higher_is_better = True

    def of_each(self) -> Tensor:
        _, errors, sums, squares = self.sums
        return 1 - errors / (squares - sums.square() / self.number)


class SurfaceDistance(PerClass):
    """A distance between the borders of a class in mask and prediction, in pixels or millimetres.

    The mean over the images. An image without the class in both does not count. One with the class
    in only one of them counts with its diagonal, since there is no distance. The first class, the
    background, is left out; pixels that do not count have no class.

    Args:
        count: of classes.
        spacing: distance of neighbours along each axis; None for 1.
    """

    higher_is_better = False
    first = 1
    row: int  # of the figure in the sums
    sums: Tensor  # of both figures over the images, and the number of images: (3, C)

    def __init__(self, count: int, spacing: Sequence[float] | None = None) -> None:
        super().__init__()
        self.spacing = spacing
        self.add_state("sums", torch.zeros(3, count), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the classes that were found and the true ones, int64 (B, *sizes)."""
        from monai.metrics.utils import get_mask_edges, get_surface_distance  # takes seconds

        rows = torch.zeros_like(self.sums, device="cpu")
        found = preds.where(target != IGNORED, IGNORED).cpu()
        spacing = self.spacing or [1.0] * (target.dim() - 1)
        distances = partial(get_surface_distance, spacing=spacing)
        diagonal = math.hypot(*(n * s for n, s in zip(target.shape[1:], spacing, strict=True)))
        for here, true in zip(found, target.cpu(), strict=True):
            for label in {*here.unique().tolist(), *true.unique().tolist()} - {0, IGNORED}:
                masks = here == label, true == label
                mean = largest = torch.tensor(diagonal)
                if all(mask.any() for mask in masks):
                    a, b = get_mask_edges(*masks)
                    both = [torch.as_tensor(distances(x, y)) for x, y in ((a, b), (b, a))]
                    mean, largest = torch.cat(both).mean(), max(d.quantile(0.95) for d in both)
                rows[:, label] += torch.stack([mean, largest, torch.tensor(1.0)])
        self.sums = self.sums + rows.to(self.sums)

    def of_each(self) -> Tensor:
        return self.sums[self.row] / self.sums[2]


class ASSD(SurfaceDistance):
    """The average symmetric surface distance: the mean over both borders."""

    row = 0


class HD95(SurfaceDistance):
    """The 95th percentile of the distances from a border to the other, the larger of both."""

    row = 1


class Positions(PerClass):
    """A figure of masks; -1 does not count."""

    counts: Tensor  # positions of each class: found rightly, found, true: (3, C)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.add_state("counts", torch.zeros(3, count, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Add the classes that were found and the true ones, int64 (B, *sizes)."""
        count = self.counts.shape[1]
        index = ((target + 1) * count + preds).flatten()  # the first row is for -1
        cells = self.counts.new_zeros((count + 1) * count)
        cells = cells.scatter_add(0, index, torch.ones_like(index)).view(-1, count)[1:]
        self.counts = self.counts + torch.stack([cells.diagonal(), cells.sum(0), cells.sum(1)])


class PositionAccuracy(Positions):
    """The share of positions with the right class; it has no figures of classes."""

    def compute(self) -> Tensor:
        right, _, true = self.counts.sum(1)
        return right / true


class Dice(Positions):
    """The mean over the classes but the first, the background, of ``2 TP / (2 TP + FP + FN)``.

    Positions of all images count together. A class that is neither there nor predicted does not
    count.
    """

    first = 1

    def of_each(self) -> Tensor:
        right, found, true = self.counts
        return 2 * right / (found + true)  # 0 / 0 without any


class IoU(Positions):
    """The mean over all classes of ``TP / (TP + FP + FN)``, intersection over union."""

    def of_each(self) -> Tensor:
        right, found, true = self.counts
        return right / (found + true - right)


SHARED = (Rate, Curve, Residual, Positions, SurfaceDistance)  # figures of one kind have one state


def by_split(figures: Callable[[bool], Mapping[str, Metric]]) -> nn.ModuleDict:
    """The mean loss and the figures of each split; the argument is false for ``train``."""

    def collection(split: str) -> MetricCollection:
        # no checks of values: reading them at every step would make the host wait for the GPU
        by_name: dict[str, Any] = {"loss": MeanMetric(nan_strategy="disable")}
        by_name |= figures(split != "train")
        groups: dict[object, list[str]] = {}
        for name, metric in by_name.items():
            kind = next((kind for kind in SHARED if isinstance(metric, kind)), name)
            groups.setdefault(kind, []).append(name)
        # torchmetrics would find these groups itself, by reading states after the first batch
        return MetricCollection(by_name, prefix=f"{split}/", compute_groups=[*groups.values()])

    # a ModuleDict refuses the key "train": nn.Module has a method of that name
    splits = ("train", "val", "test")
    return nn.ModuleDict({f"{split}_metrics": collection(split) for split in splits})


def classification_figures(num_classes: int, evaluated: bool) -> dict[str, Metric]:
    """The accuracy; of validation and test all figures of classes."""
    options: dict[str, Any] = {"num_classes": num_classes, "validate_args": False}
    by_name: dict[str, Metric] = {"acc": MulticlassAccuracy(average="micro", **options)}
    if evaluated and num_classes > 5:
        by_name["acc5"] = MulticlassAccuracy(top_k=5, average="micro", **options)
    if evaluated:
        by_name |= {
            "balanced_acc": Rate("recall", num_classes),
            "sensitivity": Rate("recall", num_classes, second=True),
            "specificity": Rate("specificity", num_classes, second=True),
            "f1": Rate("f1", num_classes),
            "auroc": AUROC(num_classes),
            "ap": AveragePrecision(num_classes, second=True),
            "ece": CalibrationError(),
        }
    return by_name


def in_order(figures: Mapping[str, float]) -> dict[str, float]:
    """Sort figures by :data:`~revzoo.training.figure_names.ORDER`; Lightning sorts them by name."""
    places = {name: i for i, name in enumerate(ORDER)}
    ordered = sorted(figures, key=lambda n: places.get(n.rpartition("/")[2], len(ORDER)))
    return {name: figures[name] for name in ordered}


def log_metrics(module: pl.LightningModule, metrics: MetricCollection) -> None:
    """Log ``metrics`` as ``SPLIT/NAME``; Lightning computes them when the epoch ends."""
    module.log_dict(metrics, prog_bar=True, on_step=False, on_epoch=True, batch_size=1)


def so_far(metrics: MetricCollection) -> dict[str, float]:
    """The figures of this process's batches so far; empty before the first batch.

    Computes copies: the metrics would wait for the other processes and cache the result.
    """
    if not all(metric.update_called for metric in metrics.values()):
        return {}
    figures = {}
    for name, metric in metrics.items(keep_base=False):
        copy = metric.clone()
        # the others do not compute now; only a metric's constructor reads sync_on_compute
        copy.distributed_available_fn = lambda: False
        figures[str(name)] = float(copy.compute())
    return figures


def true_classes(labels: Tensor) -> Tensor:
    """Labels (B,) or masks, from these or from class probabilities (B, num_classes)."""
    return labels.argmax(1) if labels.is_floating_point() else labels


def count_unrepeated(loaders: Any, batch_idx: int, size: int) -> int:
    """How many of the ``size`` images at the start of a batch no sampler has repeated.

    ``loaders`` are the trainer's for validation or test; the first one counts.
    """
    # Lightning passes a list only if there are several
    loader = loaders[0] if isinstance(loaders, list | tuple) else loaders
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return size
    # process r gets the images r, r + n, r + 2 n, ...; repeated ones come after the last
    share = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
    return max(0, min(size, len(share) - batch_idx * loader.batch_size))
