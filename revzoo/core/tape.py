"""The invertible checkpoint: a chain of steps keeps no activation but its last output.

``torch.utils.checkpoint`` keeps the input of every segment. Here each step is one small
``autograd.Function``. Its forward keeps no graph; its backward inverts the step and evaluates it
once more, with recording on, for the gradients (:mod:`revzoo.core.replay`).

Source: Gomez et al., "The Reversible Residual Network", 2017, arXiv 1707.04585, algorithm 1.

NOTE [ The tape ]
    forward     step 0     step 1     step 2         The graph holds one function for each
              x -----> s1 -----> s2 -----> y         step, and no activation.
    backward                         <---- y         The function of step 2 inverts it, which
                          <---- s2                   gives s2, and computes the gradients. From
                                                     s2 the function of step 1 goes on.

    1. The tape of a chain holds one *known state*: the words of the streams in mode ``exact``, the
       streams themselves in ``invert``. ``_position`` counts the functions before it. For each
       function the tape holds the conditions (:mod:`revzoo.core.conditions`) and what the replay
       compares: a sum of the words that the step changed, or a sample of the floats.
    2. Functions hold the tape; the tape refers to functions weakly. So there is no cycle, and
       graph and tape are freed at once.
    3. Parameters are inputs of the function, so their gradients arrive at their own accumulate
       nodes: hooks, DDP, ``autograd.grad`` and frozen parts work as usual. A leaf that the step
       reads without owning it, as from a closure, is accumulated in the replay. A captured tensor
       that has a graph of its own raises.
    4. Once a function and all later ones have run backward for the last time, they are dropped, and
       this function's input becomes the known state. If no earlier one can run, no state is kept.
    5. Otherwise (``retain_graph``, or ``autograd.grad`` of some inputs) the known state stays, and
       the walk continues from a *cursor*. A step that no gradient reaches is undone on the way. A
       step that the cursor has passed is reached from the known state again.
    6. First derivatives only: ``create_graph=True`` raises.
    7. A step that only moves values is plain autograd, which saves nothing; the tape undoes it.
    8. Up to eight additive couplings of a sequence share a function if they run only torch's layers
       and draw nothing: their conditions are restored once, and their gradients arrive together.
       The last two couplings have one each, so hooks of the sequence's outputs see what they see in
       plain training. Nothing is shared while others may keep the tensors that a function frees, or
       repeat the pass (:func:`revzoo.core.saved.are_watched`).
    9. A coupling of two of several streams has a function of these two. The others pass by in the
       graph, but stay on the tape.

NOTE [ Chains joined by hand ]
    Invertible modules called one after the other form one chain, also without a container. A step
    continues a tape if its input is exactly the tape's known state: the same tensors, not changed
    since. We look up the tape by the ``id`` of the last tensor; weak references show whether this
    id still belongs to the same tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from revzoo.core.conditions import Members
from revzoo.core.guard import Guard, note_scale
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    name_of,
    plain_call,
    runs_forward_alone,
    streams_of,
)
from revzoo.core.replay import (
    AdditiveCall,
    Call,
    GeneralCall,
    PairCall,
    pop_stashed_gradients,
    stash_gradients,
)
from revzoo.core.saved import SavedState, graph_is_kept
from revzoo.core.tensors import capturing_cuda_graph, versions_of
from revzoo.core.words import Fixed, Streams, call_on_grid

Run = Callable[[Step, State, Mapping[str, Any]], Any]

watcher: Callable[[Run, Step, State, Mapping[str, Any]], Any] | None = None
"""Runs each step in its mode, if set: ``watcher(run, step, state, context)``. For measurements."""


def run_inverting(
    steps: tuple[Invertible, ...],
    members: Members,
    state: State,
    context: Mapping[str, Any],
    drift_limit: float | None,
    *,
    private: bool = False,
) -> Any:
    """Call the steps so that their backward pass recovers their input from their output.

    Args:
        steps: one step; or additive couplings that one function runs (``Members.may_share``).
        members: of the steps.
        state: the input.
        context: keyword arguments of a single step.
        drift_limit: of the steps.
        private: whether several couplings may free ``state``, since nobody else will read it.
    """
    step = steps[0]
    if drift_limit is not None and capturing_cuda_graph():
        raise RuntimeError(
            f"{name_of(step)} runs while a CUDA graph is captured, but the guard reads its figures "
            "on the host after each backward pass: switch it off with "
            "revzoo.set_drift_limit(model, None), or use memory='store'"
        )
    tape = Tape.ending_with(state, step)
    tape.close()  # steps inside this one must not join this chain
    plain = runs_forward_alone(step)
    if plain and step.moves_values:
        return _moved(step, tape, members, state, context, drift_limit)
    kind: type[Call] = GeneralCall
    if plain and not step.extras:
        kind = PairCall if step.pair else AdditiveCall if step.adds else GeneralCall
    every = state
    if step.pair and kind is PairCall:
        state = tuple(state[i] for i in step.pair)
    call = kind(steps, members, state, context, drift_limit)
    if private and isinstance(call, AdditiveCall):
        call.frees_input = True
        tape.known = None  # the next step is certain to be appended, or the graph is lost
    trained = [t for of_step in call.trained for t in of_step]
    outputs = StepFunction.apply(call, tape, *state, *call.arguments, *trained)
    if isinstance(call, PairCall):
        call.streams = call.among(every)
        outputs = (*every[: call.at], outputs, *every[call.at + 1 :])
    elif isinstance(call, AdditiveCall):
        if len(steps) == 1:
            outputs = state[1], outputs
        else:
            outputs[0].grad_fn.register_prehook(partial(stash_gradients, call))
    if any(call.differentiable) and not any(t.requires_grad for t in as_state(outputs, step)):
        raise RuntimeError(
            f"{call.name} uses parameters that are not its own, so no gradient would reach "
            "them: register their module as a submodule of the step, or pass them as keyword "
            "arguments"
        )
    tape.append(call, streams_of(outputs, step) if kind is GeneralCall else outputs)
    return outputs


def _moved(
    step: Invertible,
    tape: Tape,
    members: Members,
    state: State,
    context: Mapping[str, Any],
    drift_limit: float | None,
) -> Any:
    """Rule 7."""
    limit = drift_limit if step.guarded else None
    call = GeneralCall((step,), members, state, context, limit)
    call.done = True
    returned = call_on_grid(plain_call, step, state, context)
    call.finish(state, returned)
    tape.append(call, streams_of(returned, step))
    return returned


class StepFunction(torch.autograd.Function):
    """The function in the graph, of one or more steps."""

    @staticmethod
    def forward(ctx: Any, call: Call, tape: Tape, *inputs: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call, ctx.tape = call, tape
        call.function = weakref.ref(ctx)  # rule 2
        call.arguments = []  # they may hold this chain's graph
        # before torch 2.11, a cast that recorded nothing serves later code, without a gradient
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            outputs = call.forward(inputs[: len(call.needs)])
        finally:
            torch.set_autocast_cache_enabled(cached)
        if isinstance(call, GeneralCall):
            flat = as_state(outputs)
            found = zip(flat, call.differentiable, strict=True)
            ctx.mark_non_differentiable(*(t for t, d in found if not d))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs: tuple[bool, ...] = ctx.needs_input_grad[2:]
        received = [*(pop_stashed_gradients(ctx.call) or grads)]  # a list, which the call empties
        if all(g is None for g in received):
            return None, None, *[None] * len(needs)
        return None, None, *ctx.tape.replay(ctx.call, received, needs)


class Tape:
    """The calls of a chain, and one known state (NOTE [ The tape ])."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._position = 0
        self._has_words = False
        self.known: SavedState | None = None
        self._returned: list[weakref.ref[Tensor]] = []  # the known state as the step returned it
        self._marks: tuple[list[int], list[bool]] = [], []
        self._cursor: tuple[int, Streams] | None = None  # rule 5
        self._guard = Guard()

    @staticmethod
    def ending_with(state: State, step: Step) -> Tape:
        """The tape that ends with ``state``, or a new one (NOTE [ Chains joined by hand ])."""
        tape = _open_tapes.get(id(state[-1]))
        # ids are reused, so ends_with() compares the objects. A floating-point step would
        # recover words only approximately
        if tape is None or not tape.ends_with(state) or (step.grid is None and tape._has_words):
            return Tape()
        return tape

    def append(self, call: Call, outputs: State) -> None:
        """Add a call, whose ``outputs`` become the known state."""
        call.index = len(self._calls)
        self._calls.append(call)
        self._has_words = Fixed in map(type, call.streams)
        self.known, call.streams = SavedState(call.streams), ()
        # marks of the returned tensors: the caller can change those, but not the words
        self._marks = _marks_of(outputs)
        self._position = len(self._calls)
        self._returned = [weakref.ref(t) for t in outputs]
        # keys of freed tensors stay until the tape is freed; ending_with() compares the tensors
        _open_tapes[id(outputs[-1])] = self

    def close(self) -> None:
        """Prevent other steps from joining until the next one is appended."""
        self._returned = []

    def ends_with(self, state: State) -> bool:
        return (
            len(state) == len(self._returned)
            and all(ref() is t for t, ref in zip(state, self._returned, strict=True))
            and _marks_of(state) == self._marks
        )

    def replay(
        self, call: Call, grads: list[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The package's backward rule: invert the steps, and evaluate them again.

        Returns:
            The gradients of the function's inputs.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{call.name} got create_graph=True in memory mode {call.step.memory!r}, "
                "which computes first derivatives only. For second derivatives, use "
                "revzoo.set_memory(model, 'recompute') or 'store'"
            )
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"revzoo.replay {call.name}"):
                return self._replay(call, grads, needs)
        return self._replay(call, grads, needs)

    def _replay(
        self, call: Call, grads: list[Tensor | None], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        index: int = call.index
        state = list(self._walk_to(index + 1))
        call.done = not graph_is_kept()
        if self._can_cut(index):
            self.known = self._cursor = None  # the steps free these streams when they are used
        scales = [t.scale for t in state if isinstance(t, Fixed)]
        inputs, found = call.unwind(state, self._guard, grads, needs)
        if call.limit is not None:
            for scale in [*scales, *(t.scale for t in inputs if isinstance(t, Fixed))]:
                note_scale(scale, call.step)
        self._move_to(index, inputs)
        return found

    def _walk_to(self, position: int) -> Streams:
        """The state after ``position`` functions; cuts the tape or moves the cursor there."""
        at, state = self._start_for(position)
        if any(call.limit is not None for call in self._calls[position - 1 : at]):
            self._guard.begin(state)
        if at > position:
            while at > position:
                at -= 1
                state, _ = self._calls[at].unwind(list(state), self._guard, [], ())
            self._move_to(position, state)  # frees the later state before memory peaks
        return state

    def _start_for(self, position: int) -> tuple[int, Streams]:
        if self._cursor is not None and self._cursor[0] >= position:
            return self._cursor
        if self.known is None or position > self._position:
            raise RuntimeError(
                "trying to backward through the graph a second time, but the first pass freed the "
                "tape of its steps: pass retain_graph=True to the first backward pass. (A forward "
                "pass that went on from these steps and failed frees it, too: compute them again)"
            )
        return self._position, self.known.state(self._calls[-1].name)

    def _can_cut(self, index: int) -> bool:
        """Whether nobody needs the functions from ``index`` on once more (rule 4)."""
        return not (graph_is_kept() or any(call.may_run_backward for call in self._calls[index:]))

    def _move_to(self, index: int, state: Streams) -> None:
        """Continue from ``state``, the input of function ``index``: cut or keep (rule 5)."""
        if self._can_cut(index):
            del self._calls[index:]
            self.close()
            # the loss keeps the graph, and so this tape, until the whole backward pass is done
            runs_on = any(call.may_run_backward for call in self._calls)
            self.known = SavedState(state) if runs_on else None
            self._position, self._cursor = index, None
        elif any(call.may_run_backward for call in self._calls[:index]):
            self._cursor = index, state
        else:  # the end of the walk
            self._cursor = None


_open_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()


def _marks_of(state: State) -> tuple[list[int], list[bool]]:
    # requires_grad, too: detach_() takes a tensor out of the graph without a new version
    return versions_of(state), [t.requires_grad for t in state]
