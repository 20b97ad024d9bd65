"""Mean loss and accuracies over all images of a split, batches and processes.

Lightning computes training metrics once per epoch, at its end.

An image that is evaluated twice counts once: Lightning gives the loaders of validation and test a
``DistributedSampler``, which repeats the first images to fill the last round.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.utils.data import DistributedSampler
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassStatScores

ORDER = ("loss", "acc", "balanced_acc", "acc5", "dice", "iou")


class BalancedAccuracy(MulticlassStatScores):
    """The mean over the classes of the share of their images that are classified correctly.

    A class without images does not count, as in scikit-learn's ``balanced_accuracy_score``.
    Torchmetrics' macro average counts it as 0 if an image is taken for it.
    """

    def compute(self) -> Tensor:
        counts = super().compute()  # (classes, 5): true positives first, images last
        # 0 / 0 for a class without images
        return (counts[:, 0] / counts[:, -1]).nanmean()


def mean_loss() -> Metric:
    """The mean over the images."""
    # no checks of values: reading them at every step would make the host wait for the GPU
    return MeanMetric(nan_strategy="disable")


def by_split(metrics: Callable[[str], MetricCollection]) -> nn.ModuleDict:
    """The metrics of ``train``, ``val`` and ``test``."""
    # a ModuleDict refuses the key "train": nn.Module has a method of that name
    return nn.ModuleDict({f"{split}_metrics": metrics(split) for split in ("train", "val", "test")})


def make_metrics(num_classes: int) -> nn.ModuleDict:
    """Mean loss and accuracy of each split; of validation and test also balanced and top-5."""

    def metrics(split: str) -> MetricCollection:
        options: dict[str, Any] = {"num_classes": num_classes, "validate_args": False}
        by_name: dict[str, Any] = {"loss": mean_loss()}
        for k in (1, 5) if num_classes > 5 and split != "train" else (1,):
            name = "acc" if k == 1 else f"acc{k}"
            by_name[name] = MulticlassAccuracy(top_k=k, average="micro", **options)
        if split != "train":
            by_name["balanced_acc"] = BalancedAccuracy(average=None, **options)
        return MetricCollection(by_name, prefix=f"{split}/", compute_groups=False)

    return by_split(metrics)


def in_order(figures: Mapping[str, float]) -> dict[str, float]:
    """Sort figures by :data:`ORDER`; Lightning sorts them by name."""
    places = {name: i for i, name in enumerate(ORDER)}
    ordered = sorted(figures, key=lambda n: places.get(n.rpartition("/")[2], len(ORDER)))
    return {name: figures[name] for name in ordered}


def update_metrics(metrics: MetricCollection, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
    """Add a batch: its mean loss (), logits (B, num_classes) and labels, as in the batch."""
    # one loss per image: MeanMetric ignores weights if it does not check values
    losses = loss.detach().expand(len(labels))
    where = next(iter(metrics.values())).device  # the logits of windows are on the CPU
    true = true_classes(labels).to(where)
    metrics.update(value=losses, preds=logits.detach().to(where), target=true)


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
        # the other processes do not compute at this moment
        copy.sync_on_compute = False
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
