"""Slots, which the graph holds instead of activations, and the replays that fill them.

See NOTE [ Slots and the tape ] in :mod:`revzoo.core.checkpoint`.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module
from torch.utils._pytree import tree_map_only

from revzoo.core.fixedpoint import (
    Fixed,
    Streams,
    counting_changes,
    fixed_or_not,
    floats,
    held_in,
    keeps_words,
    move_words,
    moved,
    words_through,
)
from revzoo.core.guard import Guard, Peak, Samples, peaks_of, sample
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    check_inputs,
    name_of,
    plain_call,
)
from revzoo.core.layout import dense, fills_its_memory, laid_out
from revzoo.core.replay import Conditions, address, version_of


class ReplayMismatchError(RuntimeError):
    """A replay saved other tensors than the forward pass: the step is not deterministic."""


class _Tape(Protocol):
    small_bytes: int

    def replay(self, index: int) -> None: ...


class Slot:
    """Replaces one saved activation of the tape's entry ``index`` in the graph."""

    __slots__ = ("__weakref__", "dtype", "index", "shape", "tape", "value")

    def __init__(self, tape: _Tape, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tape = tape
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.value: Tensor | None = None


class Resident(NamedTuple):
    """A tensor that the graph saves itself, such as a parameter or a buffer."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(t: Tensor) -> Resident:
        """Save ``t``; detached, since an output saved by its own node would hold that node."""
        return Resident(t if t.is_leaf else t.detach(), t._version)

    def check(self) -> None:
        """Raise if the tensor was changed in place: hooks switch off autograd's own check."""
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{now}; expected version {self.version} instead"
            )


# Whether the running backward pass keeps the graph for another one. Private: without it we assume
# so, which is always right and costs one retained state (rule 5).
graph_is_kept: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)


def unpack(packed: Slot | Resident) -> Tensor:
    """Return a saved tensor to the graph; replay the step if its slot is empty."""
    if type(packed) is Slot:
        if packed.value is None:
            packed.tape.replay(packed.index)
        value = packed.value
        assert value is not None
        if torch._C._current_graph_task_id() >= 0 and graph_is_kept():
            packed.value = None  # rule 5; otherwise the graph drops the slot
        return value
    assert isinstance(packed, Resident)
    return unpack_resident(packed)


def unpack_resident(packed: Resident) -> Tensor:
    """Return a saved tensor to the graph; raise if it was changed in place."""
    tensor, version = packed
    if tensor._version != version:
        packed.check()
    return tensor


_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]
_thread = threading.local()  # .hooks: pack and unpack of the innermost Recording


class Recording(saved_tensors_hooks):
    """``saved_tensors_hooks(pack, unpack)`` that the tapes of inner steps can use, too."""

    def __enter__(self) -> None:
        self._outer = getattr(_thread, "hooks", None)
        super().__enter__()
        _thread.hooks = self.pack_hook, self.unpack_hook

    def __exit__(self, *exception: object) -> None:
        _thread.hooks = self._outer
        super().__exit__(*exception)


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
    if not hooks_allowed():
        return contextlib.nullcontext()
    pack, unpack = getattr(_thread, "hooks", None) or (Resident.of, unpack_resident)
    at = address(x)

    def pack_others(t: Tensor) -> Any:
        if address(t) == at:
            return _Shape(t.shape, t.stride(), t.dtype, t.device)
        return pack(t)

    def unpack_others(packed: Any) -> Tensor:
        if isinstance(packed, _Shape):
            return torch.empty_strided(*packed[:2], dtype=packed.dtype, device=packed.device)
        return unpack(packed)

    return Recording(pack_others, unpack_others)


def hooks_allowed() -> bool:
    """Whether saved-tensor hooks work here: not in transforms and captured graphs."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


class outside_recordings:
    """Hide outer Recordings and asides: a backward pass may run inside forward code."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer = [getattr(_thread, name, None) for name in ("hooks", "aside", "notes")]
        _thread.hooks = _thread.aside = _thread.notes = None

    def __exit__(self, *_: object) -> None:
        _thread.hooks, _thread.aside, _thread.notes = self._outer


def keep(t: Tensor) -> Callable[[], Tensor]:
    """Save ``t`` like the graph's tensors; returns a function that gives it back in backward.

    A replay of the same code saves it again, so an empty slot is filled.
    """
    pack, give = getattr(_thread, "hooks", None) or (Resident.of, unpack)
    return functools.partial(give, pack(t))


_NONE = torch.empty(0, device="cpu")


class Kept:
    """A state that a tape keeps: itself, or as activations of the outer step (rule 9)."""

    __slots__ = ("_packed", "_state", "_unpack", "_versions")

    def __init__(self, state: Streams) -> None:
        hooks = getattr(_thread, "hooks", None)
        self._unpack: _Unpack | None = None
        self._state = state
        self._packed: tuple[Any, ...] = held_in(state)
        self._versions = versions_of(self._packed)
        if hooks is not None:
            pack, self._unpack = hooks
            self._packed = tuple(map(pack, self._packed))
            self._state = tuple(t.moved(_NONE) if isinstance(t, Fixed) else _NONE for t in state)

    def state(self, name: str) -> Streams:
        """The state; raises if it was changed in place. ``name`` is the last step's."""
        if self._unpack is not None:
            unpacked = zip(map(self._unpack, self._packed), self._state, strict=True)
            return tuple(t.moved(held) if isinstance(t, Fixed) else held for held, t in unpacked)
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


class explained:
    """Add a remedy to torch's error for ``torch.func`` transforms under our hooks."""

    __slots__ = ("_step",)

    def __init__(self, step: Step) -> None:
        self._step = step

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, RuntimeError) and "support saved tensor hooks" in str(error):
            raise RuntimeError(
                f"{name_of(self._step)} runs a torch.func transform inside its forward, which "
                f"torch refuses while activations are recomputed or offloaded: {self._step.instead}"
            ) from error


def put_aside(t: Tensor) -> None:
    """Keep ``t`` for the replay of the running step, if its mode inverts it."""
    aside = getattr(_thread, "aside", None)
    if aside is not None:
        aside.append(t)


class asides:
    """Let :func:`put_aside` append to ``kept``; with None it does nothing."""

    __slots__ = ("_kept", "_outer")

    def __init__(self, kept: list[Tensor] | None) -> None:
        self._kept = kept

    def __enter__(self) -> None:
        self._outer, _thread.aside = getattr(_thread, "aside", None), self._kept

    def __exit__(self, *_: object) -> None:
        _thread.aside = self._outer


_Notes = dict[nn.Module, tuple[Tensor, ...]]


def note(layer: nn.Module, *packed: object) -> None:
    """Let replays of the running step recall small tensors that the layer computed.

    Args:
        layer: at each of its calls; if it is called twice, nothing is recalled.
        *packed: the tensors as the graph saved them; nothing is recalled if one has a slot.
    """
    notes: _Notes | None = getattr(_thread, "notes", None)
    if notes is not None and not _thread.recalls:
        kept = tuple(p.tensor for p in packed if isinstance(p, Resident))
        notes[layer] = kept if layer not in notes and len(kept) == len(packed) else ()


def recalled(layer: nn.Module) -> tuple[Tensor, ...]:
    """In a replay, the tensors that the layer noted in the forward pass; otherwise ()."""
    notes: _Notes | None = getattr(_thread, "notes", None)
    return notes.get(layer, ()) if notes is not None and _thread.recalls else ()


class noting:
    """Let :func:`note` write to ``notes``, or with ``recalls`` :func:`recalled` read from it."""

    __slots__ = ("_notes", "_outer")

    def __init__(self, notes: _Notes | None, *, recalls: bool = False) -> None:
        self._notes = notes, recalls

    def __enter__(self) -> None:
        self._outer = getattr(_thread, "notes", None), getattr(_thread, "recalls", False)
        _thread.notes, _thread.recalls = self._notes

    def __exit__(self, *_: object) -> None:
        _thread.notes, _thread.recalls = self._outer


def call_on_grid(
    call: Callable[..., Any], step: Step, state: State, context: Mapping[str, Any]
) -> Any:
    """``call(step, *state, **context)``; the words move with the values."""
    if not _keeps_words_of(step):
        return call(step, *state, **context)
    # in other calls than ours, a hook may change the outputs
    trusted = call is call_without_changing_hooks or not hooked(step)
    return _call_with_words(
        step,
        functools.partial(call, step, *state, **context),
        functools.partial(step.forward, **context) if trusted else None,
        state,
        step.extras,
    )


def inverse_on_grid(step: Invertible, /, *state: Tensor, **context: Any) -> State:
    """``step.inverse(*state, **context)``; the words move with the values."""
    if not _keeps_words_of(step):
        return as_state(step.inverse(*state, **context))
    inverse = functools.partial(step.inverse, **context)
    inputs: State = _call_with_words(step, lambda: as_state(inverse(*state)), inverse, state, 0)
    return inputs


def _keeps_words_of(step: Step) -> bool:
    return step.grid is not None and step.moves_values and keeps_words()


def _call_with_words(
    step: Step,
    call: Callable[[], Any],
    fn: Callable[..., Any] | None,
    state: State,
    extras: int,
) -> Any:
    """``call()`` of a step that moves values; its streams are dense and get words by ``fn``."""
    with counting_changes():
        returned = call()
        outputs = as_state(returned, step)
        cut = len(outputs) - extras
        streams = tuple(dense(t, state[0]) for t in outputs[:cut])
    if fn is not None:
        move_words(fn, state, streams)
    return streams[0] if isinstance(returned, Tensor) else (*streams, *outputs[cut:])


def call_without_changing_hooks(step: Step, /, *state: Tensor, **context: Any) -> Any:
    """Call ``step``; its forward hooks may read the streams, but not change them.

    Raises:
        RuntimeError: a hook changed a stream, which the inverse of the step would not undo.
    """
    if not hooked(step):
        return plain_call(step, *state, **context)
    before = _identity(state)
    with _watched(step) as inside:
        outputs = plain_call(step, *state, **context)
    if inside and inside != [before, _identity(as_state(outputs, step))]:
        raise RuntimeError(
            f"a forward hook on {name_of(step)} changed its streams, which its inverse would not "
            "undo: put the change into a step, or use memory='recompute' or 'store' for this step"
        )
    return outputs


class _Watch(NamedTuple):
    """A step whose ``forward`` is wrapped while calls of one or more threads run."""

    users: list[int]  # number of running calls
    own: bool  # whether ``forward`` was an attribute of the step, not only of its class
    forward: Callable[..., Any]


_watches: dict[int, _Watch] = {}
_watching = threading.Lock()


@contextlib.contextmanager
def _watched(step: Step) -> Iterator[list[list[Any]]]:
    """Record arguments and outputs of this thread's last call of ``forward`` in a list."""
    inside: list[list[Any]] = []
    outer = getattr(_thread, "inside", {})
    _thread.inside = {**outer, id(step): inside}
    with _watching:
        watch = _watches.get(id(step))
        if watch is None:
            watch = _Watch([0], "forward" in vars(step), step.forward)
            _watches[id(step)] = watch
            step.forward = functools.partial(_watched_forward, step, watch.forward)
        watch.users[0] += 1
    try:
        yield inside
    finally:
        _thread.inside = outer
        with _watching:
            watch.users[0] -= 1
            if not watch.users[0]:
                del _watches[id(step)]
                if watch.own:
                    step.forward = watch.forward
                else:
                    del step.forward


def _watched_forward(step: Step, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    outputs = forward(*args, **kwargs)
    inside = getattr(_thread, "inside", {}).get(id(step))
    if inside is not None:
        inside[:] = [_identity(args), _identity(as_state(outputs, step))]
    return outputs


def hooked(layer: nn.Module) -> bool:
    """Whether forward hooks run on the layer, its own or global ones."""
    own = layer._forward_hooks or layer._forward_pre_hooks
    return bool(own or module._global_forward_hooks or module._global_forward_pre_hooks)


def _identity(state: tuple[Any, ...]) -> list[Any]:
    """Memory, geometry and version of each stream; equal for an alias."""
    return [
        (address(t), t.storage_offset(), t.shape, t.stride(), version_of(t))
        if isinstance(t, Tensor)
        else t
        for t in state
    ]


def unshared(t: Tensor) -> bool:
    """Whether no other tensor uses the storage of ``t``, so that it may be overwritten."""
    if _use_count is None or not fills_its_memory(t):
        return False
    storage = t.untyped_storage()
    return _use_count(storage._cdata) == 2  # t's own and this handle's


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private: do without if it is gone


def versions_of(state: Streams) -> list[int]:
    """The version counters, to detect in-place changes of ``state``."""
    return [version_of(t) for t in held_in(state)]


def refuse_changed_inputs(name: str, inputs: State, versions: list[int]) -> None:
    """Raise a RuntimeError if a forward pass changed a stream in place; names the step."""
    _refuse_changed(
        inputs,
        versions,
        f"{name} changed its input stream",
        "the other stream would be combined with another value in each memory mode. Make the "
        "first operation of the branch out of place (inplace=False)",
    )


def refuse_changed_outputs(name: str, outputs: Streams, versions: list[int]) -> None:
    """Raise a RuntimeError if an inverse changed a stream in place; names the step."""
    _refuse_changed(
        held_in(outputs),
        versions,
        f"the inverse of {name} changed its input stream",
        "the caller may still hold that tensor, as an output of the forward pass. Make the "
        "operations of the inverse out of place",
    )


def _refuse_changed(state: State, versions: list[int], what: str, remedy: str) -> None:
    for i, (t, version) in enumerate(zip(state, versions, strict=True)):
        if (now := version_of(t)) != version:
            raise RuntimeError(f"{what} {i} in place (version {version} became {now}): {remedy}")


# Storages smaller than a step's input by _SMALL are kept, not replayed. A chain keeps at most
# _MOST_SMALL times the largest of them: its memory must not grow with its depth.
_SMALL, _MOST_SMALL = 512, 16


def _bytes_of(t: Tensor) -> int:
    """The bytes of a tensor's storage; 0 if it has none."""
    try:
        return t.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
        return 0


class Entry:
    """One executed step with the data for its replay, but no activation and no graph."""

    __slots__ = (
        "_aside",
        "conditions",
        "context",
        "dtypes",
        "inverts",
        "limit",
        "name",
        "needs",
        "notes",
        "peaks",
        "samples",
        "saved",
        "small",
        "step",
        "strides",
        "witness",
    )

    def __init__(
        self,
        step: Step,
        inputs: State,
        context: Mapping[str, Any],
        drift_limit: float,
        *,
        stops: bool = False,
    ) -> None:
        """Capture before the forward pass.

        Args:
            step: the step.
            inputs: its streams.
            context: its keyword arguments.
            drift_limit: largest relative error of what a replay recomputes.
            stops: whether a replay may stop after the last tensor that it records.
        """
        self.step = step
        self.name = name_of(step)
        self.needs = tuple(t.requires_grad for t in inputs)
        self.dtypes = tuple(t.dtype for t in inputs)
        self.small = sum(map(_bytes_of, inputs)) // _SMALL
        self.strides = tuple(t.stride() if t.layout is torch.strided else () for t in inputs)
        # detached: a context computed by this chain would form a cycle through the graph
        self.context = tree_map_only(Tensor, _leaf, dict(context)) if context else {}
        self.conditions = Conditions(step.subject, inputs, self.context)
        self.limit = drift_limit
        self.inverts = False
        self.saved: list[weakref.ref[Slot] | None] = []  # None for resident tensors
        self.samples: list[Samples] = []
        self.peaks: list[Peak] = []
        self._aside: Kept | None = None
        self.notes: _Notes | None = None if self.conditions.reads_statistics else {}
        self.witness = _Witness() if stops and step.early_stop else None

    def keep_aside(self, tensors: list[Tensor]) -> None:
        """Keep the step's :func:`put_aside` tensors; inside another step, as its activations."""
        if tensors:
            self._aside = Kept(tuple(tensors))

    @property
    def aside(self) -> Sequence[Tensor]:
        """The tensors that the step has put aside."""
        return () if self._aside is None else held_in(self._aside.state(self.name))

    def observe(self, taken: Streams, returned: Streams, *, inverts: bool) -> None:
        """Sample the streams that a replay will recompute, and their range, for the guard."""
        self.inverts = inverts
        if self.witness is not None:
            self.samples = sample(self.witness.take(), taken, channels=False)
        elif not self.step.guarded:
            pass
        elif inverts:
            self.samples = sample(taken, returned)
        else:
            self.samples = sample(returned, taken)
        self.peaks = peaks_of(self.step, self.name, returned)

    def report(self, guard: Guard, computed: Streams) -> None:
        """Pass the streams of a replay to the guard."""
        if self.samples and computed:
            half = torch.float16 in self.dtypes or self.conditions.in_float16
            guard.compare(
                self.step,
                self.name,
                self.limit,
                self.samples,
                computed,
                half=half,
                inverts=self.inverts,
            )
        guard.bound(self.peaks)

    def packer(self, tape: _Tape, index: int) -> Callable[[Tensor], Slot | Resident]:
        """The pack hook for the step's forward pass."""
        resident, known = self.conditions.storages()
        saved = self.saved
        small = self.small
        witness = self.witness
        chain = weakref.ref(tape)  # weak: the graph holds this function even without slots

        def keeps(size: int) -> bool:
            alive = chain()
            assert alive is not None
            if size > _MOST_SMALL * small - alive.small_bytes:
                return False
            alive.small_bytes += size
            return True

        def pack(t: Tensor) -> Slot | Resident:
            if id(t) in known:
                saved.append(None)
                return Resident(t, t._version)
            try:
                storage = t.untyped_storage()
                stays = storage._cdata in resident
                if not stays and small:
                    size = storage.nbytes()
                    stays = 0 < size <= small and keeps(size)
            except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
                stays = address(t) in resident
            if stays:
                saved.append(None)
                return Resident.of(t)
            if witness is not None:
                witness.note(len(saved), t)
            alive = chain()
            assert alive is not None
            slot = Slot(alive, index, t.shape, t.dtype)
            saved.append(weakref.ref(slot))
            return slot

        return pack

    def last_wanted(self) -> int:
        """Index of the last slot that the graph still holds; -1 if there is none."""
        held = (k for k, ref in enumerate(self.saved) if ref is not None and ref() is not None)
        return max(held, default=-1)

    @property
    def wanted(self) -> bool:
        """Whether the graph still holds an empty slot of the step."""
        slots = (ref() for ref in self.saved if ref is not None)
        return any(slot is not None and slot.value is None for slot in slots)

    def invert(self, outputs: Streams) -> Streams:
        """The step's inputs, without recording."""
        versions = versions_of(outputs)
        with torch.no_grad(), self._repeated(inverting=True):
            if self._aside is not None:
                inputs: Streams = self.step.replay(outputs, _Unrecorded(self), self.context)  # type: ignore[operator]
            else:
                inputs = self.inverted(outputs)
        refuse_changed_outputs(self.name, outputs, versions)
        return self.laid_out(inputs)

    def inverted(self, outputs: Streams) -> Streams:
        """The result of the step's inverse, under the present conditions."""
        assert isinstance(self.step, Invertible)
        inverse = functools.partial(self.step.inverse, **self.context)
        if self.moves(outputs):
            fixed = tuple(t for t in outputs if isinstance(t, Fixed))
            inputs: Streams = words_through(inverse, fixed, self.dtypes)
        else:
            inputs = fixed_or_not(as_state(inverse(*floats(outputs)), self.step))
        check_inputs(self.step, inputs, len(self.needs))
        return inputs

    def moves(self, outputs: Streams) -> bool:
        """Whether the inverse needs only the words, no floats."""
        return self.step.moves_values and all(isinstance(t, Fixed) for t in outputs)

    def laid_out(self, inputs: Streams) -> Streams:
        """The inputs with the strides of the forward pass, see :mod:`revzoo.core.layout`.

        They are the outputs of the step before, so every state on a walk has its layout.
        """
        return tuple(map(_laid_out, inputs, self.strides))

    def record_from_inputs(self, inputs: Streams) -> tuple[Streams, Replayed]:
        """Replay the step from its inputs; returns the streams that :meth:`observe` sampled."""
        replayed = Replayed(self, stops=self.witness is not None)
        outputs: State = ()
        with self._repeated(), contextlib.suppress(_EnoughRecordedError):
            outputs = replayed(self._forward, floats(inputs), self.needs, self.context)
        replayed.check()
        return replayed.noted(fixed_or_not(outputs)), replayed

    @contextlib.contextmanager
    def _repeated(self, *, inverting: bool = False) -> Iterator[None]:
        """The conditions and notes of the forward pass."""
        with self.conditions.restored(inverting=inverting), noting(self.notes, recalls=True):
            yield

    def _forward(self, *state: Tensor, **context: Any) -> Any:
        return call_on_grid(plain_call, self.step, state, context)

    def record_from_outputs(self, outputs: Streams) -> tuple[Streams | None, Streams, Replayed]:
        """Replay the step while inverting it.

        Returns:
            Its inputs, None if they are not needed; and the streams that :meth:`observe` sampled.
        """
        step = self.step
        assert isinstance(step, Invertible)
        replayed = Replayed(self, stops=self.witness is not None)
        versions = versions_of(outputs)
        inputs: Streams | None = None
        with self._repeated(), contextlib.suppress(_EnoughRecordedError):
            if step.reads_words:
                inputs = step.replay(outputs, replayed, self.context)  # type: ignore[arg-type]
            elif self.moves(outputs):
                with torch.no_grad(), self.conditions.restored(inverting=True):
                    inputs = self.inverted(outputs)
                if self.saved:
                    laid = floats(self.laid_out(inputs))
                    replayed(step.forward, laid, self.needs, self.context, last=True)
            else:
                inputs = fixed_or_not(step.replay(floats(outputs), replayed, self.context))
        refuse_changed_outputs(self.name, outputs, versions)
        replayed.check()
        laid_out = None if inputs is None else self.laid_out(inputs)
        return laid_out, replayed.noted(laid_out or ()), replayed


class _Witness:
    """The last tensor that an early stop recomputes; the guard samples only this one."""

    __slots__ = ("_tensor", "_version", "index")

    def __init__(self) -> None:
        self.index = -1
        self._tensor: Tensor | None = None
        self._version = 0

    def note(self, index: int, t: Tensor) -> None:
        self.index, self._tensor, self._version = index, t, version_of(t)

    def take(self) -> State:
        """The tensor; nothing if it was changed in place or freed, since its values are lost."""
        t, self._tensor = self._tensor, None
        gone = t is None or version_of(t) != self._version or not _bytes_of(t)
        return () if gone or t is None else (t,)


class _EnoughRecordedError(BaseException):
    """Ends a replay; no ``except Exception`` in a branch catches it."""


def _laid_out(t: Tensor | Fixed, stride: tuple[int, ...]) -> Tensor | Fixed:
    held = t.words if isinstance(t, Fixed) else t
    if held.dim() != len(stride):
        return t  # a wrong inverse: a later check raises
    if held.stride() == stride:
        return t
    if isinstance(t, Fixed):
        return t.moved(laid_out(held, stride))
    return moved(lambda x: laid_out(x, stride), (t,))[0]


class _Unrecorded:
    """The argument of :meth:`Invertible.replay` when nothing is recorded."""

    complete = True

    def __init__(self, entry: Entry) -> None:
        self.needs = entry.needs
        self.aside = entry.aside

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> State:
        return as_state(fn(*inputs, **context))


class Replayed:
    """The tensors that a replay saves, matched one by one with the forward pass's."""

    def __init__(self, entry: Entry, *, stops: bool = False) -> None:
        self.needs = entry.needs
        self.aside: Sequence[Tensor] = entry.aside
        self._entry = entry
        self._count = 0
        self._last = entry.last_wanted()
        self._stops = stops
        self._stopped = False
        self._values: list[tuple[Slot, Resident]] = []
        self.used: list[Tensor] = []  # inputs of parts that saved something

    @property
    def complete(self) -> bool:
        """Whether all tensors of the forward pass, or all that the graph needs, were recorded."""
        return self._stopped or self._count == len(self._entry.saved)

    def noted(self, computed: Streams) -> Streams:
        """The streams that the forward pass sampled: its witness if it has one, () if freed."""
        witness = self._entry.witness
        if witness is None:
            return computed
        ref = self._entry.saved[witness.index] if witness.index >= 0 else None
        slot = None if ref is None else ref()
        return tuple(value.tensor for filled, value in self._values if filled is slot)

    def inverted(
        self, inverse: Callable[..., Any], outputs: State, context: Mapping[str, Any]
    ) -> State:
        """See :class:`revzoo.core.invertible.Recording`."""
        with torch.no_grad(), self._entry.conditions.restored(inverting=True):
            return as_state(inverse(*outputs, **context), self._entry.step)

    def laid_out(self, inputs: Streams) -> Any:
        """See :class:`revzoo.core.invertible.Recording`."""
        return self._entry.laid_out(inputs)

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> State:
        """See :class:`revzoo.core.invertible.Recording`."""
        leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
        outputs: State = ()
        before, stops = self._count, self._stops
        self._stops |= last
        try:
            with torch.enable_grad(), Recording(self._packer(), _refuse):
                outputs = as_state(fn(*leaves, **context))
        except _EnoughRecordedError:
            if stops:
                raise
        finally:
            self._stops = stops
            if self._count > before:
                self.used += leaves
        return tuple(map(_leaf, outputs))

    def _packer(self) -> Callable[[Tensor], None]:
        """The pack hook of the replay; weak, since a graph may outlive the replay."""
        replayed = weakref.ref(self)
        saved, last = self._entry.saved, self._last

        def pack(t: Tensor) -> None:
            self = replayed()
            if self is None:
                return
            k = self._count
            self._count = k + 1
            if k >= len(saved):
                return  # check() raises
            ref = saved[k]
            slot = None if ref is None else ref()
            if slot is not None:
                if t.shape != slot.shape or t.dtype != slot.dtype:
                    raise self._mismatch(
                        f"saved tensor {k} is {t.dtype} of shape {tuple(t.shape)} in the replay, "
                        f"{slot.dtype} of shape {tuple(slot.shape)} in the forward pass"
                    )
                self._values.append((slot, Resident.of(t)))
            if self._stops and 0 <= last <= k and self._entry.conditions.drawn():
                self._stopped = True
                raise _EnoughRecordedError

        return pack

    def check(self) -> None:
        """Raise if the replay saved too few or too many tensors, or changed one in place."""
        if not self.complete:
            forward = len(self._entry.saved)
            raise self._mismatch(
                f"its replay saved {self._count} tensors, its forward pass {forward}"
            )
        for _, value in self._values:
            value.check()  # the branch may have changed a tensor after saving it

    def fill(self) -> list[weakref.ref[Slot]]:
        """Put the recorded tensors into their slots."""
        values, self._values, self.used = self._values, [], []
        for slot, value in values:
            slot.value = value.tensor
        return [weakref.ref(slot) for slot, _ in values]

    def _mismatch(self, what: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._entry.name} did not repeat its forward pass: {what}. A step must be a "
            "function of its inputs, parameters, buffers and torch's random state. For one that is "
            f"not, {self._entry.step.instead}{self._entry.step.difference()}"
        )


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _refuse(_: None) -> Tensor:
    raise RuntimeError(DIFFERENTIATES_INSIDE)


DIFFERENTIATES_INSIDE = (
    "a backward pass ran inside the forward code of a step before that step was complete: "
    "use memory='store' for a step that differentiates inside its forward"
)
