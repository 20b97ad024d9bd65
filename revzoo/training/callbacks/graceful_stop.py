"""SIGTERM and Ctrl-C end a run in good order: at the next place to go on from, with it saved.

In training the batch (with accumulated gradients: the optimiser step) is finished and ``last.ckpt``
written, and so is a validation that is due or going on, as only behind it there is such a place.
What is not finished after :data:`PATIENCE` is cut off with what was saved before: after resuming it
is computed again with the same figures. So is a test, after the batch. Outside of these the run
ends at once, and at a second Ctrl-C in any case. Processes that train together stop after the same
batch, whichever of them the signal came to.

Lightning's own handler ends a run without saving it, and broadcasts from inside the handler.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import pytorch_lightning as pl

from revzoo.training.checkpoint.resume_point import can_resume_here

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# seconds: half of the 30 that SLURM leaves between SIGTERM and SIGKILL (KillWait of slurm.conf)
PATIENCE = 15.0


class RunStopped(BaseException):
    """A signal has ended the run. As ``KeyboardInterrupt``, no ``except Exception`` catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status that shells give to a program ended by the signal: 143 or 130."""
        return 128 + self.signum


class GracefulStop(pl.Callback):
    """Ends the run at the next place where nothing is lost; see the module's text.

    Attributes:
        requested: the signal that has come in to this process, if any.
        agreed: the signal that all processes of the run know of, since the end of a batch: what
            they do together (save, leave a loop) depends on this one alone.
    """

    listens: ClassVar[GracefulStop | None] = None
    """The one that answers this process's signals; for trainings without a run's callbacks."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self.agreed: int | None = None
        self._since = 0.0  # when the signal was noticed, by time.monotonic
        self._may_end = False  # before the next batch: a state is being saved, or it took too long
        self._waits = False  # whether a loop is running that will look at ``requested``

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer signals inside, in the main thread; the handlers from before come back after."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self._listen()
        outer, GracefulStop.listens = GracefulStop.listens, self
        try:
            yield
        finally:
            GracefulStop.listens = outer
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _listen(self) -> None:
        if threading.current_thread() is threading.main_thread():
            for signum in SIGNALS:
                signal.signal(signum, self._answer)

    def _answer(self, signum: int, frame: FrameType | None) -> None:
        if self.requested is not None and signum == signal.SIGINT:
            os._exit(128 + signum)
        if self.requested is not None:
            return  # batch systems send SIGTERM to a process and to its group
        self.requested, self._since = signum, time.monotonic()
        if not self._waits:
            raise RunStopped(signum)
        name = signal.Signals(signum).name
        log.warning(
            "%s: stopping after this batch; for the rest of its optimiser step, or of a validation,"
            " up to %.0f s are waited (Ctrl-C: at once)",
            name,
            PATIENCE,
        )

    def _loop_starts(self, *args: Any) -> None:
        self._listen()  # Lightning has put its own handler in place
        self._waits = True

    def _loop_ends(self, trainer: pl.Trainer, *args: Any) -> None:
        self._waits = False
        self._end_if_requested(trainer)

    def _end_if_requested(self, trainer: pl.Trainer, *args: Any) -> None:
        self._agree(trainer)
        if self.agreed is not None:
            raise RunStopped(self.agreed)

    # these hooks are given more than is needed
    on_train_start = on_test_start = _loop_starts  # type: ignore[assignment]
    on_train_end = on_test_end = _loop_ends  # type: ignore[assignment]
    on_test_batch_end = _end_if_requested  # type: ignore[assignment]

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Cut a validation off that takes too long; the end of it is a place to stop at."""
        self._agree(trainer)
        if self.agreed is not None and self._is_late(trainer):
            raise RunStopped(self.agreed)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """Agree with the other processes; those callbacks that save come after this one."""
        self._agree(trainer)
        self._may_end = bool(self.agreed) and (can_resume_here(trainer) or self._is_late(trainer))

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._agree(trainer)
        self._may_end = bool(self.agreed)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        """End the run: not before the figures of the last batch have been logged."""
        if self._may_end:
            assert self.agreed is not None
            raise RunStopped(self.agreed)

    def _agree(self, trainer: pl.Trainer) -> None:
        """Let all processes know of a signal to one; all of them come here at the same point."""
        requested = self.requested  # a signal may come in at any instant
        if trainer.world_size > 1:
            anywhere = trainer.strategy.reduce_boolean_decision(bool(requested), all=False)
            requested = requested or (signal.SIGTERM if anywhere else None)
        if self.agreed is None and requested is not None:
            self.agreed, self._since = requested, self._since or time.monotonic()

    def _is_late(self, trainer: pl.Trainer) -> bool:
        """Whether the end cannot wait any longer; the same answer in all processes."""
        late = time.monotonic() - self._since >= PATIENCE
        return trainer.strategy.broadcast(late) if trainer.world_size > 1 else late


def stop_requested(trainer: pl.Trainer) -> bool:
    """Whether a signal has asked the trainer's run to stop; the same answer in all processes."""
    return any(isinstance(c, GracefulStop) and bool(c.agreed) for c in trainer.callbacks)  # type: ignore[attr-defined]
