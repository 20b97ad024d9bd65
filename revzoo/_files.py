"""Files that are written whole or not at all, whatever happens in between."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def check_regular(*paths: Path) -> None:
    """Refuse paths at which there is something else than a file: opening a FIFO waits for ever.

    Raises:
        ValueError: naming the first of them.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file: expected a file, or nothing; remove it")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, of the same suffix, that takes its place at the end.

    After an error ``path`` is what it was, and nothing is left of the temporary file.
    """
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(file)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # temporary files are for their owner alone
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_table(path: Path) -> Iterator[TextIO]:
    """As :func:`replacing`, open for the rows of :mod:`csv`."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file
