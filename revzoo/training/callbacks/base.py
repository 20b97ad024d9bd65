"""Base classes of callbacks, and the steps at which callbacks measure."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch import nn

from revzoo.training.lightning_compat import is_fitting


class ChecksModel(Callback, ABC):
    """A callback with a requirement on the network, which a run checks before it begins."""

    @abstractmethod
    def check_model(self, network: nn.Module) -> None:
        """Raise a ValueError if the network does not fit; called again when training starts."""


class MeasuresSteps(Callback, ABC):
    """A callback that collects figures during a training step."""

    @abstractmethod
    def restart(self) -> None:
        """Forget the figures of a step that failed: it is computed again."""


def is_nth_step(trainer: Trainer, every_n_steps: int) -> bool:
    """Whether the next optimiser step is the n-th, the 2n-th and so on (``every_n_steps``)."""
    return (trainer.global_step + 1) % every_n_steps == 0


class FollowsEpochs(Callback, ABC):
    """A callback that prepares each epoch.

    Lightning skips ``on_train_epoch_start`` if a run resumes inside an epoch, so we also prepare
    when training starts. A new run prepares its first epoch twice.
    """

    @abstractmethod
    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prepare the epoch, or the rest of it."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_epoch(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin_epoch(trainer, pl_module)


class TimesEpochs(FollowsEpochs):
    """Counts the images and the seconds of an epoch, without its validations.

    If a run resumes inside an epoch, it counts the part after the resume.
    """

    images = 0  # of all processes
    _began = _paused = 0.0

    def now(self, pl_module: LightningModule) -> float:
        """Seconds on the clock."""
        return time.perf_counter()

    def seconds(self, pl_module: LightningModule) -> float:
        """Seconds of the epoch so far."""
        return self.now(pl_module) - self._began

    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.images, self._began = 0, self.now(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.images += len(batch[0]) * trainer.world_size

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._paused = self.now(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._began += self.now(pl_module) - self._paused


class RestoresAfterFit(Callback, ABC):
    """Restores the module after ``fit``. Lightning calls ``teardown`` only if no error occurred."""

    @abstractmethod
    def undo(self, pl_module: LightningModule) -> None:
        """Restore ``pl_module``; called once or twice, possibly before the first change."""

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self.undo(pl_module)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        # an exception in a test has nothing to restore: fit has ended by then
        if is_fitting(trainer):
            self.undo(pl_module)
