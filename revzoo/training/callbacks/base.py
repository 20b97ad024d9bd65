"""Callbacks that change a module for the time of a training, and undo that at any end of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytorch_lightning as pl
from pytorch_lightning.trainer.states import TrainerFn


class UndoneAfterFit(pl.Callback, ABC):
    """Undoes what it has done when a training is over; Lightning tears down only after success."""

    @abstractmethod
    def undo(self, pl_module: pl.LightningModule) -> None:
        """Leave ``pl_module`` as it was; called once or twice, also where nothing was done yet."""

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.undo(pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self.undo(pl_module)
