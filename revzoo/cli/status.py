"""Messages beside a command's result: the current computation, and the written files.

Both go to standard error, since standard output may go into a file.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def show_status(text: str) -> None:
    """Show the current computation on a terminal; the next call replaces it, "" clears it."""
    if sys.stderr.isatty():
        # a line that wraps could not be cleared; 4 columns for the dots
        shown = f"{text[: shutil.get_terminal_size().columns - 5]} ..." if text else ""
        # back to the first column, and clear the line
        sys.stderr.write(f"\r\033[K{shown}")
        sys.stderr.flush()


def show_written(*paths: Path | None) -> None:
    """Name the files that a command has written, on standard error; skip None."""
    for path in paths:
        if path is not None:
            sys.stderr.write(f"wrote {path}\n")


@contextmanager
def status_of(subject: str) -> Iterator[None]:
    """Show ``subject``; while :mod:`revzoo.profiling` counts or times, also what, and the seconds.

    Print only after it, or the line would stay before the text.
    """
    log, start = logging.getLogger("revzoo.profiling"), time.perf_counter()
    show_status(subject)  # building a model takes seconds, too

    def show(record: logging.LogRecord) -> bool:
        show_status(f"{subject}, {time.perf_counter() - start:.0f} s: {record.getMessage()}")
        return False  # no other handler shows it

    level = log.level
    handler = logging.Handler()
    handler.addFilter(show)
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        show_status("")
