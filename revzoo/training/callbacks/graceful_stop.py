"""SIGTERM and Ctrl-C end a run where it can be resumed exactly, with its state saved.

In training the batch (with accumulated gradients: the optimiser step) is finished and ``last.ckpt``
written. A validation that is due or running is finished too, as the run cannot be resumed before
its end. After :data:`PATIENCE` the rest is cut off: a resumed run computes it again, with the same
figures. A test is cut off after the batch. Elsewhere the run ends at once, and a second Ctrl-C
always ends it at once. Processes that train together stop after the same batch, whichever of them
the signal came to.

After :data:`DEADLINE` a watchdog ends the process, whatever blocks it: Python runs its signal
handlers between two byte-code instructions, so a process that waits in a collective operation for
one that hangs would never see the signal.

Lightning's own handler ends a run without saving it, and broadcasts from inside the handler.
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
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch

from revzoo.training.checkpoint.resume_point import can_resume_here
from revzoo.training.lightning_compat import started_processes

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
# seconds; SLURM leaves 30 between SIGTERM and SIGKILL (KillWait of slurm.conf)
PATIENCE = 15.0
DEADLINE = 28.0
PREFERRED = (None, signal.SIGTERM, signal.SIGINT)  # where processes got different signals, the last


class RunStopped(BaseException):
    """A signal ends the run. Like ``KeyboardInterrupt``, no ``except Exception`` catches it."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum

    @property
    def status(self) -> int:
        """The exit status that shells give to a program ended by the signal: 143 or 130."""
        return 128 + self.signum


class GracefulStop(pl.Callback):
    """Ends the run where nothing is lost; see the module's text.

    Attributes:
        requested: the signal that this process has received, if any.
        agreed: the signal that all processes of the run know of, since the end of a batch. What
            they do together (save, leave a loop) depends on this one alone.
    """

    listens: ClassVar[GracefulStop | None] = None
    """The one that answers the signals of this process, also in trials without callbacks."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self.agreed: int | None = None
        self._since = 0.0  # when the signal was noticed, by time.monotonic
        self._may_end = False  # before the next batch: a state is being saved, or it took too long
        self._waits = False  # whether a loop is running that will look at ``requested``
        self._trainer: pl.Trainer | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Answer signals inside, in the main thread; the handlers from before return after."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {signum: signal.getsignal(signum) for signum in SIGNALS}
        self._listen()
        outer, GracefulStop.listens = GracefulStop.listens, self
        try:
            with watchdog(self._end_now):
                yield
        finally:
            GracefulStop.listens = outer
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _end_now(self, signum: int) -> None:
        """End this process and those it has started, from the watchdog's thread."""
        name = signal.Signals(signum).name
        text = f"revzoo: blocked for {DEADLINE:.0f} s after {name}; the last checkpoint is intact\n"
        os.write(2, text.encode())  # logging may be what is blocked
        for process in started_processes(self._trainer) if self._trainer is not None else ():
            process.kill()
        os._exit(128 + signum)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._trainer = trainer

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
            "%s: stopping after this batch; up to %.0f s later if an optimiser step or a "
            "validation is not finished (Ctrl-C again: at once)",
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
        """Cut off a validation that takes too long; at its end the run may stop."""
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
        """End the run, now that the figures of the last batch are logged."""
        if self._may_end:
            assert self.agreed is not None
            raise RunStopped(self.agreed)

    def _agree(self, trainer: pl.Trainer) -> None:
        """Let all processes know of a signal to one; all of them come here at the same point."""
        requested = self.requested  # a signal may come in at any instant
        if trainer.world_size > 1:
            rank = torch.tensor(
                float(PREFERRED.index(requested)), device=trainer.strategy.root_device
            )
            requested = PREFERRED[int(trainer.strategy.reduce(rank, reduce_op="max"))]
        if self.agreed is None and requested is not None:
            self.agreed, self._since = requested, self._since or time.monotonic()

    def _is_late(self, trainer: pl.Trainer) -> bool:
        """Whether the end cannot wait any longer; the same answer in all processes."""
        late = time.monotonic() - self._since >= PATIENCE
        return trainer.strategy.broadcast(late) if trainer.world_size > 1 else late


@contextmanager
def watchdog(end: Callable[[int], None]) -> Iterator[None]:
    """Call ``end(signum)`` :data:`DEADLINE` seconds after the first signal that comes inside.

    The system's own handler writes the signal's number into a pipe, and a thread reads it there:
    that works while the main thread is blocked in a library.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    before = signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    over = threading.Event()

    def watch() -> None:
        while signums := os.read(reads, 1):
            if signums[0] in SIGNALS:
                if not over.wait(DEADLINE):
                    end(signums[0])
                return

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        os.close(writes)  # an empty read ends the thread
        thread.join()
        os.close(reads)


def stop_requested(trainer: pl.Trainer) -> bool:
    """Whether a signal has asked the trainer's run to stop; the same answer in all processes."""
    return any(isinstance(c, GracefulStop) and bool(c.agreed) for c in trainer.callbacks)  # type: ignore[attr-defined]
