"""Logs the figures of a training epoch once, when Lightning computes them."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torchmetrics import MetricCollection

from revzoo.training.metrics import log_metrics


class EpochFigures(pl.Callback):
    """Logs ``metrics_of("train")`` as ``train/NAME``, if its steps update them."""

    def __init__(self) -> None:
        self._logged = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        # once per epoch: Lightning computes the logged metrics at its end
        if self._logged:
            return
        # before the check: a module that does not use the metrics never will
        self._logged = True
        metrics: MetricCollection = pl_module.metrics_of("train")  # type: ignore[operator]
        if all(metric.update_called for metric in metrics.values()):
            log_metrics(pl_module, metrics)
