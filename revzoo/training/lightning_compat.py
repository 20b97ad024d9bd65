"""Lightning's private parts, each with the reason for its use; its processes and its messages.

The only other use is ``batches_of_epoch`` in :mod:`revzoo.data.order`, a floor below.

Written for pytorch-lightning 2.6, which ``pyproject.toml`` pins. ``test_lightning_compat.py`` fails
if a later release changes one of these parts.
"""

from __future__ import annotations

import logging
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from pytorch_lightning.strategies import DDPStrategy
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from pytorch_lightning.trainer.states import TrainerFn
from torch import distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import AveragedModel

from revzoo._checks import UserError
from revzoo._checks import is_first_process as is_first_process
from revzoo.data.order import batches_of_epoch as batches_of_epoch

Kind = TypeVar("Kind", bound=pl.Callback)
T = TypeVar("T")

WAIT = 10.0  # seconds until a process that should end is killed

EXPECTED_WARNINGS = (
    ".*does not have many workers.*",  # data in memory load fastest without workers
    ".*LeafSpec.*is deprecated.*",  # by torch 2.15; Lightning 2.6 uses it
    "The number of training batches .* is smaller than the logging interval",  # of small data sets
    "You requested to overfit",  # debug=overfit does so on purpose
    "It is recommended to use `self.log.'footprint/",  # only the first process logs it
    "Using `DistributedSampler` with",  # metrics.py excludes repeated images
    "Checkpoint directory .* exists and is not empty",  # a resumed run has checkpoints
    "FSDP2-wrapped module .* returned a view",  # whose changes in place a step refuses
    "Found .* in eval mode at the start of training",  # fine-tuning freezes modules in a search
)


def batches_of_run(trainer: pl.Trainer) -> int:
    """Training batches of the run so far, over all epochs."""
    return trainer.fit_loop.epoch_loop.batch_progress.total.ready


def epochs_of_run(trainer: pl.Trainer) -> int:
    """Finished epochs of the run; ``current_epoch`` misses the last one of a finished run."""
    progress: Any = trainer.fit_loop.epoch_progress.current  # Lightning's type is too general
    return int(progress.processed)


def batches_of_step(trainer: pl.Trainer) -> int | None:
    """The batches that the optimiser step after this batch sums; None if none follows."""
    if trainer.fit_loop._should_accumulate():
        return None
    count = trainer.accumulate_grad_batches
    return batches_of_epoch(trainer) % count or count


def logs_step(trainer: pl.Trainer) -> bool:
    """Whether the loggers write the figures of this training step."""
    return trainer._logger_connector.should_update_logs


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


def allow_unused_parameters(trainer: pl.Trainer) -> None:
    """Let DistributedDataParallel, if the trainer uses it, train parameters without a gradient."""
    # Lightning takes the option only with the strategy's name, which it then starts on one device
    if isinstance(trainer.strategy, DDPStrategy):
        trainer.strategy._ddp_kwargs.setdefault("find_unused_parameters", True)


def check_accumulation(trainer: pl.Trainer) -> None:
    """Refuse a static graph of DistributedDataParallel whose first step sums several batches."""
    options = getattr(trainer.strategy, "_ddp_kwargs", {})
    if options.get("static_graph") and (count := trainer.accumulate_grad_batches) > 1:
        raise ValueError(
            f"static_graph=True with accumulate_grad_batches={count}: torch fails in the first "
            "step, in which it looks for the graph; leave one of them out"
        )


def limit_waits(trainer: pl.Trainer, seconds: float) -> None:
    """Let a collective operation fail if a process does not join it within ``seconds``."""
    # set here for the same reason; strategies for one device have no process group
    if hasattr(trainer.strategy, "_timeout"):
        trainer.strategy._timeout = timedelta(seconds=seconds)


class LostProcessError(UserError):
    """Another process of the run has ended, or cannot be reached."""


@contextmanager
def lost_processes(hint: Callable[[], str]) -> Iterator[None]:
    """Turn a failed collective operation into a :class:`LostProcessError`, ending in ``hint()``."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no class for its errors; they begin with the path of its source
        if not (isinstance(error, distributed.DistError) or "/gloo/" in str(error)):
            raise
        raise LostProcessError(
            "lost the connection to another process of this run, whose own output may say why "
            f"({str(error).partition(chr(10))[0]:.160}); {hint()}"
        ) from error


class _Refuses:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the network or the loss reads the trainer ({name})")


@contextmanager
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


def swap_with_average(callback: WeightAveraging, module: pl.LightningModule) -> None:
    """Swap the values of the weights and of their average."""
    callback._swap_models(module)


def units_of(module: nn.Module) -> Iterator[FSDPModule]:
    """The modules whose weights FSDP2 gathers together, ``module`` included."""
    return (m for m in module.modules() if isinstance(m, FSDPModule))


def trainer_of(module: pl.LightningModule) -> pl.Trainer | None:
    """The trainer of ``module``, or None; the public property raises without one."""
    return module._trainer


def started_together() -> int:
    """The number of processes that ``torchrun`` or ``srun`` started; 1 without these."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def process_count() -> int:
    """The number of processes in the process group; 1 before there is one."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def gathered(value: T) -> list[T]:
    """The values of all processes, by rank; each must call this, with plain data."""
    values = [value] * process_count()
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


def end_together(trainer: pl.Trainer, *, ask: bool) -> None:
    """Leave the process group; wait for the processes that Lightning has started from this one.

    ``ask`` sends them SIGTERM, since they may not know that the run ends. Kills processes that have
    not ended after :data:`WAIT` seconds.
    """
    started: list[subprocess.Popen[bytes]] = []
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher):
        started = list(launcher.procs)
        # Lightning's watchdog would kill this process if one of them ends with an error, even while
        # this one ends for the same reason; it polls this list, and ends when it is empty
        launcher.procs.clear()
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()  # Lightning leaves groups of other backends
    for process in started:
        if ask:
            process.terminate()
    for process in started:
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            # it hangs in a collective operation, which no signal handler interrupts
            process.kill()
            process.wait()


@contextmanager
def quiet() -> Iterator[None]:
    """Hide Lightning's startup messages, and advice that is wrong for data held in memory.

    In scripts and notebooks: ``with revzoo.training.quiet(): trainer.fit(module, datamodule=data)``
    """
    logger = logging.getLogger("pytorch_lightning")
    # warnings still show, startup messages are at INFO
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            for message in EXPECTED_WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        logger.setLevel(level)
