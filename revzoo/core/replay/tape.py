"""The invertible checkpoint: activations leave memory in the forward pass and return, step by
step, in the backward pass.

``torch.utils.checkpoint`` keeps the input of every segment. A chain of invertible steps needs only
its last output. This module runs each step as ordinary autograd code under saved-tensor hooks and
holds the package's only backward rule, :meth:`Tape.replay`. There is no custom
``autograd.Function``: gradients reach parameters through their own accumulate nodes, so hooks,
DDP, ``autograd.grad`` and frozen parameters work as usual.

Source: Gomez et al., "The Reversible Residual Network", 2017, arXiv 1707.04585, algorithm 1. The
hooks work as in ``torch.utils.checkpoint(use_reentrant=False)``.

NOTE [ Slots and the tape ]
    forward     step 0     step 1     step 2            The graph saves *slots* instead of
              x ------> s ------> s ------> y           activations, so the activations
                 slots      slots      slots            are freed at once.
    backward                          <---- y           When the graph reads a slot of step 2,
                            <---- s                     we replay step 2. That also gives its
                                                        input s, from which we replay step 1.

    1. A slot replaces one saved activation in the graph. Some tensors that are small beside the
       step's input, such as frozen scales, have no slot. Slots hold the tape. The tape refers to
       slots weakly, and its entries hold only the data for a replay. So there is no
       reference cycle: reference counting frees graph and tape.
    2. The tape holds one *known state*, normally the last output. It is a detached alias, which
       shares the version counter, so later in-place changes are detected. ``_position`` is the
       index of the entry that follows this state.
    3. When the graph reads an empty slot, the tape walks back from the nearest known state to the
       slot's step. It inverts the entries on the way, replays the step itself with recording on,
       and fills the step's slots.
    4. If the graph will not be used again and every later slot is filled or freed, we cut the
       tape: the step's input becomes the known state, and everything after it is freed before we
       record the next step. Filled slots keep their value until the graph drops them.
    5. Otherwise (retain_graph, create_graph, a partial graph) the known state stays, and the walk
       continues from a *cursor*. When the cursor moves on, the slots are emptied. A kept graph does
       not drop its slots, so each is emptied when it is read. To reach a step that the cursor has
       passed, the walk starts again from the known state: slower, but correct. So any order of
       unpacking is correct. At the end of the walk the cursor is dropped.
    6. Filling is atomic: an exception inside a replay leaves tape, slots and modules unchanged.
    7. A step in ``recompute`` mode is a tape of one entry. Its known state is the step's input, not
       its output.
    8. The caller may hold an intermediate state, such as the output of a backbone with several
       heads. Such states are *landmarks*: a walk starts from the nearest one. So the caller may
       update the steps after a landmark (a head) and then run backward through the steps before
       it. The tape refers to landmarks weakly.
    9. A step inside another step (a sequence in a branch) has its own tape. The inner tape keeps
       its known state as an activation of the outer step, that is, in a slot. The outer replay
       fills that slot. So memory does not grow with the number of outer steps.
   10. The first entry of a chain needs no recomputed input, since no step comes before it. Its
       replay stops once the last slot is filled. The guard then has no stream to compare, so it
       compares the *witness*: the last three saved values, and the last three masks or indices.
       Exception: a guarded replay that starts from approximate values runs to the end, and the
       guard compares the stream, since the last saved tensors may be pure rounding error (the mean
       that a second norm saves). If a step uses something that a replay cannot rewind, such as an
       iterator, the guard compares all tensors that the step saves, with the same exception.

NOTE [ Chains joined by hand ]
    Invertible modules called one after the other form one chain, also without a container. A new
    step continues a tape if its input is exactly the tape's known state: the same tensors, not
    changed since. We look up the tape by the ``id`` of the last tensor; weak references show
    whether this id still belongs to the same tensor.
"""

from __future__ import annotations

import itertools
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from revzoo.core.calls import call_on_grid, call_without_changing_hooks, explain_transforms
from revzoo.core.fixedpoint.words import (
    Fixed,
    Streams,
    amaxes_of,
    as_fixed,
    backing_tensors,
    fixed_of,
)
from revzoo.core.guard.drift import COMPARED, Guard, note_amaxes
from revzoo.core.invertible import State, Step, name_of, plain_call, streams_of
from revzoo.core.replay.entry import DIFFERENTIATES_INSIDE, TapeEntry
from revzoo.core.replay.slots import (
    SavedState,
    Slot,
    TensorHooks,
    graph_is_kept,
    in_forward,
    replays_are_approximate,
    unpack,
    without_outer_hooks,
)
from revzoo.core.restore.conditions import is_replaying, parameters_of
from revzoo.core.restore.global_state import capturing_cuda_graph, runs_eagerly
from revzoo.core.tensors import detached, tensors_of, version_of

_LAZY_WARNING = (
    "lazy layers have no weights yet: until they do, steps that hold them keep their activations, "
    "as with memory='store'. If memory is short, call the model on a batch under torch.no_grad() "
    "first, and remove layers that no pass calls"
)


def record(
    step: Step,
    state: State,
    context: Mapping[str, Any],
    *,
    inverts: bool,
    drift_limit: float | None,
) -> Any:
    """Call ``step`` under hooks that save slots instead of its activations.

    Args:
        step: the step.
        state: its input.
        context: its keyword arguments.
        inverts: whether the tape recovers the input from the output; if not, it keeps the input.
        drift_limit: largest relative error that the guard accepts in a replay; None: no guard.
    """
    if drift_limit is not None and capturing_cuda_graph():
        raise RuntimeError(
            f"{name_of(step)} runs while a CUDA graph is captured, but the guard reads its figures "
            "on the host after each backward pass: switch it off with "
            "revzoo.set_drift_limit(model, None), or use memory='store'"
        )
    # rule 7; otherwise the step joins the chain that ends with its input
    if not inverts:
        tape = Tape(state)
    else:
        tape = Tape.ending_with(state) if _joins(step, state) else Tape()
    # even with a grid, a step is inverted in floating point if its streams cannot have words
    approximate = replays_are_approximate() or (
        inverts and (step.grid is None or all(fixed_of(t) is None for t in state))
    )
    entry = TapeEntry(
        step,
        state,
        context,
        drift_limit,
        inverts=inverts,
        approximate=approximate,
        stops=not tape.entries and not (approximate and drift_limit),  # rule 10
    )
    if entry.conditions.has_lazy_layers:
        warnings.warn(_LAZY_WARNING, UserWarning, stacklevel=2)
        return call_on_grid(plain_call, step, state, context)
    tape.close()  # steps inside this one must not join this chain
    # the index that append() below gives the entry
    packed = TensorHooks(entry.packer(tape, len(tape.entries)), unpack)
    for_replay: list[Tensor] = []
    # a recomputed step repeats a hook's change; an inverse would not undo it
    call = call_without_changing_hooks if inverts else plain_call
    try:
        with (
            entry.conditions,
            packed,
            explain_transforms(step),
            in_forward(for_replay if inverts else None, entry.memos, approximate=approximate),
        ):
            returned = call_on_grid(call, step, state, context)
    except BaseException:
        if entry.witness is not None:
            entry.witness.take()  # empty it: its tensors' graph holds the hook that holds it
        raise
    # after the call, outside its hooks: the outer step saves these, if there is one (rule 9)
    entry.keep_saved(for_replay)
    outputs = streams_of(returned, step)
    streams = as_fixed(outputs)
    entry.observe(as_fixed(state), streams)
    tape.append(entry, outputs if inverts else None, streams)
    return returned


def _joins(step: Step, state: State) -> bool:
    """Whether the inverse of ``step`` recovers its input well enough to replay the steps before."""
    # a floating-point step would recover the words of fixed-point streams only approximately
    return step.grid is not None or not any(fixed_of(t) is not None for t in state)


def differentiates(step: Step, state: State, context: Mapping[str, Any]) -> bool:
    """Whether autograd records the call and hooks of saved tensors can run.

    Hooks cannot run in transforms, captured graphs and forward-mode AD.
    """
    # torch.func refuses saved-tensor hooks; a captured graph has no Python objects such as slots,
    # and its compiler decides what to keep
    if not torch.is_grad_enabled() or not runs_eagerly():
        return False
    if forward_ad._current_level >= 0 and not is_replaying():  # a replay needs no tangents
        return False
    if any(t.requires_grad for t in state):
        return True
    # most states require gradient, so the parameters are rarely searched
    tensors = itertools.chain(tensors_of(context), parameters_of(step.subject))
    return any(t.requires_grad for t in tensors)


def _in_profiles(entry: TapeEntry) -> AbstractContextManager[Any]:
    """A named range in the profile; costs nothing while no profiler runs."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"revzoo.replay {entry.name}")


def _marks_of(state: Streams) -> list[tuple[int, bool]]:
    # requires_grad, too: detach_() takes a tensor out of the graph without a new version
    return [(version_of(t), t.requires_grad) for t in backing_tensors(state)]


def _detached(state: Streams) -> Streams:
    return tuple([t if isinstance(t, Fixed) else detached(t) for t in state])


class _Landmark(NamedTuple):
    """An intermediate state that the caller may hold (rule 8)."""

    position: int
    refs: list[weakref.ref[Tensor]]
    marks: list[tuple[int, bool]]

    def alive(self) -> bool:
        return all(ref() is not None for ref in self.refs)

    def state(self) -> Streams | None:
        """The detached state; None if it was freed or changed in place."""
        state = tuple(t for ref in self.refs if (t := ref()) is not None)
        intact = len(state) == len(self.refs) and _marks_of(state) == self.marks
        return _detached(as_fixed(state)) if intact else None


class Tape:
    """A chain of executed steps and one known state (NOTE [ Slots and the tape ])."""

    def __init__(self, state: State | None = None) -> None:
        self.entries: list[TapeEntry] = []
        self.small_bytes = 0  # of the small tensors that the graph keeps itself, see rule 1
        self._position = 0
        self._returned: list[weakref.ref[Tensor]] = []  # the known state as the step returned it
        self._landmarks: list[_Landmark] = []
        self._known: SavedState | None = None
        self._marks: list[tuple[int, bool]] = []
        if state is not None:
            self._set_known(state)
        # rule 5
        self._cursor: tuple[int, Streams] | None = None
        self._filled: list[weakref.ref[Slot]] = []
        self._guard = Guard()
        self._stride = 1  # every _stride-th entry keeps samples

    @staticmethod
    def ending_with(state: State) -> Tape:
        """The tape that ends with ``state``, or a new one (NOTE [ Chains joined by hand ])."""
        # ids are reused: _knows() compares the objects
        tape = _open_tapes.get(id(state[-1]))
        return tape if tape is not None and tape._knows(state) else Tape()

    def append(self, entry: TapeEntry, outputs: State | None, streams: Streams = ()) -> None:
        """Add an executed step.

        Its ``outputs`` become the known state, unless None (rule 7); ``streams`` are the same with
        their words.
        """
        self.entries.append(entry)
        if outputs is None:
            return
        self._thin_samples()
        # marks of the returned tensors: the caller can change those, but not the words
        self._known, self._marks = SavedState(_detached(streams)), _marks_of(outputs)
        self._position = len(self.entries)
        if self._landmarks and not self._landmarks[-1].alive():
            self._landmarks.pop()  # the usual case: in a sequence nobody holds intermediate states
        self._returned = [weakref.ref(t) for t in outputs]
        self._landmarks.append(_Landmark(self._position, self._returned, self._marks))
        # keys of freed tensors stay until the tape is freed; ending_with() compares the tensors
        _open_tapes[id(outputs[-1])] = self

    def _thin_samples(self) -> None:
        """Bound the guard's memory: in a long chain, sample every second, fourth, ... step."""
        if len(self.entries) > COMPARED * self._stride:
            self._stride *= 2
            # every second entry that still has samples loses them
            for entry in self.entries[:: self._stride // 2][1::2]:
                entry.samples = []
        if (len(self.entries) - 1) % self._stride:
            self.entries[-1].samples = []

    def close(self) -> None:
        """Prevent other steps from joining until the next one is appended."""
        self._returned = []

    def _set_known(self, state: Streams) -> None:
        self._known, self._marks = SavedState(_detached(as_fixed(state))), _marks_of(state)

    def _knows(self, state: State) -> bool:
        return (
            len(state) == len(self._returned)
            and all(ref() is t for t, ref in zip(state, self._returned, strict=True))
            and _marks_of(state) == self._marks
        )

    def replay(self, index: int) -> None:
        """Fill the slots of entry ``index``: the package's backward rule."""
        # entries are appended after their forward pass, and cut after their backward pass
        if index >= len(self.entries):
            raise RuntimeError(DIFFERENTIATES_INSIDE)
        with _in_profiles(self.entries[index]), without_outer_hooks():
            self._replay(index)

    def _replay(self, index: int) -> None:
        position, state = self._nearest(index)
        # without a guard, nothing is read from the device
        if any(entry.limit is not None for entry in self.entries[index : max(position, index + 1)]):
            # a kept input (rule 7) has no error, unless the replay of an outer step computed it
            has_error = self._position or self.entries[index].approximate
            self._guard.begin(state if has_error else ())
            note_amaxes(amaxes_of(state))
        if position > index + 1:
            # steps whose slots nobody reads (a partial graph) are only inverted
            for i in range(position - 1, index, -1):
                state = self.entries[i].invert(state)
                self.entries[i].report(self._guard, state)
            # before recording, when memory peaks: free later states first (rule 4)
            self._move_to(index + 1, state, state)
        entry = self.entries[index]
        if position > index:
            inputs, computed, replayed = entry.record_from_outputs(state)
            entry.report(self._guard, computed)
            self._guard.note_uses(replayed.used, inputs or ())
        else:
            inputs = state
            computed, replayed = entry.record_from_inputs(state)
            if self._position == 0:  # rule 7
                entry.report(self._guard, computed)
        # rule 5: a kept graph still holds the slots of the step before, so empty them by hand
        for ref in self._filled:
            if (slot := ref()) is not None:
                slot.value = None
        self._filled = replayed.fill()
        self._move_to(index, inputs, state)

    def _nearest(self, index: int) -> tuple[int, Streams]:
        """Where a walk to entry ``index`` starts: the nearest known state, at best its input."""
        if self._cursor is not None and self._cursor[0] >= index:
            return self._cursor
        for landmark in self._landmarks:  # rule 8; the first one after the entry is the nearest
            if landmark.position >= index and (state := landmark.state()) is not None:
                return landmark.position, state
        assert self._known is not None
        return self._position, self._known.state(self.entries[-1].name)

    def _move_to(self, index: int, state: Streams | None, after: Streams) -> None:
        """Continue from ``state``, the input of entry ``index``: cut (rule 4) or keep (rule 5).

        ``state`` is None if a replay did not compute it (rule 10); ``after`` is the entry's output.
        """
        # from the end, where wanted entries are found soonest
        if not (graph_is_kept() or any(entry.wanted for entry in reversed(self.entries[index:]))):
            self._cut(index, state)
        elif any(entry.wanted for entry in reversed(self.entries[:index])):
            self._cursor = (index + 1, after) if state is None else (index, state)
        else:  # the end of the walk: the tapes of inner steps outlive it by the outer walk
            self._cursor = None

    def _cut(self, index: int, state: Streams | None) -> None:
        """Forget the entries from ``index`` on; the chain then ends with ``state``."""
        del self.entries[index:]
        self.close()
        self._landmarks = [m for m in self._landmarks if m.position < index]
        self._known = None
        if state is not None:
            self._set_known(state)
        self._position, self._cursor, self._filled = index, None, []


_open_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()
