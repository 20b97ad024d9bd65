"""The figures of a training epoch, given to Lightning once in it.

Lightning computes a metric that it was given when the epoch ends. To give it the same one again at
every step, as is usual, costs small networks about one percent of their time.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from revzoo.training.metrics import log_metrics


class EpochFigures(pl.Callback):
    """Logs the module's ``training_metrics`` as ``train/NAME``, if its steps update them."""

    def __init__(self) -> None:
        self._logged = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._logged = False

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if self._logged:
            return
        self._logged = True
        metrics = pl_module.training_metrics()  # type: ignore[operator]
        log_metrics(pl_module, "train", {k: m for k, m in metrics.items() if m.update_called})
