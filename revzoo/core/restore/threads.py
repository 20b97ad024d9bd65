"""Threads that share torch's random state or a model.

NOTE [ Threads ]
    All threads share torch's random state, and all callers of a module share its buffers. A replay
    swaps both for a moment. So:

    1. One lock protects replays that draw random numbers, and forward passes of steps that draw or
       may draw, as in their first pass. Steps that have drawn nothing so far run in parallel.
    2. A lock per module protects replays that swap its buffers, and its forward passes.
    3. Every wait has a limit, since a branch may itself wait for another thread (synchronised
       statistics between ranks that are threads), and a backward pass inside a forward pass may
       run in another thread. After ``_PATIENCE`` seconds (half as long the next time) a thread
       continues without the random lock; a wait for a module's lock raises.
    4. Correct gradients do not depend on rule 1. A replay must leave the random state as the
       forward pass left it, or not touch it. Otherwise it drew different numbers, and we raise.

    Threads that draw outside revzoo's steps (an augmentation, ``torch.manual_seed``) do not take
    the lock. If they disturb a replay, or only the forward pass, rule 4 raises. During a replay
    such a thread draws numbers that the forward pass has drawn, and its draws are undone
    afterwards. Give it its own ``torch.Generator``.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator

from torch import nn

_PATIENCE = 10.0  # seconds; forward passes of single steps are much shorter


class Sections:
    """Counts running sections. For other threads, nested sections of one thread count once."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._entered = self._inside = 0
        self._own = threading.local()

    def enter(self) -> None:
        """Begin a section."""
        depth: int = getattr(self._own, "depth", 0)
        self._own.depth = depth + 1
        self._own.entered = getattr(self._own, "entered", 0) + 1
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

    def now(self) -> tuple[int, int, bool]:
        """A mark, for :meth:`quiet_since`."""
        entered = self._entered  # read first, to notice a section that begins between the two reads
        alone = self._inside == (getattr(self._own, "depth", 0) > 0)
        return entered, getattr(self._own, "entered", 0), alone

    def quiet_since(self, mark: tuple[int, int, bool]) -> bool:
        """Whether since ``mark`` no other thread was in a section, and this one began none."""
        return mark[2] and (self._entered, getattr(self._own, "entered", 0)) == mark[:2]


swaps = Sections()  # replays that swap the random state


class RandomLock:
    """Rule 1 of NOTE [ Threads ]."""

    def __init__(self) -> None:
        # reentrant: a replay may run a step, or another backward pass, that draws
        self._lock = threading.RLock()
        self.patience = _PATIENCE

    def acquire(self) -> bool:
        """Take the lock; returns False after ``patience`` seconds."""
        if self._lock.acquire(timeout=self.patience):
            return True
        # otherwise a thread that can never get the lock would wait at each of its steps
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
    """The locks of the modules with buffers, in the order of taking them."""
    stateful = [m for m in modules if m._buffers]
    locks = [_locks.setdefault(m, ModuleLock(type(m).__name__)) for m in stateful]
    # one order for all threads, so that two of them cannot each hold what the other needs
    return sorted(locks, key=lambda lock: lock.number)


def acquire(locks: list[ModuleLock]) -> None:
    """Take all locks, or none and raise."""
    for i, lock in enumerate(locks):
        if lock.lock.acquire(timeout=_PATIENCE):
            continue
        release(locks[:i])
        raise RuntimeError(
            f"another thread has been in the forward pass or the replay of a {lock.kind} of this "
            f"step for {_PATIENCE:g} s; expected it to end, since both update the same buffers. "
            "Give each thread its own model (copy.deepcopy), or use memory='store'"
        )


def release(locks: list[ModuleLock]) -> None:
    """Release all locks."""
    for lock in reversed(locks):
        lock.lock.release()


@contextlib.contextmanager
def exclusive(locks: list[ModuleLock]) -> Iterator[None]:
    """Hold the locks inside a ``with`` block."""
    acquire(locks)
    try:
        yield
    finally:
        release(locks)
