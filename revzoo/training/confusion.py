"""The confusion matrix of each validation, as a picture and as a table in the run's folder.

torchmetrics counts, in all processes together. A ``DistributedSampler`` repeats images until every
process has as many; the repeated ones are left out here, so that the counts are those of the split.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torch.utils.data import DistributedSampler
from torchmetrics.classification import MulticlassConfusionMatrix

from revzoo.training.pictures import matrix
from revzoo.training.showing import Shown, add_image, class_names, true_classes


class ConfusionMatrix(Shown):
    """How often each class was taken for each: tag ``confusion``, and a CSV file.

    The file has a row per true class and a column per predicted one, of the last showing.

    Args:
        path: the file.
        every_n_epochs: epochs between two showings.
    """

    def __init__(self, path: Path, *, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs=every_n_epochs)
        self.path = path
        self._metric: MulticlassConfusionMatrix | None = None
        self._left = 0  # images of this process that are no repetitions
        self._counts: Tensor | None = None

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        if i == 0:
            metric = MulticlassConfusionMatrix(logits.shape[1], validate_args=False)
            self._metric, self._left = metric.to(logits.device), _own_images(trainer)
        assert self._metric is not None
        labels = true_classes(batch[1])[: self._left]
        if len(labels):
            self._metric.update(logits[: self._left], labels)
        self._left -= len(labels)

    def gathered(self, trainer: pl.Trainer, module: Any) -> None:
        if self._metric is not None:
            self._counts = self._metric.compute().cpu()

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if self._counts is None:
            return
        names = class_names(trainer, len(self._counts))
        self._write(names, self._counts.tolist())
        add_image(trainer, "confusion", matrix(self._counts, names), step)

    def _write(self, names: list[str], rows: list[list[int]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(".tmp")
        with temporary.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["true / predicted", *names])
            writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
        temporary.replace(self.path)


def _own_images(trainer: pl.Trainer) -> int:
    """How many images of this process's part of the split come before the repeated ones."""
    loaders = trainer.val_dataloaders
    loader = loaders[0] if isinstance(loaders, list | tuple) else loaders
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return sys.maxsize
    return len(range(sampler.rank, len(sampler.dataset), sampler.num_replicas))  # type: ignore[arg-type]
