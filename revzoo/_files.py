"""Atomic writes: after a crash either the old or the new file is there, never a part of one."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

TABLES = (".csv", ".tsv", ".parquet")  # that list images


def file_name(name: str) -> str:
    """``torchvision:resnet50`` as ``torchvision-resnet50``, for the name of a file or folder.

    Windows does not allow colons, and scp reads one as the end of a host name.
    """
    return name.replace(":", "-")


def write_atomically(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path`` in one step: a reader sees the old file or the new one."""
    write_together({path: data})


def json_bytes(values: Any, *, sort_keys: bool = False) -> bytes:
    """``values`` as the content of a JSON file, with a line for each value."""
    return f"{json.dumps(values, indent=2, sort_keys=sort_keys)}\n".encode()


def write_together(files: Mapping[Path, bytes]) -> None:
    """Like :func:`write_atomically` for several files: if one cannot be written, none changes.

    Creates missing folders.

    Raises:
        OSError: names the file.
    """
    with ExitStack() as stack:
        # all temporary files are complete before the first one replaces its target
        for path, data in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(replacing(path)).write_bytes(data)


def check_writable(*paths: Path | None, makes_folders: bool = False) -> None:
    """Refuse paths that cannot be written, before the work whose result goes there.

    Args:
        paths: None is skipped.
        makes_folders: whether missing folders will be created.

    Raises:
        ValueError: names the first such path.
    """
    for path in filter(None, paths):
        if path.is_dir():
            raise ValueError(f"{path} is a folder: expected the path of a file")
        if path.exists() and not path.is_file():  # opening a FIFO would block forever
            raise ValueError(f"{path} is not a regular file. Remove it")
        if path.exists() and not os.access(path, os.W_OK):
            raise ValueError(f"{path} cannot be written: expected a file that you may change")
        # also if the file exists: a new one replaces it
        folder = path.parent
        while makes_folders and not folder.exists():  # the root and "." exist
            folder = folder.parent
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(
                f"{path} cannot be written ({folder}: {error.strerror}): expected a folder that "
                "exists and lets you create files"
            ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path``, with the same suffix, that replaces it at the end.

    After an error ``path`` is unchanged and the temporary file is removed.

    Raises:
        OSError: names ``path``, where Python names no file (full disk) or the temporary one.
    """
    temporary = None
    try:
        # in the same folder: a rename is atomic only within one file system
        name = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
        os.close(os.open(name, os.O_CREAT | os.O_EXCL, 0o666))  # less the umask, like any file
        temporary = name
        yield temporary
        # without fsync a power cut after the rename may leave an empty file
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
    except OSError as error:
        # the caller knows `path`, not the temporary file
        if error.errno is not None and (
            temporary is None or error.filename in (None, str(temporary))
        ):
            error.filename = str(path)
        raise
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)  # after success it is gone already


@contextmanager
def replacing_table(path: Path) -> Iterator[TextIO]:
    """Like :func:`replacing`, but opened for :mod:`csv`."""
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        yield file


def remove_oldest(files: Iterable[Path], limit: int, *, keep: Path) -> None:
    """Remove the files that are oldest by their time, until the rest takes ``limit`` bytes.

    ``keep`` stays, however large it is.
    """
    ages = []
    for file in files:
        with suppress(FileNotFoundError):  # another process has removed it
            facts = file.stat()
            ages.append((facts.st_mtime, facts.st_size, file))
    total = sum(size for _, size, _ in ages)
    for _, size, file in sorted(ages):
        if total > limit and file != keep:
            file.unlink(missing_ok=True)
            total -= size
