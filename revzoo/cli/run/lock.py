"""Locks a folder, so that only one program at a time uses it.

The lock belongs to the open file: the system releases it when the holder ends, even after a kill.
Programs that the holder starts do not inherit it. Its forks, such as data-loading workers, which
outlive a killed holder for seconds, do not inherit it, either.

Why not ``filelock``: it does not name the holder, and empties the file when it asks for the lock.
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

from revzoo.cli.run.record import LOCK_FILE
from revzoo.cli.terminal import ConfigError, user_errors
from revzoo.training.distributed import is_first_process

log = logging.getLogger(__name__)

_held: set[IO[str]] = set()  # files whose locks this process holds


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of ``folder``, which must exist; in a distributed run, rank 0 holds it.

    Raises:
        SystemExit: another program holds it; the message names the process.
    """
    with ExitStack() as stack:
        if is_first_process():
            # "a+" creates the file and does not empty it: it names a holder
            file = stack.enter_context((folder / LOCK_FILE).open("a+"))
            with user_errors():
                _lock(file, folder)
            _held.add(file)
            stack.callback(_held.discard, file)
        yield


def _lock(file: IO[str], folder: Path) -> None:
    try:
        # flock, not lockf: POSIX locks end when any file of the process is closed
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(in_use(folder, file.read().strip())) from None
    except OSError as error:
        # some network file systems have no locks; a run should not fail for this
        log.warning("cannot lock %s (%s): do not start a second program there", folder, error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _forget_locks() -> None:
    """Close the files in a fork: the system keeps a lock while any process has its file open."""
    for file in _held:
        file.close()
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


def in_use(folder: Path, holder: str) -> str:
    """The message for a second program in a folder."""
    # empty if the holder is just writing its name
    pid = holder.split()[1] if holder else "PID"
    return (
        f"{folder} is in use by {holder or 'another process'}: wait until it ends, stop it "
        f"(kill {pid}), or use another folder; no file was changed"
    )
