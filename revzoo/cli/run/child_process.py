"""Runs a program in a child process, and forwards signals to it.

Trials of a sweep and jobs of a multirun are plain runs of ``revzoo train``, started here. In a
separate process, a run cannot change the memory, random states or environment of the next one, and
one failure does not end the others. A distributed run starts further processes itself.
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import FrameType
from typing import IO

from revzoo.training.resume.graceful_stop import RunStopped, stop_signals


def run_program(
    command: Sequence[str],
    *,
    output: IO[str] | None = None,
    should_end: Callable[[], bool] | None = None,
) -> int:
    """Start a program and wait until it ends; return its exit status.

    The program is in this process's group, so Ctrl-C on the terminal reaches both. After a signal
    this process also sends it SIGTERM, since an interrupt may have reached only this process. A run
    that gets both stops once.

    Args:
        command: the program and its arguments.
        output: a file for its output and errors; None for this process's streams.
        should_end: called every second; once it returns True, the program gets SIGTERM.

    Raises:
        RunStopped: this process received a signal; the program has ended.
    """
    received: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if process is not None:
            process.terminate()

    # before the process starts: a signal in between must not leave it alone
    before = {signum: signal.signal(signum, pass_on) for signum in stop_signals()}
    try:
        # both streams in one file, in their order
        errors = subprocess.STDOUT if output is not None else None
        process = subprocess.Popen(list(command), stdout=output, stderr=errors)
        if received:  # between the first line of this function and now
            process.terminate()
        while process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            if should_end is not None and process.returncode is None and should_end():
                process.terminate()
                # ask once; saving may take longer
                should_end = None
        if received:
            raise RunStopped(received[0])
        return process.returncode
    finally:
        if process is not None and process.poll() is None:  # after any other error
            process.terminate()
            process.wait()
        for signum, handler in before.items():
            signal.signal(signum, handler)
