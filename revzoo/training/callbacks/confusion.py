"""The confusion matrix of a validation, as a picture and as a CSV file in the run's folder.

torchmetrics counts over all processes; an image that a sampler repeats counts once. We draw with
Pillow because torchmetrics' plots need matplotlib, which the package does not require.
"""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics.classification import MulticlassConfusionMatrix

from revzoo._files import replacing_table
from revzoo.training.callbacks.pictures import PictureCallback, add_image, class_names, matrix
from revzoo.training.metrics import count_unrepeated, true_classes

log = logging.getLogger(__name__)


class ConfusionMatrix(PictureCallback):
    """Draws the confusion matrix, tag ``confusion``, and writes it as a CSV file.

    The file belongs to the latest picture: a row per true class, a column per predicted class.

    Args:
        path: the file.
        every_n_epochs: epochs between two pictures.
    """

    def __init__(self, path: str | Path, *, every_n_epochs: int = 5) -> None:
        super().__init__(every_n_epochs=every_n_epochs)
        self.path = Path(path)
        self._metric: MulticlassConfusionMatrix | None = None
        self._counts: Tensor | None = None

    def gather(self, trainer: pl.Trainer, module: Any, logits: Tensor, batch: Any, i: int) -> None:
        # each validation counts from zero
        if i == 0:
            # checks of values would make the host wait for the GPU at every batch
            metric = MulticlassConfusionMatrix(logits.shape[1], validate_args=False)
            self._metric = metric.to(logits.device)
        assert self._metric is not None
        count = count_unrepeated(trainer.val_dataloaders, i, len(logits))
        if count:
            self._metric.update(logits[:count], true_classes(batch[1])[:count])

    def finish_validation(self, trainer: pl.Trainer, module: Any) -> None:
        # in all processes: compute() gathers their counts, show() runs in process 0 only
        if self._metric is not None:
            self._counts = self._metric.compute().cpu()

    def show(self, trainer: pl.Trainer, module: Any, step: int) -> None:
        if self._counts is None:
            return
        names = class_names(trainer, len(self._counts))
        try:
            self._write(names, self._counts.tolist())
        except OSError as error:
            log.error("cannot write %s (%s): the run continues", self.path, error.strerror)
        add_image(trainer, "confusion", matrix(self._counts, names), step)

    def _write(self, names: list[str], rows: list[list[int]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_table(self.path) as file:
            writer = csv.writer(file)
            writer.writerow(["true / predicted", *names])
            writer.writerows([name, *row] for name, row in zip(names, rows, strict=True))
