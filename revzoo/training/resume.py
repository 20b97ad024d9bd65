"""Exact resumes and safe kills: a resumed run equals one that was never stopped, bit for bit.

Lightning 2.6 restores weights, optimiser, schedule, callbacks and counters. It lacks the random
states and the metrics of an open epoch (:class:`RunState`). After SIGTERM it ends a run without
saving, SIGHUP and SIGUSR1 kill the run, and ``ModelCheckpoint(save_on_exception=True)`` saves
anywhere, also inside an optimiser step, where Lightning cannot resume exactly
(:class:`GracefulStop`). Its ``CSVLogger`` deletes the earlier rows when a run resumes
(:mod:`revzoo.training.loggers`). docs/decisions/008-runs-that-can-be-stopped.md gives the reasons.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torchmetrics import Metric

from revzoo.core.invertible import Step, all_steps
from revzoo.core.kernels import Growth
from revzoo.core.modes import mode_of
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.lightning_compat import (
    batches_of_epoch,
    batches_of_run,
    callbacks_of,
    count_epochs,
    data_of,
    epoch_is_open,
    gathered,
    is_first_process,
    is_fitting,
    process_count,
)

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
# what a schedule has from the length of the run, in the states of torch's schedulers
OF_LENGTH = ("total_steps", "_schedule_phases", "milestones")
# seconds after the signal; SLURM leaves 30 between SIGTERM and SIGKILL (KillWait of slurm.conf)
PATIENCE = 15.0


def stop_signals() -> list[signal.Signals]:
    """The signals that stop a run here: not SIGHUP and SIGUSR1 if they are ignored or in use."""
    always = (signal.SIGTERM, signal.SIGINT)
    return [s for s in SIGNALS if s in always or signal.getsignal(s) is signal.SIG_DFL]


class RunStopped(BaseException):
    """A signal ends the run. ``except Exception`` does not catch it (as ``KeyboardInterrupt``)."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status of a program that the signal ended, as in a shell: 143 for SIGTERM."""
        return 128 + self.signum


class GracefulStop(pl.Callback):
    """SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C save a run and stop it where it can resume exactly.

    - Training finishes the batch (with accumulated gradients, the optimiser step), writes
      ``last.ckpt`` and stops. A due or running validation is finished first: a run cannot resume
      before its end.
    - After :data:`PATIENCE` the rest of the step or validation is dropped. A resumed run computes
      it again, with the same figures.
    - A test stops after the batch. Anywhere else, or at a second Ctrl-C, the run stops at once.
    - Distributed processes stop after the same batch, whichever of them receives the signal.

    SIGHUP comes from a terminal that closes, SIGUSR1 from SLURM (``sbatch --signal=USR1@60``). A
    run under ``nohup`` ignores SIGHUP.

    Attributes:
        hint: how to resume the run, for the last line after a second Ctrl-C; None for no line.
    """

    def __init__(self) -> None:
        self.hint: Callable[[], str] | None = None
        self.requested: int | None = None  # the signal that this process has received
        # the one that all processes know; saving and leaving a loop depend only on it
        self.agreed: int | None = None
        self._since = 0.0  # time.monotonic when the signal arrived
        self._may_end = False  # whether the run may end before the next batch
        self._in_loop = False  # whether a loop is running that checks ``requested``
        self._signals: list[signal.Signals] = []  # that this handles now

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the context, in the main thread; restore the old handlers after."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._signals = stop_signals()
        before = {signum: signal.getsignal(signum) for signum in self._signals}
        self._listen()
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)
            self._signals = []

    def _listen(self) -> None:
        for signum in self._signals:
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # the user wants to stop now: no clean-up, which may be what hangs
        if self.requested is not None and signum == signal.SIGINT:
            if self.hint is not None and is_first_process():
                os.write(2, f"revzoo: stopped; {self.hint()}\n".encode(errors="surrogateescape"))
            os._exit(128 + signum)
        if self.requested is not None:
            return  # batch systems send SIGTERM both to the process and to its group
        self.requested, self._since = signum, time.monotonic()
        # outside a loop nothing polls ``requested``, and no step is half done
        if not self._in_loop:
            raise RunStopped(signum)
        if is_first_process():  # a terminal sends Ctrl-C to all
            message = "%s: stopping after this batch, at most %.0f s later; Ctrl-C again stops now"
            log.warning(message, signal.Signals(signum).name, PATIENCE)

    def _loop_starts(self, *args: Any) -> None:
        self._listen()  # Lightning has installed its handler
        self._in_loop = True

    def _loop_ends(self, trainer: pl.Trainer, *args: Any) -> None:
        self._in_loop = False
        self._end_if_requested(trainer)

    def _end_if_requested(self, trainer: pl.Trainer, *args: Any) -> None:
        self._agree(trainer)
        if self.agreed is not None:
            raise RunStopped(self.agreed)

    # Lightning passes further arguments to these hooks, which they ignore
    on_train_start = on_test_start = _loop_starts  # type: ignore[assignment]
    on_train_end = on_test_end = _loop_ends  # type: ignore[assignment]
    on_test_batch_end = _end_if_requested  # type: ignore[assignment]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Stop a validation that takes longer than :data:`PATIENCE`."""
        self._agree(trainer)
        if self.agreed is not None and self._is_late(trainer):
            raise RunStopped(self.agreed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Agree with the other processes, before the callbacks that save."""
        self._agree(trainer)
        # LastCheckpoint saves after this hook; the run ends before the next batch
        self._may_end = bool(self.agreed) and (can_resume_here(trainer) or self._is_late(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agree(trainer)
        self._may_end = bool(self.agreed)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """End the run here: the figures of the last batch are logged by now."""
        if self._may_end:
            assert self.agreed is not None
            raise RunStopped(self.agreed)

    def _agree(self, trainer: pl.Trainer) -> None:
        """Share a signal with all processes, which call this at the same point of the run."""
        requested = self.requested  # read once: a signal may arrive at any instant
        if trainer.world_size > 1:
            # the maximum is one collective; 0 is no signal
            number = torch.tensor(float(requested or 0), device=trainer.strategy.root_device)
            requested = int(trainer.strategy.reduce(number, reduce_op="max")) or None
        if self.agreed is None and requested is not None:
            # a process that did not get the signal starts its clock here
            self.agreed, self._since = requested, self._since or time.monotonic()

    def _is_late(self, trainer: pl.Trainer) -> bool:
        """Whether :data:`PATIENCE` is over, by the clock of process 0."""
        late = time.monotonic() - self._since >= PATIENCE
        return trainer.strategy.broadcast(late)


def stop_requested(trainer: pl.Trainer) -> bool:
    """Whether a signal has requested the end of the run; the same answer in all processes."""
    return any(stop.agreed for stop in callbacks_of(trainer, GracefulStop))


def can_resume_here(trainer: pl.Trainer) -> bool:
    """Whether a run saved after this batch resumes exactly.

    Not between the batches of one optimiser step, because gradients are not saved; not before a due
    validation or the end of an epoch, because Lightning would skip these.
    """
    batches, gathers = batches_of_epoch(trainer), trainer.accumulate_grad_batches
    if batches % gathers or batches >= trainer.num_training_batches:
        return False
    if 0 < trainer.max_steps <= trainer.global_step:
        return False
    every = trainer.val_check_batch
    # no validation, or none inside an epoch
    if every is None or every == float("inf"):
        return True
    # without check_val_every_n_epoch, Lightning counts across epochs
    count = batches if trainer.check_val_every_n_epoch else batches_of_run(trainer)
    # the validation may fall inside an optimiser step; then the step's end counts
    return count < every or count % int(every) >= gathers


def generator_states() -> dict[str, Any]:
    """The states of torch's generators (CPU, CUDA), NumPy's and Python's, as plain data."""
    numpy: Any = np.random.get_state()
    _, keys, *rest = numpy
    version, internal, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        # of all devices: this process learns its device later
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [keys.tolist(), *rest],  # weights_only refuses NumPy's arrays
        "python": [version, list(internal), gauss],
    }


def set_generator_states(states: Mapping[str, Any]) -> None:
    """Restore :func:`generator_states`; states of missing devices are ignored."""
    torch.set_rng_state(states["torch"].cpu())
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.cpu(), device)
    np.random.set_state(("MT19937", *states["numpy"]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))


def can_drift(step: Step) -> bool:
    """Whether the step's memory mode inverts it in floating point, not in integers."""
    mode = mode_of(step.memory)
    return mode.inverts and mode.grid is None


class RunState(pl.Callback):
    """Saves and restores the random states of each process, training metrics and logged figures.

    A run that resumes with more epochs or steps stretches its schedule to the new length: the rate
    goes on as in a run that has had this length from the start. After a schedule that has ended,
    it rises again, as in a warm restart (Loshchilov and Hutter 2017, arXiv 1608.03983).
    """

    _trainer: pl.Trainer  # both from setup
    _module: Any  # a Classifier

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}  # when the run was saved
        self.notes: dict[str, str] = {}  # warnings for the run's summary, by topic
        self.recomputed: list[str] = []  # names of the steps that drifted
        self._loaded: dict[str, Any] | None = None
        self._planned_steps: float | None = None
        self._stretched_from: int | None = None  # the planned steps of the checkpoint

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer, self._module = trainer, pl_module
        count_epochs(trainer)  # before Lightning restores its loops

    def state_dict(self) -> dict[str, Any]:
        figures = {name: float(v) for name, v in self._trainer.callback_metrics.items()}
        is_open = epoch_is_open(self._trainer)
        metrics = self._module.training_metrics() if is_open else {}
        for logger in self._trainer.loggers:
            logger.save()  # a resumed run does not log the rows before this state again
        return {
            # one state for each rank
            "random": gathered(generator_states()),
            "metrics": states_of(metrics, sync=True),
            "figures": {**self.figures, **figures},
            "planned_steps": self._planned_steps,
            "epoch_steps": self._epoch_steps(),
            "step_images": (size := self._batch_size()) and size * process_count(),
            "notes": dict(self.notes),
            "recomputed": list(self.recomputed),
            # of each process: its grids have adapted to its own samples
            "growth": gathered(growth_of(self._module)),
        }

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Check the length of the run; drop the length of a schedule that is stretched."""
        saved = checkpoint["callbacks"].get(self.state_key)
        # a test may use a different number of devices
        if saved is None or not is_fitting(trainer):
            return
        self._stretched_from = self._stretched(saved)
        if self._stretched_from is not None:
            for state in checkpoint["lr_schedulers"]:
                for key in OF_LENGTH:
                    state.pop(key, None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved state, to restore it when training starts."""
        self._loaded = state_dict
        self.figures = dict(state_dict["figures"])
        self.notes = dict(state_dict.get("notes", {}))
        self.recomputed = list(state_dict.get("recomputed", []))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._planned_steps = self._module.planned_steps()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore here, not earlier: the setup of a run may draw random numbers, too."""
        for name, step in all_steps(pl_module).items():
            if name in self.recomputed and can_drift(step):
                step.memory = "recompute"
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        if (growth := state.get("growth")) is not None:
            set_growth(pl_module, growth[trainer.global_rank % len(growth)])
        if trainer.is_global_zero:  # the saved states are sums over all processes
            set_states(self._module.training_metrics(), state["metrics"])
        random_states = state["random"]  # perhaps fewer or more than processes
        set_generator_states(random_states[trainer.global_rank % len(random_states)])
        if self._stretched_from is not None:
            self._stretch(trainer, self._stretched_from)
            self._stretched_from = None

    def _stretch(self, trainer: pl.Trainer, planned: int) -> None:
        """Set the rates to those of the stretched schedule, which Lightning has restored."""
        for config in trainer.lr_scheduler_configs:
            schedule: Any = config.scheduler
            with warnings.catch_warnings():
                # torch deprecates the argument, but has no other way
                warnings.simplefilter("ignore")
                schedule.step(schedule.last_epoch)
        if trainer.is_global_zero:
            log.info(
                "%-8s stretched from %s to %s steps, lr is now %.3g",
                "schedule",
                f"{planned:,}",
                f"{self._planned_steps:,}",
                trainer.optimizers[0].param_groups[0]["lr"],
            )

    def _stretched(self, saved: Mapping[str, Any]) -> int | None:
        """The planned steps of the checkpoint if this run has more of them; None otherwise."""
        path = self._trainer.ckpt_path
        check_step_images(path, saved, self._batch_size(), process_count())
        planned, steps = saved.get("planned_steps"), self._module.planned_steps()
        if planned is None or steps is None or planned == steps:
            return None
        if steps < planned or saved.get("epoch_steps") != self._epoch_steps():
            raise CheckpointError(
                f"{path} comes from a run of {planned} optimiser steps, this run has {steps}, and "
                "the learning rates depend on their number: use the same images and batch size, "
                "and the same or more epochs or steps; or begin a new run"
            )
        return int(planned)

    def _epoch_steps(self) -> float:
        """The optimiser steps of an epoch, rounded down."""
        return self._trainer.num_training_batches // self._trainer.accumulate_grad_batches

    def _batch_size(self) -> int | None:
        """The images of a step of each process; None with your own data module."""
        size = getattr(data_of(self._trainer), "batch_size", None)
        return size if isinstance(size, int) else None


def check_step_images(
    path: Any, saved: Mapping[str, Any], batch_size: int | None, processes: int
) -> None:
    """Check that a step of all processes has the images that it had in the ``saved`` RunState."""
    before, wanted = len(saved["random"]), saved.get("step_images")
    if None in (batch_size, wanted) and before != processes:
        raise CheckpointError(
            f"{path} comes from a run with devices * num_nodes = {before}, this run has "
            f"{processes}: use {before}, because each process resumes with its images and random "
            "numbers"
        )
    if batch_size is not None and wanted not in (None, images := batch_size * processes):
        raise CheckpointError(
            f"{path} comes from a run with {wanted} images per step of all processes, this run has "
            f"{images}: give data.batch_size * trainer.devices * trainer.num_nodes = {wanted}, so "
            "that each step has the same images"
        )


def states_of(metrics: Mapping[str, Metric], *, sync: bool = False) -> dict[str, Any]:
    """Copies of the metrics' states; with ``sync``, sums over all processes, on the CPU."""
    states = {}
    for name, metric in metrics.items():
        with metric.sync_context(should_sync=sync):
            # inside the context these are the sums; it restores the process's values
            state: dict[str, Any] = metric.metric_state
            values = {key: value.detach().clone() for key, value in state.items()}
        if sync:
            values = {key: value.cpu() for key, value in values.items()}
        states[name] = {"updates": metric.update_count, "values": values}
    return states


def set_states(metrics: Mapping[str, Metric], states: Mapping[str, Any]) -> None:
    """Restore the result of :func:`states_of`; metrics without a state start again."""
    for name, metric in metrics.items():
        state = states.get(name, {})
        for key, value in state.get("values", {}).items():
            # torchmetrics keeps each state as an attribute
            setattr(metric, key, value.to(metric.device))
        # torchmetrics warns if compute() follows no update, and has no public setter
        metric._update_count = state.get("updates", 0)


def growth_of(module: torch.nn.Module) -> dict[str, list[Any]]:
    """What grids have adapted to, by path of the step: ratio, floor, grid of the first pass."""
    return {
        path: [g.ratio, g.floor, g.seen]
        for path, step in all_steps(module).items()
        if (g := step.growth) is not None
    }


def set_growth(module: torch.nn.Module, saved: Mapping[str, Sequence[Any]]) -> None:
    """Restore :func:`growth_of`; paths that the module lacks are ignored."""
    for path, step in all_steps(module).items():
        if path in saved:
            step.growth = Growth()
            step.growth.ratio, step.growth.floor, step.growth.seen = saved[path]
