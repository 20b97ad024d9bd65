"""One program at a time in a folder.

The lock belongs to the open file, not to a note that is left in it: the system releases it when the
holder ends, however it ends. It does not pass on to programs that the holder starts, nor to its
forks, such as the workers that load its images: they outlive for seconds a holder that is killed.

Why not ``filelock``: it does not say who holds the lock, and empties the file when it asks for it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from revzoo.cli.config.errors import ConfigError
from revzoo.cli.run.errors import user_errors
from revzoo.training.distributed import is_first_process

log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_held: set[IO[str]] = set()  # files whose locks this process holds


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which must exist; other processes of one run share the first's.

    Raises:
        SystemExit: another program holds it; the message says which one.
    """
    with ExitStack() as stack:
        if is_first_process():
            file = stack.enter_context((folder / LOCK_FILE).open("a+"))
            with user_errors():
                _lock(file, folder)
            _held.add(file)
            stack.callback(_held.discard, file)
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(in_use(folder, file.read().strip())) from None
    except OSError as error:
        log.warning("%s has no locks (%s): start no second program there", folder, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _forget_locks() -> None:
    """Close a fork's files: as long as one process has a file open, the system keeps its lock."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def in_use(folder: Path, holder: str) -> str:
    """The message for a second program in a folder."""
    pid = holder.split()[1] if holder else "PID"
    return (
        f"{folder} is in use by {holder or 'another process'}: wait until it has ended, end it "
        f"(kill {pid}), or give another folder; nothing was changed"
    )
