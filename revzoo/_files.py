"""Atomic writing of files: after a crash the old file or the new one is there, never a part."""

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
    """Refuse paths that exist but are no regular files: opening a FIFO would block forever.

    Raises:
        ValueError: names the first such path.
    """
    for path in paths:
        if path.exists() and not path.is_file():
            raise ValueError(f"{path} is no regular file: expected a file or no file; remove it")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, with the same suffix, that replaces it at the end.

    After an error ``path`` is unchanged and the temporary file is removed.
    """
    file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(file)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.chmod(0o644)  # mkstemp lets only the owner read
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def replacing_table(path: Path) -> Iterator[TextIO]:
    """Like :func:`replacing`, but opened for :mod:`csv`."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file
