"""One log line per epoch: the log file shows a run's curve without a viewer.

epoch 3/30  loss 0.733, val 0.150  acc 0.931, val 0.979  298 img/s
"""

from __future__ import annotations

import logging

import pytorch_lightning as pl

from revzoo.training.callbacks.progress_bar import epoch_of, per_second

log = logging.getLogger(__name__)


class EpochLog(pl.Callback):
    """Logs the figures of every epoch at level INFO, from the first process only.

    The figures of a validation appear in the line of its epoch only.
    """

    def __init__(self) -> None:
        self._validated = False

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        figures = trainer.callback_metrics  # reduces over all processes, so each must call it
        if not trainer.is_global_zero:
            return
        parts = []
        for name in ("loss", "acc"):
            # callback_metrics keeps an earlier validation's figures; the line must not repeat them
            pairs = [(name, f"train/{name}")] + [("val", f"val/{name}")] * self._validated
            texts = [f"{word} {float(figures[key]):.3f}" for word, key in pairs if key in figures]
            parts.append(", ".join(texts))
        if (rate := figures.get("footprint/images_per_second")) is not None:
            parts.append(per_second(float(rate)))
        log.info("epoch %s  %s", epoch_of(trainer), "  ".join(filter(None, parts)))
