"""What autograd's graph saves: the hooks that decide it, and tensors saved beside it.

Mode offload keeps them in host memory. Why not ``torch.autograd.graph.save_on_cpu``: it also moves
the weights, and it does not detect in-place changes of kept tensors. On the CPU, where its copy is
the tensor itself, this gives wrong gradients. Here weights and tensors on the CPU stay in place,
and their versions are checked.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from revzoo.core.tensors import runs_eagerly, storage_id
from revzoo.core.words import Fixed, Streams, backing_tensors

# Private in torch: the hooks of the innermost context. Without it we assume that there are none: do
# not use torch's checkpoints then, since nothing shows where they begin and end.
innermost_hooks: Callable[[bool], Any] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None
)

# Private in torch: whether the running backward pass keeps the graph for another one. Without it we
# assume that it does, which is always right and costs one retained state.
graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


class Versioned(NamedTuple):
    """A saved tensor and its version: hooks switch off autograd's own check."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(t: Tensor) -> Versioned:
        """Save ``t``; detached, since an output saved by its own node would hold that node."""
        return Versioned(t if t.is_leaf else t.detach(), t._version)

    def get(self) -> Tensor:
        """The tensor; raises a RuntimeError if it was changed in place."""
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{now}; expected version {self.version} instead"
            )
        return self.tensor


def hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
    """The innermost hooks of saved tensors; without any, hooks that check versions."""
    found = innermost_hooks(True)
    return (Versioned.of, Versioned.get) if found is None else found[:2]


def are_watched() -> bool:
    """Whether a caller may keep tensors that are made here, or records the pass to repeat it.

    By hooks of saved tensors, as checkpoints have, or by a mode.
    """
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
    return bool(modes) or innermost_hooks(True) is not None


def save_for_backward(t: Tensor) -> Callable[[], Tensor]:
    """Save ``t`` like the graph's tensors; returns a function that gives it back in backward."""
    pack, unpack = hooks()
    return functools.partial(unpack, pack(t))


class _Shape(NamedTuple):
    """Replaces a tensor in the graph if the gradient reads only its shape."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def keeping_shape_of(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which the graph keeps only the shape of ``x``.

    For single operators whose gradient reads no values of ``x``: it receives uninitialised memory.
    """
    if not runs_eagerly() or not torch.is_grad_enabled():
        return contextlib.nullcontext()
    # nested hooks replace the outer ones in torch, so other tensors are passed on by hand
    pack, unpack = hooks()
    at = storage_id(x)

    def pack_others(t: Tensor) -> Any:
        if storage_id(t) == at:
            return _Shape(t.shape, t.stride(), t.dtype, t.device)
        return pack(t)

    def unpack_others(packed: Any) -> Tensor:
        if isinstance(packed, _Shape):
            return torch.empty_strided(*packed[:2], dtype=packed.dtype, device=packed.device)
        return unpack(packed)

    return saved_tensors_hooks(pack_others, unpack_others)


class SavedState:
    """A state that a tape keeps: itself, or, inside a checkpoint, as one of its activations."""

    def __init__(self, state: Streams) -> None:
        pack, self._unpack = hooks()
        held = backing_tensors(state)
        if getattr(pack, "_checkpoint_internal", False):  # torch's mark of its checkpoint
            # copies of floats: its replay goes on, and may change them in place
            held = tuple(t.clone() if t.is_floating_point() else t for t in held)
        self._packed = [pack(t) for t in held]
        self._fixed = [t.with_words(_NOTHING) if isinstance(t, Fixed) else None for t in state]

    def state(self, name: str) -> Streams:
        """The state; raises if it was changed in place. ``name`` is the last step's."""
        try:
            held = map(self._unpack, self._packed)
            return tuple(
                t if f is None else f.with_words(t) for t, f in zip(held, self._fixed, strict=True)
            )
        except RuntimeError as error:
            error.add_note(
                f"It is a stream from which the activations of {name} are recomputed: make the "
                "operation that follows out of place"
            )
            raise


_NOTHING = torch.empty(0, device="cpu")


class _Thread(threading.local):
    for_replay: list[Tensor] | None = None  # see save_for_replay


_thread = _Thread()


@contextlib.contextmanager
def saving_for_replay(tensors: list[Tensor] | None) -> Iterator[None]:
    """A context in which :func:`save_for_replay` appends to ``tensors``; None: it does nothing."""
    outer, _thread.for_replay = _thread.for_replay, tensors
    try:
        yield
    finally:
        _thread.for_replay = outer


def saves_for_replay() -> bool:
    """Whether the running step has a replay, which needs what :func:`save_for_replay` keeps."""
    return _thread.for_replay is not None


def save_for_replay(t: Tensor) -> None:
    """Keep ``t`` for the replay of the running step, if its mode inverts it."""
    if _thread.for_replay is not None:
        _thread.for_replay.append(t)


_STAYS = ("cpu", "meta")  # on the host already, or without data to move


class _Moved(NamedTuple):
    copy: Tensor
    device: torch.device


def offloaded(module: nn.Module) -> saved_tensors_hooks:
    """A context in which the graph of ``module`` keeps activations in pinned host memory."""
    resident = {storage_id(t) for t in (*module.parameters(), *module.buffers()) if not is_lazy(t)}

    def pack(t: Tensor) -> Versioned | _Moved:
        if t.device.type in _STAYS or storage_id(t) in resident:
            return Versioned.of(t)
        # pinned: otherwise the copy back (non_blocking) waits for the GPU
        copy = torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda")
        return _Moved(copy.copy_(t), t.device)

    return saved_tensors_hooks(pack, _unpack)


def _unpack(packed: Versioned | _Moved) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True)
    return packed.get()
