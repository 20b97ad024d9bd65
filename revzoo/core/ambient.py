"""Settings of torch that apply to all code that runs: what transforms it, autocast, defaults."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

HOST = ("cpu", "meta")  # no accelerators: the CPU's random state is always kept, meta has none


def runs_eagerly() -> bool:
    """Whether code runs as written, outside of torch.func transforms and captured graphs."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured. The host can then read no value or random state."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def is_faked(inputs: Iterable[Tensor]) -> bool:
    """Whether the step computes only shapes; random states are then fake or missing."""
    # real inputs become fake inside the mode
    if torch._C._len_torch_dispatch_stack() and torch._guards.detect_fake_mode() is not None:
        return True
    return any(type(t) is not Tensor and isinstance(t, FakeTensor) for t in inputs)


def default_device() -> torch.device | None:
    """The default device of factories such as torch.zeros; None if unset."""
    # set_default_device() and `with device:` are both modes on this stack
    if not torch._C._len_torch_function_stack():
        return None
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return torch.device(mode.device)
    return None


@contextlib.contextmanager
def _without_cached_casts() -> Iterator[None]:
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(cached)


def without_cached_casts(autocast: Sequence[object]) -> contextlib.AbstractContextManager[None]:
    """A context in which autocast, if it is on, casts each weight anew.

    Before torch 2.11, a cast that recorded nothing serves later code, which then has no gradient.
    """
    return _without_cached_casts() if autocast else contextlib.nullcontext()


@functools.cache
def autocast_device_types(devices: frozenset[torch.device]) -> list[str]:
    """The CPU's and the ``devices``' types that have autocast, sorted."""
    # the CPU always: branches may compute there, whatever the inputs' device
    kinds = sorted({"cpu", *(d.type for d in devices)})
    return [d for d in kinds if torch.amp.is_autocast_available(d)]
