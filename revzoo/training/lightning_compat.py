"""Every use of Lightning's private parts, with its reason.

The only other use is ``batches_of_epoch`` in :mod:`revzoo.data.order`, a floor below.

Written for pytorch-lightning 2.6, which ``pyproject.toml`` pins. ``test_lightning_compat.py`` fails
if a later release changes one of these parts.
"""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from typing import Any, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.trainer.states import TrainerFn
from torch.optim.swa_utils import AveragedModel

from revzoo.data.order import batches_of_epoch as batches_of_epoch

Kind = TypeVar("Kind", bound=pl.Callback)


def batches_of_run(trainer: pl.Trainer) -> int:
    """Training batches of the run so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def epochs_of_run(trainer: pl.Trainer) -> int:
    """Finished epochs of the run so far; ``current_epoch`` misses the last one of a finished run.

    A state saved at the end of an epoch counts it as processed, but not yet as completed.
    """
    progress: Any = trainer.fit_loop.epoch_progress.current  # Lightning's type is too general
    return int(progress.processed)


def batches_of_step(trainer: pl.Trainer) -> int | None:
    """The batches whose gradients the optimiser step after this batch sums; None if none follows.

    The last step of an epoch sums what is left.
    """
    if trainer.fit_loop._should_accumulate():
        return None
    count = trainer.accumulate_grad_batches
    return batches_of_epoch(trainer) % count or count


def epoch_is_open(trainer: pl.Trainer) -> bool:
    """Whether an epoch is in progress: a state saved now resumes inside it."""
    epochs: Any = trainer.fit_loop.epoch_progress.current
    # Lightning counts an epoch as processed before on_train_epoch_end, as completed after it
    return bool(epochs.processed == epochs.completed)


def count_epochs(trainer: pl.Trainer) -> None:
    """Resume by epochs, even in a run of ``max_steps``.

    Otherwise Lightning ends the current epoch once more when it resumes. It counts the epoch twice,
    and all later epochs draw different images.
    """
    assert hasattr(trainer.fit_loop, "_iteration_based_training"), "Lightning 2.6 has it"
    trainer.fit_loop._iteration_based_training = lambda: False  # type: ignore[method-assign]


def is_fitting(trainer: pl.Trainer) -> bool:
    """Whether the trainer runs ``fit``, its validations included."""
    return trainer.state.fn == TrainerFn.FITTING


def started_processes(trainer: pl.Trainer) -> list[subprocess.Popen[bytes]]:
    """The processes that Lightning has started from this one for the run."""
    launcher = trainer.strategy.launcher
    return list(launcher.procs) if isinstance(launcher, _SubprocessScriptLauncher) else []


def stop_watching(trainer: pl.Trainer) -> None:
    """Stop Lightning's watchdog over the processes that it has started.

    It kills this process if one of them ends with an error, even while this process is ending
    for the same reason.
    """
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        # the watchdog polls this list, and ends when it is empty
        launcher.procs.clear()


def allow_unused_parameters(trainer: pl.Trainer) -> None:
    """Let DistributedDataParallel, if the trainer uses it, train parameters without a gradient.

    Lightning takes the option only with the name of the strategy, which it then starts on one
    device, too.
    """
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._ddp_kwargs.setdefault("find_unused_parameters", True)


class _Refuses:
    """In a trainer's place."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the network or the loss reads the trainer ({name})")


@contextlib.contextmanager
def without_trainer(module: pl.LightningModule) -> Iterator[None]:
    """A context in which ``module`` cannot read its trainer, nor log."""
    trainer: Any = module._trainer
    module._trainer = _Refuses()  # type: ignore[assignment]
    try:
        yield
    finally:
        module._trainer = trainer


def all_callbacks(trainer: pl.Trainer) -> list[pl.Callback]:
    """The trainer's own list; Lightning sets it where mypy does not see it."""
    callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return callbacks


def callbacks_of(trainer: pl.Trainer, kind: type[Kind]) -> list[Kind]:
    """The trainer's callbacks of a class."""
    return [c for c in all_callbacks(trainer) if isinstance(c, kind)]


def data_of(trainer: pl.Trainer) -> Any:
    """The trainer's data module, or None; Lightning sets it where mypy does not see it."""
    return trainer.datamodule  # type: ignore[attr-defined]


def average_of(callback: WeightAveraging) -> AveragedModel:
    """The average of Lightning's callback, and the count of its updates; after its ``setup``."""
    average = callback._average_model
    assert average is not None, "setup makes it"
    return average


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer of ``module``, or None; the public property raises without one."""
    return module._trainer
