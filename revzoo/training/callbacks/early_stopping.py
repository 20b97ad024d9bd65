"""An early end that lasts: a run that it has ended is not trained further when it goes on.

Why not Lightning's own callback alone: it saves what it has counted and that it has ended the run,
but nothing looks at that after loading. A run that was killed in its test, and resumed for that,
would be trained for another epoch first.
"""

from __future__ import annotations

import logging
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning import callbacks
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's, of the same name, as its state is filed under that in a checkpoint.

    A run that was to train for some epochs or steps at least goes on until it has, as before.
    """

    _ended = False  # according to what was loaded

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._ended = False  # a training of which nothing is loaded begins anew

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._ended = self.stopping_reason != EarlyStoppingReason.NOT_STOPPED

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.stopping_reason != EarlyStoppingReason.NOT_STOPPED and trainer.is_global_zero:
            log.info("early stopping: %s", self.stopping_reason_message)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self._ended
