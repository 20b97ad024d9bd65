"""One executed step: what its replay needs, and the replay that fills its slots.

See NOTE [ Slots and the tape ] in :mod:`revzoo.core.replay.tape`.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from revzoo.core.calls import call_on_grid, refuse_changed_outputs, versions_of
from revzoo.core.fixedpoint.words import (
    Fixed,
    Streams,
    apply_to_words,
    apply_with_words,
    as_fixed,
    as_floats,
    backing_tensors,
)
from revzoo.core.guard.drift import Guard, Replayed
from revzoo.core.guard.samples import CHOICES, Sampled, Samples, sample
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    check_stream_count,
    name_of,
    plain_call,
)
from revzoo.core.replay.slots import (
    Memos,
    SavedState,
    Slot,
    SlotTape,
    TensorHooks,
    Versioned,
    in_replay,
)
from revzoo.core.restore.conditions import Conditions
from revzoo.core.restore.global_state import autocast_dtypes
from revzoo.core.tensors import (
    bytes_of,
    detached,
    overrides_functions,
    storage_id,
    version_of,
    with_strides,
)


class ReplayMismatchError(RuntimeError):
    """A replay saved different tensors from the forward pass: the step is not deterministic."""


# A saved storage of at most 1/512 of the bytes of the step's input stays in the graph, without a
# slot. A whole chain may keep at most 16 times as many bytes this way, so that its memory does not
# grow with its depth.
_SMALL_SHARE, _SMALL_PER_CHAIN = 512, 16


class TapeEntry:
    """One executed step with the data for its replay, but no activation and no graph."""

    __slots__ = (
        "_for_replay",
        "approximate",
        "conditions",
        "context",
        "dtypes",
        "inverts",
        "limit",
        "may_stop",
        "memos",
        "name",
        "needs",
        "samples",
        "saved",
        "small",
        "step",
        "stops",
        "strides",
        "witness",
    )

    def __init__(
        self,
        step: Step,
        inputs: State,
        context: Mapping[str, Any],
        drift_limit: float | None,
        *,
        inverts: bool,
        approximate: bool,
        stops: bool,
    ) -> None:
        """Capture before the forward pass.

        Args:
            step: the step.
            inputs: its streams.
            context: its keyword arguments.
            drift_limit: largest relative error of recomputed values; None: not compared.
            inverts: whether the tape recovers the inputs from the outputs.
            approximate: whether a replay starts from values with rounding errors.
            stops: whether a replay may stop after the last tensor that it records.
        """
        self.step = step
        self.name = name_of(step)
        # which tensors autograd saves depends on which inputs require gradient, so the replay
        # repeats the pattern
        self.needs = tuple(t.requires_grad for t in inputs)
        self.dtypes = tuple(t.dtype for t in inputs)
        self.small = sum(map(bytes_of, inputs)) // _SMALL_SHARE
        self.strides = tuple(t.stride() if t.layout is torch.strided else () for t in inputs)
        # detached: a context computed by this chain would form a cycle through the graph
        self.context = tree_map_only(Tensor, _leaf, dict(context)) if context else {}
        self.conditions = Conditions(step.subject, inputs, self.context)
        self.limit = drift_limit
        self.inverts = inverts
        self.approximate = approximate
        # weak (rule 1): the graph decides how long slots live; None for resident tensors
        self.saved: list[weakref.ref[Slot] | None] = []
        self.samples: list[Samples] = []
        self._for_replay: SavedState | None = None
        # if code may read running statistics, the batch norm must update them in the replay, too
        self.memos: Memos | None = None if self.conditions.restores_buffers else {}
        self.may_stop = step.early_stop and self.conditions.may_stop
        self.stops = stops and self.may_stop
        self.witness: _Witness | None = None
        if drift_limit is not None and not (approximate or self.conditions.repeatable):
            self.witness = _Witness(self.strides, last=None)
        elif drift_limit is not None and self.stops:
            self.witness = _Witness(self.strides)

    def keep_saved(self, tensors: list[Tensor]) -> None:
        """Keep what :func:`save_for_replay` saved; inside another step, as its activations."""
        if tensors:
            self._for_replay = SavedState(tuple(tensors))

    @property
    def for_replay(self) -> Sequence[Tensor]:
        """The tensors that the step saved for its replay."""
        saved = self._for_replay
        return () if saved is None else backing_tensors(saved.state(self.name))

    def observe(self, taken: Streams, returned: Streams) -> None:
        """Sample the streams that a replay will recompute, for the guard."""
        if self.limit is None:
            return
        if self.witness is not None:
            # rule 10; recomputed from exact inputs, so no channel can be lost in rounding
            self.samples = sample(self.witness.take(), taken, channels=False)
        elif self.step.guarded:
            computed, known = (taken, returned) if self.inverts else (returned, taken)
            # a channel is lost where the next replay amplifies it, so in chains only
            self.samples = sample(computed, known, channels=self.inverts)

    def report(self, guard: Guard, computed: Sampled) -> None:
        """Pass the streams of a replay to the guard."""
        if self.samples and computed:
            assert self.limit is not None
            half = torch.float16 in (*self.dtypes, *self.conditions.autocast_dtypes)
            inverts = self.inverts or self.approximate
            replayed = Replayed(self.step, self.name, self.limit, half, inverts)
            guard.compare(replayed, self.samples, computed)

    def packer(self, tape: SlotTape, index: int) -> Callable[[Tensor], Slot | Versioned]:
        """The pack hook for the step's forward pass."""
        # tensors that stay in memory anyway need no slot: parameters, buffers, and views of them
        resident, known = self.conditions.storages()
        saved = self.saved
        small = self.small
        witness = self.witness
        tape_ref = weakref.ref(tape)  # weak: the graph holds this function even without slots

        def reserve(size: int) -> bool:
            alive = tape_ref()
            assert alive is not None
            if size > _SMALL_PER_CHAIN * small - alive.small_bytes:
                return False
            alive.small_bytes += size
            return True

        def pack(t: Tensor) -> Slot | Versioned:
            # most calls: a parameter itself, found without asking for its storage
            if id(t) in known:
                saved.append(None)
                return Versioned(t, t._version)
            try:
                storage = t.untyped_storage()
                stays = storage._cdata in resident
                if not stays and small:
                    size = storage.nbytes()
                    stays = 0 < size <= small and reserve(size)
            except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
                stays = storage_id(t) in resident
            if stays:
                saved.append(None)
                return Versioned.of(t)
            # the last tensors that live only in the graph are the last that the replay will record
            if witness is not None:
                witness.note(len(saved), t)
            alive = tape_ref()
            assert alive is not None
            slot = Slot(alive, index, t.shape, t.dtype)
            saved.append(weakref.ref(slot))
            return slot

        return pack

    def last_wanted(self) -> int:
        """Index of the last slot that the graph still holds; -1 if there is none."""
        # parts of a graph may be freed, or never run backward: their slots are gone
        held = (k for k, ref in enumerate(self.saved) if ref is not None and ref() is not None)
        return max(held, default=-1)

    @property
    def wanted(self) -> bool:
        """Whether the graph still holds an empty slot of the step."""
        slots = (ref() for ref in self.saved if ref is not None)
        return any(slot is not None and slot.value is None for slot in slots)

    def invert(self, outputs: Streams) -> Streams:
        """The step's inputs, without recording."""
        versions, step = versions_of(outputs), self.step
        assert isinstance(step, Invertible)
        restored = self.conditions.restored(inverting=not step.reads_words)
        with torch.no_grad(), restored, in_replay(self.memos):
            # by its replay if it has integers, which must come out to the bit
            if step.reads_words:
                inputs: Streams = step.replay(outputs, _NoRecorder(self), self.context)  # type: ignore[arg-type]
            else:
                inputs = self._run_inverse(outputs)
        refuse_changed_outputs(self.name, outputs, versions)
        return self.with_strides(inputs)

    def _run_inverse(self, outputs: Streams) -> Streams:
        """The result of the step's inverse, under the current conditions."""
        assert isinstance(self.step, Invertible)
        inverse = functools.partial(self.step.inverse, **self.context)
        if self.inverts_words(outputs):
            fixed = tuple(t for t in outputs if isinstance(t, Fixed))
            inputs: Streams = apply_to_words(inverse, fixed, self.dtypes)
        else:
            inputs = as_fixed(as_state(inverse(*as_floats(outputs)), self.step, inverse=True))
        check_stream_count(self.step, inputs, len(self.needs))
        return inputs

    def inverts_words(self, outputs: Streams) -> bool:
        """Whether the inverse needs only the words, no floats."""
        return self.step.moves_values and all(isinstance(t, Fixed) for t in outputs)

    def with_strides(self, inputs: Streams) -> Streams:
        """The inputs with the strides of the forward pass, see :mod:`revzoo.core.tensors`.

        They are the outputs of the step before, so every state on a walk has the right layout.
        """
        return tuple(map(_with_strides, inputs, self.strides))

    def record_from_inputs(self, inputs: Streams) -> tuple[Sampled, SlotRecorder]:
        """Replay the step from its inputs.

        Returns:
            The streams that :meth:`observe` sampled; and the recorder.
        """
        # an early stop leaves no outputs: then the guard compares the witness (rule 10)
        replayed = SlotRecorder(self, stops=self.stops)
        outputs: State = ()
        with self.conditions.restored(), in_replay(self.memos), _early_stop:
            outputs = replayed(self._forward, as_floats(inputs), self.needs, self.context)
        replayed.check()
        return replayed.sampled(as_fixed(outputs)), replayed

    def _forward(self, *state: Tensor, **context: Any) -> Any:
        return call_on_grid(plain_call, self.step, state, context)

    def record_from_outputs(self, outputs: Streams) -> tuple[Streams | None, Sampled, SlotRecorder]:
        """Replay the step while inverting it.

        Returns:
            Its inputs, None if they are not needed; the streams that :meth:`observe` sampled; and
            the recorder.
        """
        step = self.step
        assert isinstance(step, Invertible)
        replayed = SlotRecorder(self, stops=self.stops)
        versions = versions_of(outputs)
        inputs: Streams | None = None
        with self.conditions.restored(), in_replay(self.memos), _early_stop:
            if step.reads_words:
                inputs = step.replay(outputs, replayed, self.context)  # type: ignore[arg-type]
            # a step that moves values is inverted on words alone; we make floats only if it saved
            # any
            elif self.inverts_words(outputs):
                with torch.no_grad(), self.conditions.restored(inverting=True):
                    inputs = self._run_inverse(outputs)
                if self.saved:
                    laid = as_floats(self.with_strides(inputs))
                    replayed(step.forward, laid, self.needs, self.context, last=True)
            else:
                inputs = as_fixed(step.replay(as_floats(outputs), replayed, self.context))
        # before check(): a changed stream explains a mismatch, not vice versa
        refuse_changed_outputs(self.name, outputs, versions)
        replayed.check()
        recovered = None if inputs is None else self.with_strides(inputs)
        return recovered, replayed.sampled(recovered or ()), replayed


class _Witness:
    """The last tensors that an early stop recomputes, for the guard: three values, three choices.

    Three, since the last two may show no error: a branch that ends in a layer and dropout saves the
    layer's input, then autocast's copy of the weight, then the dropout mask. Choices are masks and
    indices: a branch that draws them outside of torch may repeat its values, but not its choices.

    Args:
        strides: of the streams.
        last: how many of each; None for all, if something in the step cannot be repeated.
    """

    __slots__ = ("_choices", "_least_dims", "_noted", "indices")

    def __init__(self, strides: Sequence[tuple[int, ...]], *, last: int | None = 3) -> None:
        self.indices: list[int] = []  # among the saved tensors
        # vectors only if the streams are vectors: a compiled BatchNorm saves its running
        # statistics, which change
        self._least_dims = min(2, max(map(len, strides), default=0))
        self._noted: deque[tuple[int, Tensor, int]] = deque(maxlen=last)
        self._choices: deque[tuple[int, Tensor, int]] = deque(maxlen=last)

    def note(self, index: int, t: Tensor) -> None:
        if t.is_floating_point() or t.is_complex():
            if t.dim() >= self._least_dims:
                self._noted.append((index, t, version_of(t)))
        # indices are vectors; seeds are scalars, which kernels may leave uninitialised
        elif t.dim() and t.dtype in CHOICES:
            self._choices.append((index, t, version_of(t)))

    def take(self) -> State:
        """The tensors, except any changed in place or freed since: their values are lost."""
        kept = [
            (index, t)
            for index, t, version in (*self._noted, *self._choices)
            if version_of(t) == version and bytes_of(t)
        ]
        self._noted.clear()
        self._choices.clear()
        self.indices = [index for index, _ in kept]
        return tuple(t for _, t in kept)


class _AllRecordedError(BaseException):
    """Ends a replay early.

    A BaseException, so that no ``except Exception`` in a branch catches it.
    """


_early_stop = contextlib.suppress(_AllRecordedError)


def _with_strides(t: Tensor | Fixed, stride: tuple[int, ...]) -> Tensor | Fixed:
    held = t.words if isinstance(t, Fixed) else t
    if held.dim() != len(stride):
        return t  # a wrong inverse: a later check raises
    if held.stride() == stride:
        return t
    if isinstance(t, Fixed):
        return t.with_words(with_strides(held, stride))
    return apply_with_words(lambda x: with_strides(x, stride), (t,))[0]


class _NoRecorder:
    """The argument of :meth:`Invertible.replay` when nothing is recorded.

    It runs parts with gradients on, as the forward pass did, and keeps nothing. Without gradients
    torch computes some layers by other kernels, whose last bits differ (``nn.LSTM``, and
    ``nn.TransformerEncoderLayer`` in evaluation).
    """

    complete = True

    def __init__(self, entry: TapeEntry) -> None:
        self.needs = entry.needs
        self.for_replay = entry.for_replay
        self.with_strides = entry.with_strides

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> State:
        return tuple(map(_leaf, _recorded(fn, _leaves(inputs, needs), context, _drop)))


class SlotRecorder:
    """The tensors that a replay saves, matched one by one with the forward pass's."""

    def __init__(self, entry: TapeEntry, *, stops: bool = False) -> None:
        self.needs = entry.needs
        self.for_replay: Sequence[Tensor] = entry.for_replay
        self.with_strides: Any = entry.with_strides
        self._entry = entry
        self._count = 0
        self._last = entry.last_wanted()
        self._stops = stops
        self._stopped = False
        self._values: list[tuple[Slot, Versioned]] = []
        self.used: list[Tensor] = []  # inputs of parts that saved something

    @property
    def complete(self) -> bool:
        """Whether all tensors of the forward pass, or all that the graph needs, were recorded."""
        return self._stopped or self._count == len(self._entry.saved)

    def sampled(self, computed: Streams) -> Sampled:
        """The tensors to compare: the witness's tensors if there is one, else ``computed``."""
        witness = self._entry.witness
        if witness is None:
            return computed
        recorded: dict[Slot | None, Tensor] = {slot: value.tensor for slot, value in self._values}
        refs = [self._entry.saved[i] for i in witness.indices]
        return tuple(recorded.get(None if ref is None else ref()) for ref in refs)

    def inverted(
        self, inverse: Callable[..., Any], outputs: State, context: Mapping[str, Any]
    ) -> State:
        """See :class:`revzoo.core.invertible.Recorder`."""
        with torch.no_grad(), self._entry.conditions.restored(inverting=True):
            return as_state(inverse(*outputs, **context), self._entry.step, inverse=True)

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
        *,
        last: bool = False,
    ) -> State:
        """See :class:`revzoo.core.invertible.Recorder`."""
        leaves = _leaves(inputs, needs)
        outputs: State = ()
        # a part before the last may stop only if nobody needs its outputs, so restore the flag
        before, stops = self._count, self._stops
        self._stops |= last and self._entry.may_stop
        try:
            outputs = _recorded(fn, leaves, context, self._packer())
        except _AllRecordedError:
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
            # matched by position: the k-th tensor saved in the replay is the k-th of the forward
            # pass
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
                self._values.append((slot, Versioned.of(t)))
            # rule 4 of NOTE [ Threads ] compares the random state at the end of a replay, so draw
            # also what the forward pass drew after this tensor
            if self._stops and 0 <= last <= k and self._entry.conditions.drawn():
                self._stopped = True
                raise _AllRecordedError

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
            f"not, {self._entry.step.remedy}{self._entry.step.difference()}"
        )


def _leaf(t: Tensor, needs_gradient: bool | None = None) -> Tensor:
    """A detached leaf, where a recorded graph ends; ``needs_gradient`` None: as ``t``."""
    leaf = detached(t)
    if leaf is t:
        return t
    # Autocast caches its casts of leaves until the outermost autocast ends, which may surround the
    # whole backward pass. It does not cache casts of views, so the leaf becomes a view. Subclasses
    # with their own operators stay: they may not support alias().
    if autocast_dtypes(t.device) and t.layout is torch.strided and not overrides_functions(t):
        with torch.no_grad():
            leaf = torch.ops.aten.alias(leaf)  # view_as() would change strides of dimensions of 1
    return leaf.requires_grad_(t.requires_grad if needs_gradient is None else needs_gradient)


def _leaves(inputs: State, needs: tuple[bool, ...]) -> list[Tensor]:
    return [_leaf(t, n) for t, n in zip(inputs, needs, strict=True)]


def _recorded(
    fn: Callable[..., Any],
    leaves: Sequence[Tensor],
    context: Mapping[str, Any],
    pack: Callable[[Tensor], None],
) -> State:
    """``fn(*leaves, **context)`` as autograd runs it; ``pack`` gets the tensors that it saves."""
    with torch.enable_grad(), TensorHooks(pack, _refuse):
        return as_state(fn(*leaves, **context))


def _drop(_: Tensor) -> None:
    pass


def _refuse(_: None) -> Tensor:
    raise RuntimeError(DIFFERENTIATES_INSIDE)


DIFFERENTIATES_INSIDE = (
    "a backward pass ran inside the forward code of a step before that step was complete: "
    "use memory='store' for a step that differentiates inside its forward"
)
