"""SIGTERM, SIGHUP, SIGUSR1 and Ctrl-C save a run and stop it where it can resume exactly.

- Training finishes the batch (with accumulated gradients, the optimiser step), writes ``last.ckpt``
  and stops. A due or running validation is finished first: a run cannot resume before its end.
- After :data:`PATIENCE` the rest of the step or validation is dropped. A resumed run computes it
  again, with the same figures.
- A test stops after the batch. Anywhere else, or at a second Ctrl-C, the run stops at once.
- Distributed processes stop after the same batch, whichever of them receives the signal.

SIGHUP comes from a terminal that closes, SIGUSR1 from SLURM (``sbatch --signal=USR1@60``). A run
under ``nohup`` ignores SIGHUP.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo.training.distributed import is_first_process
from revzoo.training.lightning_compat import (
    batches_of_epoch,
    batches_of_run,
    callbacks_of,
)

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
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
    """Stops the run at a point where it can resume exactly; see the module's docstring.

    Attributes:
        hint: how to resume the run, for the last line after a second Ctrl-C; None for no line.
        requested: the signal that this process has received, if any.
        agreed: the signal that all processes know since the end of a batch. Collective actions
            (saving, leaving a loop) depend only on this signal.
    """

    def __init__(self) -> None:
        self.hint: Callable[[], str] | None = None
        self.requested: int | None = None
        self.agreed: int | None = None
        self._since = 0.0  # time.monotonic when the signal arrived
        self._may_end = False  # whether the run may end before the next batch
        self._in_loop = False  # whether a loop is running that checks ``requested``
        self._signals: list[signal.Signals] = []  # that this handles now

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals inside the context, in the main thread; restore the old handlers after."""
        # Python sets signal handlers in the main thread only
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # a sweep or a notebook has handlers, which work again after the run
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
        """Whether :data:`PATIENCE` is over; the same answer in all processes."""
        # the clock of process 0 decides
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
