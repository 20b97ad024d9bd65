"""Callbacks of every run: they log the training figures, and validate the last weights."""

from __future__ import annotations

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torchmetrics import MetricCollection

from revzoo.training.metrics import log_metrics


class EpochFigures(Callback):
    """Logs ``metrics_of("train")`` as ``train/NAME``, if the steps update them."""

    _logged_in: int | None = None  # the epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # once per epoch: Lightning computes the logged metrics at its end
        if self._logged_in == trainer.current_epoch:
            return
        # before the check: a module that does not use the metrics never will
        self._logged_in = trainer.current_epoch
        metrics: MetricCollection = pl_module.metrics_of("train")  # type: ignore[operator]
        if all(metric.update_called for metric in metrics.values()):
            log_metrics(pl_module, metrics)


class LastStep(Callback):
    """Asks the trainer to stop at ``max_steps``, which runs a validation if the epoch has one.

    Lightning 2.6 ends such an epoch without a validation: the final weights could never be the
    best, and the final figures would belong to an earlier epoch.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            # Lightning validates before it obeys this, but not when it reaches max_steps by itself
            trainer.should_stop = True
