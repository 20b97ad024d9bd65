"""Slots, which the graph holds instead of activations, and hooks that save tensors in it.

See NOTE [ Slots and the tape ] in :mod:`revzoo.core.replay.tape`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from revzoo.core.fixedpoint.words import Fixed, Streams, backing_tensors
from revzoo.core.restore.global_state import runs_eagerly
from revzoo.core.tensors import storage_id, version_of


class SlotTape(Protocol):
    """The part of a tape that slots use."""

    small_bytes: int

    def replay(self, index: int) -> None: ...


class Slot:
    """Replaces one saved activation of the tape's entry ``index`` in the graph."""

    # thousands live at once, so no __dict__; the tape refers to slots weakly (rule 1)
    __slots__ = ("__weakref__", "dtype", "index", "shape", "tape", "value")

    def __init__(self, tape: SlotTape, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tape = tape
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.value: Tensor | None = None


class Versioned(NamedTuple):
    """A tensor that the graph saves itself, such as a parameter or a buffer."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(t: Tensor) -> Versioned:
        """Save ``t``; detached, since an output saved by its own node would hold that node."""
        return Versioned(t if t.is_leaf else t.detach(), t._version)

    def check(self) -> None:
        """Raise if the tensor was changed in place: hooks switch off autograd's own check."""
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{now}; expected version {self.version} instead"
            )


# Whether the running backward pass keeps the graph for another one. Private: without it we assume
# that it does, which is always right and costs one retained state (rule 5).
graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def unpack(packed: Slot | Versioned) -> Tensor:
    """Return a saved tensor to the graph; replay the step if its slot is empty."""
    if type(packed) is Slot:
        if packed.value is None:
            packed.tape.replay(packed.index)
        value = packed.value
        assert value is not None
        # -1 outside a backward pass, as when a user reads grad_fn._saved_self
        if torch._C._current_graph_task_id() >= 0 and graph_is_kept():
            packed.value = None  # rule 5; otherwise the graph drops the slot
        return value
    assert isinstance(packed, Versioned)
    return unpack_versioned(packed)


def unpack_versioned(packed: Versioned) -> Tensor:
    """Return a saved tensor to the graph; raise if it was changed in place."""
    tensor, version = packed
    if tensor._version != version:
        packed.check()
    return tensor


_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]
Memos = dict[nn.Module, tuple[Tensor, ...]]


class _Thread(threading.local):
    """How the running step saves tensors. Outside of its context a field is None or False."""

    hooks: tuple[_Pack, _Unpack] | None = None  # of the innermost TensorHooks
    for_replay: list[Tensor] | None = None  # see save_for_replay
    memos: Memos | None = None  # see remember
    recalls = False  # whether a replay reads the memos
    approximate = False  # see replays_are_approximate


_thread = _Thread()


class _ThreadFields:
    """Set fields of this thread's :class:`_Thread` inside a ``with`` block."""

    __slots__ = ("_fields", "_outer")

    def __init__(self, **fields: Any) -> None:
        self._fields = fields

    def __enter__(self) -> None:
        self._outer = {name: getattr(_thread, name) for name in self._fields}
        vars(_thread).update(self._fields)

    def __exit__(self, *_: object) -> None:
        vars(_thread).update(self._outer)


class TensorHooks(saved_tensors_hooks):
    """``saved_tensors_hooks(pack, unpack)`` that the tapes of inner steps can use, too."""

    def __enter__(self) -> None:
        self._outer = _thread.hooks
        # torch has no public way to ask for the innermost hooks
        super().__enter__()
        _thread.hooks = self.pack_hook, self.unpack_hook

    def __exit__(self, *exception: object) -> None:
        _thread.hooks = self._outer
        super().__exit__(*exception)


def _hooks() -> tuple[_Pack, _Unpack]:
    """The hooks of the innermost TensorHooks; outside, hooks that keep a tensor and its version."""
    return _thread.hooks or (Versioned.of, unpack_versioned)


class _Shape(NamedTuple):
    """Replaces a tensor in the graph if the gradient reads only its shape."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def keeping_shape_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which the graph keeps only the shape of ``x``.

    For single operators whose gradient reads no values of ``x``: it receives uninitialised memory.
    """
    if not runs_eagerly():
        return contextlib.nullcontext()
    # nested hooks replace the outer ones in torch, so other tensors are passed on by hand
    pack, unpack = _hooks()
    at = storage_id(x)

    def pack_others(t: Tensor) -> Any:
        if storage_id(t) == at:
            return _Shape(t.shape, t.stride(), t.dtype, t.device)
        return pack(t)

    def unpack_others(packed: Any) -> Tensor:
        if isinstance(packed, _Shape):
            return torch.empty_strided(*packed[:2], dtype=packed.dtype, device=packed.device)
        return unpack(packed)

    return TensorHooks(pack_others, unpack_others)


def without_outer_hooks() -> _ThreadFields:
    """A context without outer Recordings: a backward pass may run inside forward code."""
    return _ThreadFields(hooks=None, for_replay=None, memos=None, approximate=False)


def save_for_backward(t: Tensor) -> Callable[[], Tensor]:
    """Save ``t`` like the graph's tensors; returns a function that gives it back in backward.

    A replay of the same code saves it again and so fills an empty slot.
    """
    pack, give = _hooks()
    return functools.partial(give, pack(t))


# stands in for tensors that slots of the outer step hold
_NO_VALUES = torch.empty(0, device="cpu")


class SavedState:
    """A state that a tape keeps: itself, or as activations of the outer step (rule 9)."""

    __slots__ = ("_packed", "_state", "_unpack", "_versions")

    def __init__(self, state: Streams) -> None:
        hooks = _thread.hooks
        self._unpack: _Unpack | None = None
        self._state = state
        self._packed: tuple[Any, ...] = backing_tensors(state)
        # nobody else checks a state on the tape: it is not in a graph
        self._versions = [version_of(t) for t in self._packed]
        if hooks is not None:
            pack, self._unpack = hooks
            self._packed = tuple(map(pack, self._packed))
            self._state = tuple(
                t.with_words(_NO_VALUES) if isinstance(t, Fixed) else _NO_VALUES for t in state
            )

    def state(self, name: str) -> Streams:
        """The state; raises if it was changed in place. ``name`` is the last step's."""
        if self._unpack is not None:
            unpacked = zip(map(self._unpack, self._packed), self._state, strict=True)
            return tuple(
                t.with_words(held) if isinstance(t, Fixed) else held for held, t in unpacked
            )
        for i, (t, version) in enumerate(zip(self._packed, self._versions, strict=True)):
            if version_of(t) != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: stream {i} of shape {tuple(t.shape)}, from which the "
                    f"activations of {name} are to be recomputed, is at version {version_of(t)}; "
                    f"expected version {version} instead. Make the operation that follows out of "
                    "place"
                )
        return self._state


def save_for_replay(t: Tensor) -> None:
    """Keep ``t`` for the replay of the running step, if its mode inverts it."""
    for_replay = _thread.for_replay
    if for_replay is not None:
        for_replay.append(t)


def saving_nothing_for_replay() -> _ThreadFields:
    """A context in which :func:`save_for_replay` does nothing."""
    return _ThreadFields(for_replay=None)


def in_forward(
    for_replay: list[Tensor] | None, memos: Memos | None, *, approximate: bool
) -> _ThreadFields:
    """A context for the forward pass of a step.

    Args:
        for_replay: :func:`save_for_replay` appends to it; with None it does nothing.
        memos: :func:`remember` writes to it.
        approximate: whether replays start from inputs with rounding errors.
    """
    return _ThreadFields(for_replay=for_replay, memos=memos, recalls=False, approximate=approximate)


def replays_are_approximate() -> bool:
    """Whether replays compute the running code from inputs with rounding errors."""
    return _thread.approximate


def remember(layer: nn.Module, *packed: object) -> None:
    """Let replays of the running step recall small tensors that the layer computed.

    Args:
        layer: the caller. Nothing is recalled of a layer that ran twice in the step.
        *packed: the tensors as the graph saved them; nothing is recalled if one has a slot.
    """
    memos = _thread.memos
    if memos is not None and not _thread.recalls:
        # () for a layer that runs twice: a replay could not say which call it repeats
        kept = tuple(p.tensor for p in packed if isinstance(p, Versioned))
        memos[layer] = kept if layer not in memos and len(kept) == len(packed) else ()


def remembered(layer: nn.Module) -> tuple[Tensor, ...]:
    """In a replay, the tensors that the layer remembered in the forward pass; otherwise ()."""
    memos = _thread.memos
    return memos.get(layer, ()) if memos is not None and _thread.recalls else ()


def in_replay(memos: Memos | None) -> _ThreadFields:
    """A context for a replay, in which :func:`remembered` reads ``memos``."""
    return _ThreadFields(memos=memos, recalls=True)
