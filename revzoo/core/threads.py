"""Threads that share torch's random state or a model.

NOTE [ Threads ]
    torch's random state belongs to the process, a module's buffers to all who call the module, and
    a replay exchanges both for a moment. So:

    1. A replay that draws random numbers, and the forward pass of a step that draws, or may do so
       for all that is known, hold one lock. Steps that have been seen to draw nothing run beside
       each other.
    2. A replay that exchanges buffers, and the forward passes of modules with buffers, hold a lock
       per module.
    3. No wait is endless: a branch may itself wait for another thread (synchronised statistics of
       ranks that are threads), and a backward pass inside a forward pass may run in a thread of
       autograd's. The wait for random numbers ends after ``_PATIENCE`` seconds, half of it the
       next time, and the thread continues unlocked; the wait for a module ends in an error.
    4. Nothing rests on rule 1 alone: a replay must leave the random state as the forward pass left
       it, or not have touched it. Otherwise it drew other numbers, and it raises.

    Threads that draw outside revzoo's steps (an augmentation, ``torch.manual_seed``) are not
    locked out. Where they spoil a replay, rule 4 raises, also where they drew beside the forward
    pass alone. What such a thread draws during a replay are numbers that the forward pass has
    drawn, and the caller's random state is put back as if it had drawn none. Give it its own
    ``torch.Generator``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator

from torch import nn

_PATIENCE = 10.0  # seconds; forward passes of single steps are far from it


class Sections:
    """Counts what threads have under way, each thread's outermost section once."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._entered = self._inside = 0
        self._own = threading.local()

    def enter(self) -> None:
        """Begin a section."""
        depth: int = getattr(self._own, "depth", 0)
        self._own.depth = depth + 1
        if depth == 0:
            with self._mutex:
                self._entered += 1
                self._inside += 1

    def leave(self) -> None:
        """End the section."""
        self._own.depth -= 1
        if self._own.depth == 0:
            with self._mutex:
                self._inside -= 1

    def now(self) -> tuple[int, bool]:
        """A mark, for :meth:`alone`."""
        entered = self._entered  # read first: one that begins between the two reads is seen
        return entered, self._inside == (getattr(self._own, "depth", 0) > 0)

    def alone(self, mark: tuple[int, bool]) -> bool:
        """Whether no other thread's section has overlapped the time since ``mark``."""
        return mark[1] and self._entered == mark[0]


swaps = Sections()  # replays that exchange the random state


class RandomLock:
    """Rule 1 of NOTE [ Threads ]."""

    def __init__(self, patience: float = _PATIENCE) -> None:
        self._lock = threading.RLock()
        self.patience = patience

    def acquire(self) -> bool:
        """Whether the lock was got in time."""
        if self._lock.acquire(blocking=False) or self._lock.acquire(timeout=self.patience):
            return True
        self.patience /= 2
        return False

    def release(self) -> None:
        self._lock.release()


random_lock = RandomLock()

_serial = itertools.count()
_locks: weakref.WeakKeyDictionary[nn.Module, ModuleLock] = weakref.WeakKeyDictionary()


class ModuleLock:
    """Rule 2 of NOTE [ Threads ]; locks are taken in the order of their numbers."""

    __slots__ = ("kind", "lock", "number")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.lock = threading.RLock()
        self.number = next(_serial)


def locks_of(modules: Iterable[nn.Module]) -> list[ModuleLock]:
    """The locks of those with buffers."""
    stateful = [m for m in modules if m._buffers]
    locks = [_locks.setdefault(m, ModuleLock(type(m).__name__)) for m in stateful]
    return sorted(locks, key=lambda lock: lock.number)


def acquire(locks: list[ModuleLock]) -> None:
    """Take all, or none and raise."""
    for i, lock in enumerate(locks):
        if lock.lock.acquire(blocking=False) or lock.lock.acquire(timeout=_PATIENCE):
            continue
        release(locks[:i])
        raise RuntimeError(
            f"another thread has been in the forward pass or the replay of a {lock.kind} of this "
            f"step for {_PATIENCE:g} s; expected it to end, since both update the same buffers. "
            "Give each thread its own model (copy.deepcopy), or use memory='store'"
        )


def release(locks: list[ModuleLock]) -> None:
    """Give all back."""
    for lock in reversed(locks):
        lock.lock.release()


@contextlib.contextmanager
def exclusive(locks: list[ModuleLock]) -> Iterator[None]:
    """For forward passes that are not recorded, beside other threads' replays."""
    acquire(locks)
    try:
        yield
    finally:
        release(locks)
