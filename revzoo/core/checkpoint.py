"""The invertible checkpoint: activations leave memory in the forward pass and return, step by
step, in the backward pass.

``torch.utils.checkpoint`` keeps the input of every segment; a chain of invertible steps need keep
only its last output. This module runs each step as ordinary autograd code under saved-tensor
hooks and holds the package's only backward rule, :meth:`Tape.replay`. There is no custom
``autograd.Function``: gradients reach parameters through their own accumulate nodes, so hooks,
DDP, ``autograd.grad`` and frozen parameters behave as without it.

Source: Gomez et al., "The Reversible Residual Network", 2017, arXiv 1707.04585, algorithm 1. The
hooks work as in ``torch.utils.checkpoint(use_reentrant=False)``.

NOTE [ Slots and the tape ]
    forward     step 0     step 1     step 2            the graph saves *slots*, not activations;
              x ------> s ------> s ------> y           nothing else holds them: they are freed
                 slots      slots      slots
    backward                          <---- y           first slot of step 2 asked for: replay it;
                            <---- s                     its input inverts step 1, and so on

    1. A slot stands in the graph for one saved activation; what is small beside the step's input,
       such as the statistics of a normalisation, stays itself. Slots hold the tape; the tape refers
       to slots weakly, and its entries hold only what a replay needs. So there is no cycle:
       graph and tape die by reference counting.
    2. The tape holds one *known state*, normally the last output (a detached alias: it shares the
       version counter, so that a later in-place change is seen). ``_position`` says before which
       entry that state stands.
    3. An empty slot asked for makes the tape walk from the nearest known state down to the slot's
       step: entries passed on the way are inverted, the step itself is replayed with recording
       on, and its slots are filled.
    4. Where the graph will not be used again and all later slots are filled or gone, the tape is
       cut: the step's input becomes the known state, everything after it is released, before the
       next step is recorded. Filled slots keep their value until the graph drops them.
    5. Otherwise (retain_graph, create_graph, a partial graph) the known state stays, the walk
       continues from a *cursor*, and slots are emptied when the cursor moves on. A step that the
       cursor has passed is reached by starting again from the known state: slower, never wrong.
       Any order of unpacking is correct.
    6. Filling is atomic: an exception inside a replay leaves tape, slots and modules as they were.
    7. A step in ``recompute`` mode is a tape of one entry whose known state stands before it
       instead of after it.
    8. States on the way that the caller holds, such as the output of a backbone on which heads
       were put, are *landmarks*: a walk starts from the nearest one. So what comes after a state
       may change before what comes before it is differentiated. The tape refers to them weakly.
    9. A step that runs inside another one (a sequence in a branch) has its own tape. Its known
       state is an activation of the outer step: it is kept as a slot of that, filled when that is
       replayed. So memory does not grow with the number of outer steps.

NOTE [ Chains joined by hand ]
    Invertible modules called one after the other form one chain, whether or not a container holds
    them: a tape is continued whose known state is exactly the new step's input, the very tensors
    and unchanged. It is found by the identity of the last one; weak references tell whether that
    still means the same tensor.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler

from revzoo.core.fixedpoint import Fixed, Streams, fixed_of, fixed_or_not, held_in
from revzoo.core.guard import COMPARED, Guard
from revzoo.core.invertible import State, Step, plain_call, streams_of
from revzoo.core.recording import (
    DIFFERENTIATES_INSIDE,
    Entry,
    Kept,
    Recording,
    Slot,
    asides,
    call_on_grid,
    call_without_changing_hooks,
    explained,
    outside_recordings,
    unpack,
)
from revzoo.core.replay import (
    is_replaying,
    parameters_of,
    tensors_of,
    version_of,
)

try:  # private: tells whether the running backward pass keeps the graph for another one
    from torch._C._autograd import _get_current_graph_task_keep_graph as _graph_is_kept
except ImportError:  # to assume so costs one retained state, see rule 5

    def _graph_is_kept() -> bool:
        return True


def graph_is_kept() -> bool:
    """Whether the running backward pass keeps the graph for another one."""
    return _graph_is_kept()


def record(
    step: Step, state: State, context: Mapping[str, Any], *, inverts: bool, drift_limit: float
) -> Any:
    """Call ``step`` under hooks that put slots in the place of its activations.

    Args:
        step: the step.
        state: its input.
        context: its keyword arguments.
        inverts: whether the tape recovers the input from the output; if not, it keeps the input.
        drift_limit: largest relative error that the guard accepts of a replay.
    """
    if not inverts:
        tape = Tape(state)
    else:
        tape = Tape.ending_with(state) if _joins(step, state) else Tape()
    entry = Entry(step, state, context, drift_limit)
    tape.close()  # steps that this one runs on its own input are no part of this chain
    packed = Recording(entry.packer(tape, len(tape.entries)), unpack)
    aside: list[Tensor] = []
    with entry.conditions, packed, explained(entry.name), asides(aside if inverts else None):
        call = call_without_changing_hooks if inverts else plain_call
        returned = call_on_grid(call, step, state, context)
    entry.keep_aside(aside)
    outputs = streams_of(returned, step)
    entry.observe(state, outputs, inverts=inverts)
    tape.append(entry, outputs if inverts else None)
    return returned


def _joins(step: Step, state: State) -> bool:
    """Whether the steps before may be replayed from what an inverse of ``step`` returns."""
    # A floating-point step would give those on a grid nearly their words.
    return step.grid is not None or not any(fixed_of(t) is not None for t in state)


def differentiates(step: Step, state: State, context: Mapping[str, Any]) -> bool:
    """Whether the step's call is recorded by autograd, outside transforms and captured graphs."""
    if not torch.is_grad_enabled() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if forward_ad._current_level >= 0 and not is_replaying():  # a replay has no tangents to add
        return False
    if any(t.requires_grad for t in state):
        return True
    tensors = itertools.chain(tensors_of(context), parameters_of(step.subject))
    return any(t.requires_grad for t in tensors)


def _in_profiles(entry: Entry) -> AbstractContextManager[Any]:
    """The replay's range in profiles; nothing, at no cost, while none is made."""
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(f"revzoo.replay {entry.name}")


def _marks_of(state: Streams) -> list[tuple[int, bool]]:
    return [(version_of(t), t.requires_grad) for t in held_in(state)]


def _detached(state: Streams) -> Streams:
    return tuple([t if isinstance(t, Fixed) else t.detach() for t in fixed_or_not(state)])


class _Landmark(NamedTuple):
    """A state on the way that somebody else may hold (rule 8)."""

    position: int
    given: list[weakref.ref[Tensor]]
    marks: list[tuple[int, bool]]

    def stands(self) -> bool:
        return all(ref() is not None for ref in self.given)

    def state(self) -> Streams | None:
        """It, detached, unless it is gone or was changed."""
        state = tuple(t for ref in self.given if (t := ref()) is not None)
        whole = len(state) == len(self.given) and _marks_of(state) == self.marks
        return _detached(state) if whole else None


class Tape:
    """A chain of executed steps and one known state (NOTE [ Slots and the tape ])."""

    def __init__(self, state: State | None = None) -> None:
        self.entries: list[Entry] = []
        self._position = 0
        self._given: list[weakref.ref[Tensor]] = []  # the known state as its maker returned it
        self._landmarks: list[_Landmark] = []
        self._known: Kept | None = None
        self._marks: list[tuple[int, bool]] = []
        if state is not None:
            self._set_known(state)
        self._cursor: tuple[int, Streams] | None = None
        self._filled: list[weakref.ref[Slot]] = []
        self._guard = Guard()
        self._stride = 1  # of the entries that keep samples

    @staticmethod
    def ending_with(state: State) -> Tape:
        """The tape that ends with ``state``, or a new one (NOTE [ Chains joined by hand ])."""
        tape = _open_tapes.get(id(state[-1]))
        return tape if tape is not None and tape._knows(state) else Tape()

    def append(self, entry: Entry, outputs: State | None) -> None:
        """Add an executed step; ``outputs`` become the known state, unless None (rule 7)."""
        self.entries.append(entry)
        if outputs is None:
            return
        self._thin_samples()
        self._set_known(outputs)
        self._position = len(self.entries)
        if self._landmarks and not self._landmarks[-1].stands():
            self._landmarks.pop()  # as in every sequence: nobody holds what is between its steps
        self._given = [weakref.ref(t) for t in outputs]
        self._landmarks.append(_Landmark(self._position, self._given, self._marks))
        _open_tapes[id(outputs[-1])] = self

    def _thin_samples(self) -> None:
        """Let what the guard keeps not grow with depth: of a long chain it compares some steps."""
        if len(self.entries) > COMPARED * self._stride:
            self._stride *= 2
            for entry in self.entries[:: self._stride // 2][1::2]:
                entry.samples, entry.peaks = [], []
        if (len(self.entries) - 1) % self._stride:
            self.entries[-1].samples, self.entries[-1].peaks = [], []

    def close(self) -> None:
        """Let no further step join until one is appended."""
        self._given = []

    def _set_known(self, state: Streams) -> None:
        self._known = Kept(_detached(state))
        self._marks = _marks_of(state)

    def _knows(self, state: State) -> bool:
        return (
            len(state) == len(self._given)
            and all(ref() is t for t, ref in zip(state, self._given, strict=True))
            and _marks_of(state) == self._marks
        )

    def replay(self, index: int) -> None:
        """Fill the slots of entry ``index``: the package's backward rule."""
        if index >= len(self.entries):
            raise RuntimeError(DIFFERENTIATES_INSIDE)
        with _in_profiles(self.entries[index]), outside_recordings(), asides(None):
            self._replay(index)

    def _replay(self, index: int) -> None:
        position, state = self._nearest(index)
        self._guard.begin(state if self._position else ())  # rule 7 repeats what it gets
        if position > index + 1:
            for i in range(position - 1, index, -1):
                state = self.entries[i].invert(state)
            self._stand(index + 1, state)
        entry = self.entries[index]
        if position > index:
            state, replayed = entry.record_from_outputs(state)
            entry.report(self._guard, state)
            self._guard.note_uses(replayed.used, state)
        else:
            computed, replayed = entry.record_from_inputs(state)
            if self._position == 0 and computed:  # rule 7
                entry.report(self._guard, computed)
        for ref in self._filled:
            if (slot := ref()) is not None:
                slot.value = None
        self._filled = replayed.fill()
        self._stand(index, state)

    def _nearest(self, index: int) -> tuple[int, Streams]:
        """The known state closest above ``index``, or at it."""
        if self._cursor is not None and self._cursor[0] >= index:
            return self._cursor
        for landmark in self._landmarks:  # from the first to the last
            if landmark.position >= index and (state := landmark.state()) is not None:
                return landmark.position, state
        assert self._known is not None
        return self._position, self._known.state(self.entries[-1].name)

    def _stand(self, index: int, state: Streams) -> None:
        """Go on from ``state``, which stands before entry ``index``: rule 4, or else rule 5."""
        if graph_is_kept() or any(entry.wanted for entry in reversed(self.entries[index:])):
            self._cursor = index, state
            return
        del self.entries[index:]
        self.close()
        self._landmarks = [m for m in self._landmarks if m.position < index]
        self._set_known(state)
        self._position, self._cursor, self._filled = index, None, []


_open_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()
