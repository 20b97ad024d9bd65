"""Early stopping that survives a resume: after an early stop, a resumed run does not train again.

Why not only Lightning's callback: it saves that it stopped the run, but ignores this after
loading. A run that is killed during its test would train one more epoch when it resumes.
"""

from __future__ import annotations

import logging

from pytorch_lightning import LightningModule, Trainer, callbacks
from pytorch_lightning.callbacks.early_stopping import EarlyStoppingReason

from revzoo._checks import check_count
from revzoo.training.callbacks.checkpoints import direction

log = logging.getLogger(__name__)


class EarlyStopping(callbacks.EarlyStopping):
    """Lightning's callback, with its class name, which is the key of its state in checkpoints.

    The trainer's ``min_epochs`` and ``min_steps`` still apply.

    Args:
        monitor: a logged figure; None for ``val/acc``.
        mode: ``"min"`` or ``"max"``; None for the least loss or error, else the highest figure.
        patience: number of validations without a better figure after which the run stops.
    """

    def __init__(
        self, *, monitor: str | None = None, mode: str | None = None, patience: int = 10
    ) -> None:
        monitor = monitor or "val/acc"
        check_count("patience", patience)
        super().__init__(monitor=monitor, mode=mode or direction(monitor), patience=patience)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # Lightning loads the checkpoint after this
            self.stopping_reason = EarlyStoppingReason.NOT_STOPPED

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._has_stopped and trainer.is_global_zero:
            log.info("early stopping: %s", self.stopping_reason_message)

    # here, because load_state_dict gets no trainer
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.should_stop = trainer.should_stop or self._has_stopped

    @property
    def _has_stopped(self) -> bool:
        return self.stopping_reason != EarlyStoppingReason.NOT_STOPPED
