"""A program in its own process, which is asked to end when this one is.

Trials of a search and jobs of a multirun are plain runs of ``revzoo train``, started here. Such a
run leaves nothing behind in memory, in random states or in the environment, and fails alone. It
starts its own processes if it is distributed.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

from revzoo.training.callbacks.graceful_stop import SIGNALS, RunStopped


def run_program(
    command: Sequence[str],
    *,
    output: IO[str] | None = None,
    should_end: Callable[[], bool] | None = None,
    poll: float = 1.0,
) -> int:
    """Start a program, wait for its end; returns its exit status.

    It stays in this process's group: Ctrl-C reaches it from the terminal. SIGTERM is passed on,
    also for an interrupt, which may have been sent to this process alone; a run that is asked twice
    stops once.

    Args:
        command: the program and its arguments.
        output: where its output and errors go; None for this process's.
        should_end: asked every ``poll`` seconds; once it says so, SIGTERM is sent.
        poll: in seconds.

    Raises:
        RunStopped: this process was asked to end; the program has ended before.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)
        if process is not None:
            process.terminate()

    before = {signum: signal.signal(signum, pass_on) for signum in SIGNALS}
    try:
        errors = subprocess.STDOUT if output is not None else None
        process = subprocess.Popen(list(command), stdout=output, stderr=errors)
        if asked:  # while it was being started
            process.terminate()
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(poll)
            if should_end is not None and process.returncode is None and should_end():
                process.terminate()
                should_end = None
        if asked:
            raise RunStopped(asked[0])
        return process.returncode
    finally:
        if process is not None and process.poll() is None:  # something else has gone wrong
            process.terminate()
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)


def quoted(value: object) -> str:
    """A value of an override that is taken as the text it is."""
    text = str(value).replace("'", "\\'")
    return f"'{text}'"
