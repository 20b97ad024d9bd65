"""A program is a fork of a process that has imported revzoo, which takes seconds."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

FORKS = multiprocessing.get_context("forkserver")


def _run(cwd: Path, output: Path, function: Callable[..., Any], args: Any) -> None:
    os.chdir(cwd)
    sys.path.insert(0, "")  # as of `python -m revzoo`
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    function(*args)


@contextmanager
def program(
    function: Callable[..., Any], *args: Any, cwd: Path, output: Path
) -> Iterator[BaseProcess]:
    """Call a function in another process, in the folder ``cwd``; ``output`` gets what it prints."""
    output.touch()
    process = FORKS.Process(target=_run, args=(cwd, output, function, args))
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
