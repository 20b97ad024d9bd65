"""The surroundings of a forward pass: random states, default device and dtype, autocast.

See rules 1 and 2 of NOTE [ What a replay restores ] in :mod:`revzoo.core.restore.conditions`.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from revzoo.core.restore import threads
from revzoo.core.restore.places import Undo

CPU = torch.device("cpu")
HOST = ("cpu", "meta")  # no accelerators: the CPU's random state is always kept, meta has none


class HostGenerator(NamedTuple):
    """A random generator of Python or NumPy, or the module ``random`` or ``numpy.random``."""

    generator: Any

    def get_state(self) -> Any:
        """A copy of its state: a tuple of numbers, or a dictionary with arrays of NumPy."""
        g = self.generator
        if hasattr(g, "getstate"):  # Python's
            return g.getstate()
        if hasattr(g, "get_state"):  # NumPy's RandomState, or its global one
            return g.get_state(legacy=False)
        return g.bit_generator.state  # NumPy's Generator

    def set_state(self, state: Any) -> None:
        """Put back a result of :meth:`get_state`."""
        g = self.generator
        if hasattr(g, "setstate"):
            g.setstate(state)
        elif hasattr(g, "set_state"):
            g.set_state(state)
        else:
            g.bit_generator.state = state


Source = torch.device | Generator | HostGenerator
States = dict[Source, Any]


def host_generator(v: Any) -> HostGenerator | None:
    """``v``, if it is a random generator of Python or NumPy, or the module of one."""
    numpy_random = sys.modules.get("numpy.random")
    kinds: tuple[type, ...] = (random.Random,)
    if numpy_random is not None:
        kinds = (*kinds, numpy_random.Generator, numpy_random.RandomState)
    is_one = isinstance(v, kinds) or v is random or (numpy_random is not None and v is numpy_random)
    return HostGenerator(v) if is_one else None


def random_states(sources: Iterable[Source]) -> States:
    """The random state of each source."""
    states: States = {}
    for source in sources:
        if isinstance(source, (Generator, HostGenerator)):
            states[source] = source.get_state()
        elif source.type == "cpu":
            states[source] = torch.default_generator.get_state()
        else:
            states[source] = torch.get_device_module(source).get_rng_state(source)
    return states


def set_random_states(states: States) -> None:
    """Put back what :func:`random_states` returned."""
    for source, state in states.items():
        if isinstance(source, (Generator, HostGenerator)):
            source.set_state(state)
        elif source.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state, source)


def _same_state(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return all(_same_state(value, b[key]) for key, value in a.items())
    same = a == b
    return bool(same if isinstance(same, bool) else same.all())  # NumPy compares each number


class RandomStates:
    """The random states before a forward pass, if it draws from them (rule 1)."""

    __slots__ = ("_after", "_before", "_entered", "_locked", "_mark", "_resets", "sources")

    def __init__(self, sources: tuple[Source, ...], *, resets: bool = False) -> None:
        """``resets``: whether the step's code may set a random state."""
        self.sources = sources
        self._resets = resets
        self._before: States = {}
        self._after: States = {}
        self._entered = self._locked = False

    def begin(self, draws: bool) -> None:
        """Begin the forward pass; ``draws``: whether an earlier pass drew, or there was none."""
        # rule 1 of NOTE [ Threads ]
        self._locked = draws and bool(self.sources) and threads.random_lock.acquire()
        self._entered = True
        if self.sources:
            self._mark = threads.swaps.now()
            self._before = random_states(self.sources)

    def finish(self, draws: bool) -> bool:
        """End the forward pass: forget states that it left unchanged.

        Returns:
            Whether it drew, or may have drawn; ``draws`` for a step without sources.
        """
        if not self.sources:
            return draws
        before, after = self._before, random_states(self.sources)
        changed = {s: state for s, state in before.items() if not _same_state(state, after[s])}
        # a state that was put back hides draws: by the step's code (torch.random.fork_rng), by the
        # inverse of a sequence in it, or by a replay in another thread
        hidden = self._resets or not threads.swaps.quiet_since(self._mark)
        self._before = before if hidden else changed
        self._after = {s: after[s] for s in self._before}
        return bool(changed) or hidden

    def release(self) -> None:
        """Release the lock that :meth:`begin` has taken."""
        if self._locked:
            threads.random_lock.release()

    @property
    def repeats(self) -> bool:
        """Whether a replay sets random states."""
        return bool(self._before if self._entered else self.sources)

    def to_repeat(self) -> States:
        """The states for a replay; without a forward pass, the current ones."""
        return self._before if self._entered else random_states(self.sources)

    def drawn(self) -> bool:
        """Whether the running replay has drawn everything that the forward pass drew."""
        now = random_states(self._before)
        return all(_same_state(state, self._after[s]) for s, state in now.items())

    def check_draws(self) -> None:
        """Raise a RuntimeError if a replay drew other numbers (rule 4 of NOTE [ Threads ])."""
        if not self._entered:
            return
        for source, state in random_states(self._before).items():
            # a replay that stops early or records nothing may draw nothing
            known = self._after[source], self._before[source]
            if not any(_same_state(state, expected) for expected in known):
                raise RuntimeError(
                    "a replay did not draw the random numbers of its forward pass. If several "
                    "threads drew at once: put a lock around their forward and backward passes, "
                    "give each its own torch.Generator, or use processes. If a branch draws only "
                    "in one of the two passes: use memory='store'. If its values decide how many "
                    "numbers it draws (RReLU): use memory='exact', 'recompute' or 'store', since "
                    "'invert' changes values by rounding"
                )


class CountedDraws(RandomStates):
    """Stands for the random states of a step that computes only shapes.

    A dispatch mode that follows the step counts the operators that would draw, in ``now``.
    """

    __slots__ = ("_draws", "_start")
    now = 0

    def __init__(self) -> None:
        super().__init__(())
        self._draws = self._start = 0

    def begin(self, draws: bool) -> None:
        self._start = CountedDraws.now

    def finish(self, draws: bool) -> bool:
        self._draws = CountedDraws.now - self._start
        return draws

    def to_repeat(self) -> States:
        self._start = CountedDraws.now
        return {}

    def drawn(self) -> bool:
        return CountedDraws.now - self._start >= self._draws


def is_faked(inputs: Iterable[Tensor]) -> bool:
    """Whether the step computes only shapes; random states are then fake or missing."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is None:
        return False
    # real inputs become fake inside the mode
    if torch._C._len_torch_dispatch_stack() and torch._guards.detect_fake_mode() is not None:
        return True
    return any(type(t) is not Tensor and isinstance(t, module.FakeTensor) for t in inputs)


def capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured. The host can then read no value or random state."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def runs_eagerly() -> bool:
    """Whether code runs as written, outside of torch.func transforms and captured graphs."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


# global settings that branches depend on, besides autocast: getter, setter
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    # the mode, not the flag: it has a third value, for warnings
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
)  # torch's public getters call these, but are slower
_READS = tuple(read for read, _ in _SWITCHES)
Ambient = tuple[torch.device | None, list[Any]]


def ambient() -> Ambient:
    """The default device, and the global settings."""
    return _default_device(), [read() for read in _READS]


def _default_device() -> torch.device | None:
    """The default device of factories such as torch.zeros; None if unset."""
    # set_default_device() and `with device:` are both modes on this stack
    if not torch._C._len_torch_function_stack():
        return None
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


AutocastState = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


def autocast_state(device_types: Iterable[str]) -> AutocastState:
    """Whether autocast caches; and its switch and dtype for each device type."""
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]
    return torch.is_autocast_cache_enabled(), tuple(states)


@functools.cache
def autocast_device_types(devices: frozenset[torch.device]) -> list[str]:
    """The CPU's and the ``devices``' types that have autocast, sorted."""
    # the CPU always: branches may compute there, whatever the inputs' device
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [d for d in kinds if torch.amp.is_autocast_available(d)]


def autocast_dtypes(*devices: torch.device) -> list[torch.dtype]:
    """The dtypes of autocast on the CPU and ``devices``; empty if it is off on all of them."""
    kinds = autocast_device_types(frozenset(devices))
    return [torch.get_autocast_dtype(d) for d in kinds if torch.is_autocast_enabled(d)]


class Surroundings:
    """Autocast, default device and dtype, and global switches of a forward pass (rule 2)."""

    __slots__ = ("_ambient", "_autocast", "_kinds", "autocast_dtypes")

    def __init__(self, devices: frozenset[torch.device]) -> None:
        self.autocast_dtypes = autocast_dtypes(*devices)
        self._kinds = autocast_device_types(devices)
        self._autocast = autocast_state(self._kinds)
        self._ambient = ambient()

    def restore(self, undo: Undo) -> None:
        """Set what differs now until ``undo`` runs; usually nothing, since entering takes time."""
        device, values = self._ambient
        for (read, write), value in zip(_SWITCHES, values, strict=True):
            if (now := read()) != value:
                undo.append((write, (now,)))
                write(value)
        if _default_device() != device:
            _enter(undo, device or CPU)  # no default device means the CPU
        cache, states = self._autocast
        if autocast_state(self._kinds) != self._autocast:
            for d, on, dtype in states:
                _enter(undo, torch.autocast(d, dtype=dtype, enabled=on, cache_enabled=cache))


def _enter(undo: Undo, context: contextlib.AbstractContextManager[Any]) -> None:
    context.__enter__()
    undo.append((context.__exit__, (None, None, None)))
