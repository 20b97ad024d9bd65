"""A line on the terminal that says what a command computes, until there is something to print.

It goes to standard error, and only to a terminal: standard output may go into a file.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


def show_status(text: str) -> None:
    """Show the current computation; the next call replaces the line, an empty text clears it."""
    if sys.stderr.isatty():
        # a line that wraps could not be cleared; 4 columns for the dots
        shown = f"{text[: shutil.get_terminal_size().columns - 5]} ..." if text else ""
        # back to the first column, and clear the line
        sys.stderr.write(f"\r\033[K{shown}")
        sys.stderr.flush()


@contextmanager
def status_of(subject: str) -> Iterator[None]:
    """Show what :mod:`revzoo.profiling` counts or times, with ``subject`` and the seconds so far.

    Print after it: the line would stay before the text.
    """
    log, start = logging.getLogger("revzoo.profiling"), time.perf_counter()

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
