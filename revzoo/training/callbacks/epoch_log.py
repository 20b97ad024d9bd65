"""One log line per epoch: a run's curve can be read from its log file, without any viewer."""

from __future__ import annotations

import logging

import pytorch_lightning as pl

log = logging.getLogger(__name__)

FIGURES = {
    "train/loss": "{:.4f}",
    "train/acc": "{:.4f}",
    "val/loss": "{:.4f}",
    "val/acc": "{:.4f}",
    "footprint/epoch_seconds": "{:.1f}",
    "footprint/images_per_second": "{:.0f}",
}


class EpochLog(pl.Callback):
    """Logs the figures of every epoch at level INFO, from the first process only.

    The figures of a validation stand in the line of its epoch only.
    """

    def __init__(self) -> None:
        self._validated = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = trainer.callback_metrics  # in all processes: they gather the figures together
        if not trainer.is_global_zero:
            return
        parts = [
            f"{name.removeprefix('footprint/')} {form.format(float(figures[name]))}"
            for name, form in FIGURES.items()
            if name in figures and (self._validated or not name.startswith("val/"))
        ]
        log.info("epoch %d: %s", trainer.current_epoch, ", ".join(parts))
