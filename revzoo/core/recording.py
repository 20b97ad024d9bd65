"""Slots: what the graph holds instead of activations, and how a replay fills them.

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
    streams_of,
)
from revzoo.core.layout import dense, fills_its_memory, laid_out
from revzoo.core.replay import Conditions, address, version_of


class ReplayMismatchError(RuntimeError):
    """A step's replay saved other tensors than its forward: it is no function of its inputs."""


class _Tape(Protocol):
    def replay(self, index: int) -> None: ...


class Slot:
    """Stands in the graph for one saved activation of the tape's entry ``index``."""

    __slots__ = ("__weakref__", "dtype", "index", "shape", "tape", "value")

    def __init__(self, tape: _Tape, index: int, shape: torch.Size, dtype: torch.dtype) -> None:
        self.tape = tape
        self.index = index
        self.shape = shape
        self.dtype = dtype
        self.value: Tensor | None = None


class Resident(NamedTuple):
    """A tensor that the graph keeps as it is, such as a parameter or a buffer."""

    tensor: Tensor
    version: int

    @staticmethod
    def of(t: Tensor) -> Resident:
        """``t`` as it is now; detached, since an output that its node saves holds its grad_fn."""
        return Resident(t if t.is_leaf else t.detach(), t._version)

    def check(self) -> None:
        """Raise if the tensor was changed since; saved-tensor hooks switch autograd's check off."""
        if (now := self.tensor._version) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: tensor of shape {tuple(self.tensor.shape)} is at version "
                f"{now}; expected version {self.version} instead"
            )


def unpack(packed: Slot | Resident) -> Tensor:
    """Give the graph what it saved, replaying the step if need be."""
    if isinstance(packed, Slot):
        if packed.value is None:
            packed.tape.replay(packed.index)
        assert packed.value is not None
        return packed.value
    return unpack_resident(packed)


def unpack_resident(packed: Resident) -> Tensor:
    """Give the graph what it saved, which nobody may have changed."""
    packed.check()
    return packed.tensor


_Pack = Callable[[Tensor], Any]
_Unpack = Callable[[Any], Tensor]
_thread = threading.local()  # hooks: those of the innermost Recording


class Recording(saved_tensors_hooks):
    """``saved_tensors_hooks(pack, unpack)`` that the tapes of steps inside know of, too."""

    def __enter__(self) -> None:
        self._outer = getattr(_thread, "hooks", None)
        super().__enter__()
        _thread.hooks = self.pack_hook, self.unpack_hook

    def __exit__(self, *exception: object) -> None:
        _thread.hooks = self._outer
        super().__exit__(*exception)


class _Shape(NamedTuple):
    """Stands in the graph for a tensor of which the gradient reads the shape alone."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def keeping_shape_of(x: Tensor) -> contextlib.AbstractContextManager[None]:
    """A context in which the graph keeps no more of ``x`` than its shape.

    For single operators: the gradient gets memory in which no value was written.
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
    """Whether torch calls hooks on saved tensors here: not in transforms and captured graphs."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


@contextlib.contextmanager
def outside_recordings() -> Iterator[None]:
    """A context for a replay, which may run in a backward pass inside somebody's forward code."""
    outer, _thread.hooks = getattr(_thread, "hooks", None), None
    try:
        yield
    finally:
        _thread.hooks = outer


def keep(t: Tensor) -> Callable[[], Tensor]:
    """Save ``t`` as the graph saves tensors here; returns what a backward pass calls for it.

    What a replay of the same code keeps is what the forward pass kept.
    """
    pack, give = getattr(_thread, "hooks", None) or (Resident.of, unpack)
    return functools.partial(give, pack(t))


_NONE = torch.empty(0, device="cpu")


class Kept:
    """A state that a tape keeps: as it is, or as activations of the step around it."""

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
        """The state, unless it was changed in place since; ``name`` is the last step's."""
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


@contextlib.contextmanager
def explained(name: str) -> Iterator[None]:
    """Say what to do where torch refuses a ``torch.func`` transform because of our hooks."""
    try:
        yield
    except RuntimeError as error:
        if "support saved tensor hooks" not in str(error):
            raise
        raise RuntimeError(
            f"{name} runs a torch.func transform inside its forward, which torch refuses while "
            "activations are recomputed or offloaded: use memory='store' for this step"
        ) from error


def put_aside(t: Tensor) -> None:
    """Keep ``t`` for the replay of the step that runs, in a mode that inverts it."""
    aside = getattr(_thread, "aside", None)
    if aside is not None:
        aside.append(t)


@contextlib.contextmanager
def asides(kept: list[Tensor] | None) -> Iterator[None]:
    """Let :func:`put_aside` append to ``kept``; None for nowhere."""
    outer, _thread.aside = getattr(_thread, "aside", None), kept
    try:
        yield
    finally:
        _thread.aside = outer


def call_on_grid(
    call: Callable[..., Any], step: Step, state: State, context: Mapping[str, Any]
) -> Any:
    """``call(step, *state, **context)``; words go where a step moves the values."""
    if not moves_words(step):
        return call(step, *state, **context)
    with counting_changes():
        returned = _dense(call(step, *state, **context), step, state[0])
    # A hook may change what plain_call returns.
    if not (call is plain_call and hooked(step)):
        move_words(functools.partial(step.forward, **context), state, streams_of(returned, step))
    return returned


def _dense(returned: Any, step: Step, like: Tensor) -> Any:
    """What ``step`` returned, its streams in a layout that its inverse gives back."""
    if isinstance(returned, Tensor):
        return dense(returned, like)
    cut = len(streams_of(returned, step))
    return *(dense(t, like) for t in returned[:cut]), *returned[cut:]


def moves_words(step: Step) -> bool:
    """Whether the step runs on the words of its streams as well."""
    return step.exact and not step.sums and step.grid is not None and keeps_words()


def call_without_changing_hooks(step: Step, /, *state: Tensor, **context: Any) -> Any:
    """Call ``step``; forward hooks on it may look at its streams, but not change them.

    Raises:
        RuntimeError: one did. The inverse of the step knows nothing of it.
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
    """A step's ``forward`` while it is watched, by any number of threads."""

    users: list[int]  # threads' calls under way
    own: bool  # whether the step had a ``forward`` of its own, beside its class's
    forward: Callable[..., Any]


_watches: dict[int, _Watch] = {}
_watching = threading.Lock()


@contextlib.contextmanager
def _watched(step: Step) -> Iterator[list[list[Any]]]:
    """Note in a list what this thread's last call of ``forward`` gets and returns."""
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
    """Whether a hook may look at what the layer gets or returns, or change it."""
    own = layer._forward_hooks or layer._forward_pre_hooks
    return bool(own or module._global_forward_hooks or module._global_forward_pre_hooks)


def _identity(state: tuple[Any, ...]) -> list[Any]:
    """Which memory the streams lie in and how often it was changed: the same for an alias."""
    return [
        (address(t), t.storage_offset(), t.shape, t.stride(), version_of(t))
        if isinstance(t, Tensor)
        else t
        for t in state
    ]


def unshared(t: Tensor) -> bool:
    """Whether ``t`` fills a storage that no other tensor has, so that it may be overwritten."""
    if _use_count is None or not fills_its_memory(t):
        return False
    storage = t.untyped_storage()
    return _use_count(storage._cdata) == 2  # t's own and this handle's


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private: do without if it is gone


def versions_of(state: Streams) -> list[int]:
    """To be compared after a call that must not change ``state`` in place."""
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


_SMALL = 512  # a storage below this part of a step's input is kept rather than replayed


def _bytes_of(t: Tensor) -> int:
    """The bytes of its storage; 0 where it has none."""
    try:
        return t.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
        return 0


class Entry:
    """One executed step: what replaying it needs, but no activation and no part of the graph."""

    __slots__ = (
        "_aside",
        "conditions",
        "context",
        "dtypes",
        "limit",
        "name",
        "needs",
        "peaks",
        "samples",
        "saved",
        "small",
        "step",
        "strides",
        "witness",
    )

    def __init__(
        self, step: Step, inputs: State, context: Mapping[str, Any], drift_limit: float
    ) -> None:
        self.step = step
        self.name = name_of(step)
        self.needs = tuple(t.requires_grad for t in inputs)
        self.dtypes = tuple(t.dtype for t in inputs)
        self.small = sum(map(_bytes_of, inputs)) // _SMALL
        self.strides = tuple(t.stride() if t.layout is torch.strided else () for t in inputs)
        # Detached: a context computed from this very chain would hold the graph that holds it.
        self.context = tree_map_only(Tensor, _leaf, dict(context)) if context else {}
        self.conditions = Conditions(step.subject, inputs, self.context)
        self.limit = drift_limit
        self.saved: list[weakref.ref[Slot] | None] = []  # None for what is resident
        self.samples: list[Samples] = []
        self.peaks: list[Peak] = []
        self._aside: Kept | None = None
        self.witness = _Witness() if step.early_stop else None

    def keep_aside(self, tensors: list[Tensor]) -> None:
        """Keep what the step has put aside: inside another step, as activations of that."""
        if tensors:
            self._aside = Kept(tuple(tensors))

    @property
    def aside(self) -> Sequence[Tensor]:
        """What the step has put aside."""
        return () if self._aside is None else held_in(self._aside.state(self.name))

    def observe(self, inputs: State, outputs: State, *, inverts: bool) -> None:
        """Note what the guard will compare: values of what will be recomputed, and the range."""
        got, returned = fixed_or_not(inputs), fixed_or_not(outputs)
        if inverts:
            self.samples = sample(got, returned)
        else:
            self.samples = sample(returned if self.witness is None else self.witness.take(), got)
        self.peaks = peaks_of(self.step, self.name, returned)

    def report(self, guard: Guard, computed: Streams) -> None:
        """Hand the guard what the replay computed."""
        if self.samples:
            guard.compare(self.step, self.name, self.limit, self.samples, computed)
        guard.bound(self.peaks)

    def packer(self, tape: _Tape, index: int) -> Callable[[Tensor], Slot | Resident]:
        """The pack hook for the step's forward pass."""
        resident = self.conditions.storages()
        saved = self.saved
        small = self.small
        witness = self.witness
        chain = weakref.ref(tape)  # the graph holds this function, with or without slots

        def pack(t: Tensor) -> Slot | Resident:
            if address(t) in resident or 0 < _bytes_of(t) <= small:
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
        """Whether the graph may still ask for a slot of the step that is empty."""
        slots = (ref() for ref in self.saved if ref is not None)
        return any(slot is not None and slot.value is None for slot in slots)

    def invert(self, outputs: Streams) -> Streams:
        """The step's inputs, without recording."""
        versions = versions_of(outputs)
        with torch.no_grad(), self.conditions.restored(inverting=True):
            if self._aside is not None:
                inputs: Streams = self.step.replay(outputs, _Unrecorded(self), self.context)  # type: ignore[operator]
            else:
                inputs = self.inverted(outputs)
        refuse_changed_outputs(self.name, outputs, versions)
        return self.laid_out(inputs)

    def inverted(self, outputs: Streams) -> Streams:
        """What the step's inverse returns, under the conditions that hold."""
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
        """Whether the step runs on words alone."""
        step = self.step
        return step.exact and not step.sums and all(isinstance(t, Fixed) for t in outputs)

    def laid_out(self, inputs: Streams) -> Streams:
        """The inputs with the strides of the forward pass, see :mod:`revzoo.core.layout`.

        They are the outputs of the step before, so every state that the tape walks over has them.
        """
        return tuple(map(_laid_out, inputs, self.strides))

    def record_from_inputs(self, inputs: Streams) -> tuple[Streams, Replayed]:
        """Replay the step forwards; returns what :meth:`observe` noted values of."""
        stops = self.step.early_stop
        replayed = Replayed(self, stops=stops)
        with self.conditions.restored(whole=not stops):
            outputs = replayed(self._forward, floats(inputs), self.needs, self.context)
        replayed.check()
        if self.witness is not None:
            return replayed.value_of(self.witness), replayed
        return fixed_or_not(outputs), replayed

    def _forward(self, *state: Tensor, **context: Any) -> Any:
        return call_on_grid(plain_call, self.step, state, context)

    def record_from_outputs(self, outputs: Streams) -> tuple[Streams, Replayed]:
        """Replay the step while inverting it; returns its inputs."""
        step = self.step
        assert isinstance(step, Invertible)
        replayed = Replayed(self)
        versions = versions_of(outputs)
        with self.conditions.restored():
            if step.reads_words:
                inputs: Streams = step.replay(outputs, replayed, self.context)  # type: ignore[arg-type]
            elif self.moves(outputs):
                with torch.no_grad(), self.conditions.restored(inverting=True):
                    inputs = self.inverted(outputs)
                if self.saved:
                    laid = self.laid_out(inputs)
                    replayed(step.forward, floats(laid), self.needs, self.context)
            else:
                inputs = fixed_or_not(step.replay(floats(outputs), replayed, self.context))
        refuse_changed_outputs(self.name, outputs, versions)
        replayed.check()
        return self.laid_out(inputs), replayed


class _Witness:
    """The last tensor that an early stop recomputes: its values speak for those before it."""

    __slots__ = ("_tensor", "_version", "index")

    def __init__(self) -> None:
        self.index = -1
        self._tensor: Tensor | None = None
        self._version = 0

    def note(self, index: int, t: Tensor) -> None:
        self.index, self._tensor, self._version = index, t, version_of(t)

    def take(self) -> State:
        """The tensor, unless it was changed since: then its values are gone."""
        t, self._tensor = self._tensor, None
        return () if t is None or version_of(t) != self._version else (t,)


class _EnoughRecordedError(BaseException):
    """Ends a replay; no ``except Exception`` in a branch catches it."""


def _laid_out(t: Tensor | Fixed, stride: tuple[int, ...]) -> Tensor | Fixed:
    held = t.words if isinstance(t, Fixed) else t
    if held.dim() != len(stride):
        return t  # a wrong inverse: named later
    if held.stride() == stride:
        return t
    if isinstance(t, Fixed):
        return t.moved(laid_out(held, stride))
    return moved(lambda x: (laid_out(x, stride),), (t,))[0]


class _Unrecorded:
    """What :meth:`Invertible.replay` gets where nothing need be recorded."""

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
    ) -> State:
        return as_state(fn(*inputs, **context))


class Replayed:
    """The tensors that a replay saves, matched one by one with the forward pass's."""

    def __init__(self, entry: Entry, *, stops: bool = False) -> None:
        self.needs = entry.needs
        self.aside: Sequence[Tensor] = entry.aside
        self._entry = entry
        self._count = 0
        self._last = entry.last_wanted() if stops else -1
        self._values: list[tuple[Slot, Resident]] = []
        self.used: list[Tensor] = []  # inputs of parts that saved something

    @property
    def complete(self) -> bool:
        """Whether as many tensors were recorded as the forward pass saved, or are needed."""
        return self._count == len(self._entry.saved) or 0 <= self._last < self._count

    def value_of(self, witness: _Witness) -> State:
        """What was recorded of the tensor that the forward pass noted; () if it did not last."""
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
    ) -> State:
        """See :class:`revzoo.core.invertible.Recording`."""
        leaves = [t.detach().requires_grad_(n) for t, n in zip(inputs, needs, strict=True)]
        outputs: State = ()
        before = self._count
        with (
            contextlib.suppress(_EnoughRecordedError),
            torch.enable_grad(),
            Recording(functools.partial(_pack_in, weakref.ref(self)), _refuse),
        ):
            outputs = as_state(fn(*leaves, **context))
        if self._count > before:
            self.used += leaves
        return tuple(map(_leaf, outputs))

    def _pack(self, t: Tensor) -> None:
        k = self._count
        self._count += 1
        if k >= len(self._entry.saved):
            return  # check() tells how many there were
        ref = self._entry.saved[k]
        slot = None if ref is None else ref()
        if slot is None:
            return
        if t.shape != slot.shape or t.dtype != slot.dtype:
            raise self._mismatch(
                f"saved tensor {k} is {t.dtype} of shape {tuple(t.shape)} in the replay, "
                f"{slot.dtype} of shape {tuple(slot.shape)} in the forward pass"
            )
        self._values.append((slot, Resident.of(t)))
        if k == self._last:
            raise _EnoughRecordedError

    def check(self) -> None:
        """Raise unless the replay saved as many tensors as the forward pass, and left them be."""
        if not self.complete:
            forward = len(self._entry.saved)
            raise self._mismatch(
                f"its replay saved {self._count} tensors, its forward pass {forward}"
            )

        for _, value in self._values:
            value.check()  # the branch itself may have changed what it had saved

    def fill(self) -> list[weakref.ref[Slot]]:
        """Put the recorded tensors into their slots."""
        values, self._values, self.used = self._values, [], []
        for slot, value in values:
            slot.value = value.tensor
        return [weakref.ref(slot) for slot, _ in values]

    def _mismatch(self, what: str) -> ReplayMismatchError:
        return ReplayMismatchError(
            f"{self._entry.name} did not repeat its forward pass: {what}. A step must be a "
            "function of its inputs, parameters, buffers and torch's random state; use "
            f"memory='store' for one that is not{self._entry.step.difference()}"
        )


def _pack_in(replayed: weakref.ref[Replayed], t: Tensor) -> None:
    """The pack hook of a replay, held by whatever graph the replay leaves somewhere."""
    if (found := replayed()) is not None:
        found._pack(t)


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.requires_grad)


def _refuse(_: None) -> Tensor:
    raise RuntimeError(DIFFERENTIATES_INSIDE)


DIFFERENTIATES_INSIDE = (
    "a backward pass ran inside the forward code of a step before that step was complete: "
    "use memory='store' for a step that differentiates inside its forward"
)
