"""The surroundings of a forward pass: random states, default device and dtype, autocast.

See rules 1 and 2 of NOTE [ What a replay restores ] in :mod:`revzoo.core.replay`.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

CPU = torch.device("cpu")
HOST = ("cpu", "meta")  # devices without their own random state
Source = torch.device | Generator
States = dict[Source, Tensor]


def random_states(sources: Iterable[Source]) -> States:
    """The random state of each source."""
    states: States = {}
    for source in sources:
        if isinstance(source, Generator):
            states[source] = source.get_state()
        elif source.type == "cpu":
            states[source] = torch.default_generator.get_state()
        else:
            states[source] = torch.get_device_module(source).get_rng_state(source)
    return states


def set_random_states(states: States) -> None:
    """Put back what :func:`random_states` returned."""
    for source, state in states.items():
        if isinstance(source, Generator):
            source.set_state(state)
        elif source.type == "cpu":
            torch.default_generator.set_state(state)
        else:
            torch.get_device_module(source).set_rng_state(state, source)


def is_faked(inputs: Iterable[Tensor]) -> bool:
    """Whether the step computes only shapes; random states are then fake or missing."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    if module is None:
        return False
    if torch._C._len_torch_dispatch_stack() and torch._guards.detect_fake_mode() is not None:
        return True
    return any(type(t) is not Tensor and isinstance(t, module.FakeTensor) for t in inputs)


# global settings that branches depend on, besides autocast: getter, setter
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch._C._get_mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch._C._get_math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch._C._get_cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    (torch._C._get_deterministic_algorithms, torch.use_deterministic_algorithms),
)  # torch's public getters call these, but are slower
_READS = tuple(read for read, _ in _SWITCHES)
Ambient = tuple[torch.device | None, list[Any]]


def ambient() -> Ambient:
    """The default device, and the global settings."""
    return _default_device(), [read() for read in _READS]


def _default_device() -> torch.device | None:
    """The default device of factories such as torch.zeros; None if unset."""
    if not torch._C._len_torch_function_stack():
        return None
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


@contextlib.contextmanager
def set_ambient(wanted: Ambient) -> Iterator[None]:
    """Set what :func:`ambient` returned; a context that restores the caller's."""
    device, values = wanted
    with contextlib.ExitStack() as stack:
        for (read, write), value in zip(_SWITCHES, values, strict=True):
            if (now := read()) != value:
                stack.callback(write, now)
                write(value)
        if _default_device() != device:
            stack.enter_context(device or CPU)
        yield


AutocastState = tuple[bool, tuple[tuple[str, bool, torch.dtype], ...]]


def autocast_state(device_types: Iterable[str]) -> AutocastState:
    """Whether autocast caches; and its switch and dtype for each device type."""
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in device_types]
    return torch.is_autocast_cache_enabled(), tuple(states)


@functools.cache
def with_autocast(devices: frozenset[torch.device]) -> list[str]:
    """The device types of the CPU and ``devices`` that have autocast, in a fixed order."""
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [d for d in kinds if torch.amp.is_autocast_available(d)]


@contextlib.contextmanager
def autocast(wanted: AutocastState) -> Iterator[None]:
    """Set what :func:`autocast_state` returned; a context that restores the caller's."""
    cache, states = wanted
    with contextlib.ExitStack() as stack:
        for d, on, dtype in states:
            stack.enter_context(torch.autocast(d, dtype=dtype, enabled=on, cache_enabled=cache))
        yield
