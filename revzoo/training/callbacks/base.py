"""Base class of callbacks that change a module for training and restore it afterwards."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytorch_lightning as pl
from torch import nn

from revzoo.training.lightning_compat import is_fitting


class ChecksModel(pl.Callback, ABC):
    """A callback with a requirement on the network, which a run checks before it begins."""

    @abstractmethod
    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError if the network does not fit; called again when training starts."""


class RestoresAfterFit(pl.Callback, ABC):
    """Restores the module after ``fit``. Lightning calls ``teardown`` only if no error occurred."""

    @abstractmethod
    def undo(self, pl_module: pl.LightningModule) -> None:
        """Restore ``pl_module``; called once or twice, possibly before the first change."""

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            self.undo(pl_module)

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        # an exception in a test has nothing to restore: fit has ended by then
        if is_fitting(trainer):
            self.undo(pl_module)
