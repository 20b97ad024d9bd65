"""Early stopping that survives a resume: a run that it ended is not trained further.

Why not Lightning's callback alone: it saves that it ended the run but does not look at it after
loading. A run that is killed in its test and resumed would train for another epoch first.
"""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's callback; the same class name keeps the name of its state in checkpoints.

    ``min_epochs`` and ``min_steps`` of the trainer still count.
    """

    _ended = False  # as the loaded checkpoint says

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._ended = False  # what a checkpoint says is loaded after this

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._ended = self.stopping_reason != EarlyStoppingReason.NOT_STOPPED

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.stopping_reason != EarlyStoppingReason.NOT_STOPPED and trainer.is_global_zero:
            log.info("early stopping: %s", self.stopping_reason_message)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self._ended
