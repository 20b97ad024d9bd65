"""Memory modes: how a step keeps or recomputes the activations that its backward pass needs.

=============  ================================================================================
``store``      keep them, as plain autograd does: least time, most memory
``offload``    keep them in host memory (pinned for a GPU), fetch them back when needed
``recompute``  keep the step's inputs, evaluate the step once more in the backward pass
``invert``     keep nothing: recover the inputs from the outputs, evaluating each branch once more
``exact``      as ``invert``, on fixed-point streams: inputs are recovered bit for bit
=============  ================================================================================

The mode is not part of the ``state_dict``. It may change at any time, and applies from the next
forward pass on.

A :class:`Mode` object defines how to run a step, which steps the mode fits, and how much drift it
allows. To add a mode, write a subclass and add it to :data:`MODES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from revzoo._checks import did_you_mean
from revzoo.core import tape
from revzoo.core.ambient import runs_eagerly
from revzoo.core.calls import (
    call_on_grid,
    explain_streams,
    explain_transforms,
    has_hooks,
    refuse_changed_inputs,
    runs_forward_alone,
)
from revzoo.core.checkpoint import limit_of, run_recomputed
from revzoo.core.conditions import Conditions, Members, is_replaying
from revzoo.core.fixedpoint.words import (
    AUTO,
    Grid,
    can_have_words,
    keeps_words,
    renew_words,
)
from revzoo.core.guard.drift import Replayed
from revzoo.core.guard.ranges import RangeError, finish_chains, scales_of
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    kind_of,
    name_of,
    plain_call,
    streams_of,
)
from revzoo.core.offload import offloaded
from revzoo.core.saved import are_watched
from revzoo.core.sums import begun_chains, collects_chains, put_on_grid
from revzoo.core.tensors import tensors_of, versions_of


def differentiates(step: Step, state: State, context: Mapping[str, Any]) -> bool:
    """Whether autograd records the call and hooks of saved tensors can run.

    Hooks cannot run in transforms, captured graphs and forward-mode AD.
    """
    # torch.func refuses saved-tensor hooks; a captured graph has no Python objects, and its
    # compiler decides what to keep
    if not torch.is_grad_enabled() or not runs_eagerly():
        return False
    if forward_ad._current_level >= 0 and not is_replaying():  # a replay needs no tangents
        return False
    if any(t.requires_grad for t in state):
        return True
    # most states require gradient, so the parameters are rarely asked
    return any(t.requires_grad for t in tensors_of(context)) or any(Members.of(step).trained())


class Mode:
    """The interface of a memory mode, and the mode ``store``."""

    name = "store"
    keeps = "every activation"
    inverts = False
    """Whether the mode recovers a step's inputs from the outputs."""
    on_host = False
    """Whether the mode keeps as much as ``store``, but in host memory."""
    grid: Grid | None = None
    """The default grid of the streams; None for floating-point streams."""

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        """Call ``step`` so that its backward pass finds its activations, kept or recomputed."""
        return call_on_grid(plain_call, step, state, context)

    def check(self, module: nn.Module, steps: Sequence[Step]) -> None:
        """Raise a ValueError if the mode does not fit any of the ``steps`` of ``module``."""

    def drift_limit(self, step: Step) -> float | None:
        """Largest relative error that a replay of ``step`` may have; None: not measured."""
        return step.drift_limit


class _Offload(Mode):
    name = "offload"
    keeps = "every activation, in host memory"
    on_host = True

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        if any(isinstance(m, nn.RReLU) for m in step.subject.modules()):
            return super().run(step, state, context)  # it fills its noise after autograd saved it
        with offloaded(step.subject):
            return call_on_grid(plain_call, step, state, context)


class _Recompute(Mode):
    name = "recompute"
    keeps = "the input of each step"

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        members = Members.of(step)
        if members.lazy:
            warnings.warn(tape.LAZY_WARNING, UserWarning, stacklevel=2)
            return super().run(step, state, context)
        conditions = Conditions((step,), members, state, ambient=False)
        drift = None
        if step.drift_limit is not None and not members.quiet:
            drift = Replayed((step,), name_of(step), limit_of(step, state), False)

        def call(*state: Tensor, **context: Any) -> Any:
            return call_on_grid(plain_call, step, state, context)

        # layers that we know save the same tensors again, so torch need not compare their shapes
        return run_recomputed(
            call,
            state,
            context,
            conditions,
            drift,
            early_stop=members.quiet,
            determinism_check="none" if members.quiet else "default",
        )


class _Invert(_Recompute):
    name = "invert"
    keeps = "the last output of a chain of steps"
    inverts = True

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        if not isinstance(step, Invertible) or not step.invertible or has_hooks(step):
            return super().run(step, state, context)
        limit = self.drift_limit(step)
        return tape.run_inverting((step,), Members.of(step), state, context, limit)

    def check(self, module: nn.Module, steps: Sequence[Step]) -> None:
        if not any(step.invertible for step in steps):
            raise ValueError(
                f"{kind_of(module)} has no invertible step, so memory mode {self.name!r} "
                "cannot apply: use 'recompute' or 'store', or a reversible model"
            )


class _Exact(_Invert):
    name = "exact"
    grid = AUTO

    def drift_limit(self, step: Step) -> float | None:
        return None if step.drift_limit is None else 0.0


MODES: Mapping[str, Mode] = {
    mode.name: mode for mode in (Mode(), _Offload(), _Recompute(), _Invert(), _Exact())
}

DEVICE_MODES = tuple(name for name, mode in MODES.items() if not mode.on_host)
"""The modes whose activations stay on the device."""

INVERTING = tuple(name for name, mode in MODES.items() if mode.inverts)
"""The modes that recover a step's inputs from its outputs."""


def in_table_order(names: Iterable[str]) -> list[str]:
    """Each of the ``names`` once, in the order of :data:`MODES`; other names first."""
    rank = {name: number for number, name in enumerate(MODES)}
    return sorted({*names}, key=lambda name: (rank.get(name, -1), name))


def mode_of(name: str) -> Mode:
    """The mode by name; raises a ValueError that lists the modes."""
    mode = MODES.get(name)
    if mode is None:
        if name in (
            "auto",
            "balanced",
            "budget",
        ):  # revzoo.profiling.plan.PLANNED, on a higher floor
            raise ValueError(
                f"memory mode {name!r} is a plan, with a mode for each step: make one, "
                "plan = revzoo.plan_memory(model, input_shape, budget='4GiB'), and pass it, "
                f"revzoo.set_memory(model, plan); a run makes its own, revzoo train memory={name}"
            )
        known = ", ".join(map(repr, MODES))
        hint = did_you_mean(name, MODES)
        raise ValueError(f"unknown memory mode {name!r}: expected one of {known}{hint}")
    return mode


def effective_mode(step: Step) -> str:
    """The mode in which a step runs: the inverting modes recompute a step without an inverse."""
    return "recompute" if mode_of(step.memory).inverts and not step.invertible else step.memory


def run_step(step: Step, state: State, /, **context: Any) -> State:
    """Run ``step(*state, **context)`` in the memory mode ``step.memory``.

    The caller has put the state on the step's grid (:func:`on_grid_of`).

    It is a plain call if nothing requires gradient, inside ``torch.func`` transforms (which refuse
    saved-tensor hooks), in forward-mode AD, and if torch captures the whole call (``torch.compile``
    of a model, ``torch.export``, ``torch.jit.trace``). To keep the memory mode, compile the
    branches instead.

    Raises:
        RuntimeError: the step changed its input in place.
        ValueError: the step takes a different number of streams, or only integers can invert it.
    """
    return as_state(run_in_mode(step, state, context), step)


def run_in_mode(step: Step, state: State, context: Mapping[str, Any]) -> Any:
    """:func:`run_step` without the conversion to a tuple: returns the step's own result."""
    if len(state) != step.streams:
        raise ValueError(
            f"{name_of(step)} got {len(state)} streams, expected {step.streams}: pass that many, "
            f"or set streams = {len(state)} on the step"
        )
    # a delegating step runs inside another one, whose tape records it
    recorded = not step.delegates and differentiates(step, state, context)
    mode = mode_of(step.memory) if recorded else MODES["store"]
    if mode.grid is not None and not can_have_words(state):  # complex streams, say
        mode = MODES["recompute" if step.needs_words else "invert"]
    if step.needs_words and mode.inverts and step.grid is None:
        raise ValueError(no_float_inverse_message(step, mode.name))
    watched = () if torch.compiler.is_compiling() else state  # a captured graph has no versions
    # a branch that changes its input in place would make the streams disagree
    versions = versions_of(watched)
    try:
        if tape.watcher is None:
            outputs = mode.run(step, state, context)
        else:
            outputs = tape.watcher(mode.run, step, state, context)
    except (RuntimeError, TypeError) as error:
        if mode is not MODES["store"]:
            explain_transforms(error, step)
        explain_streams(error, step, state, "forward")
        raise
    refuse_changed_inputs(step, watched, versions)
    return outputs


def can_share(step: Step) -> bool:
    """Whether ``step`` is a coupling that may run in one function with those beside it."""
    plain = step.adds and not step.extras and runs_forward_alone(step)
    checked = step.drift_limit is None or step.close_checks <= 0
    return plain and checked and mode_of(step.memory).inverts and Members.of(step).may_share


def can_run_together(step: Step, state: State) -> bool:
    """Whether steps with the settings of ``step`` may run in one function from this state."""
    return (
        tape.watcher is None
        and not are_watched()
        and all(t.requires_grad for t in state)
        and can_have_words(state)
        and differentiates(step, state, {})
    )


def run_together(steps: tuple[Invertible, ...], state: State, *, private: bool) -> State | None:
    """Run additive couplings in one function of the graph: less time than one for each.

    Args:
        steps: with equal settings; :func:`can_share` holds for each of them.
        state: two streams, on the steps' grid; :func:`can_run_together` holds for it.
        private: whether nobody else will read ``state``: it is then freed early.

    Returns:
        The streams after the steps; None if the steps share parameters.
    """
    members = Members.together(steps)
    if members is None:
        return None
    limit = mode_of(steps[0].memory).drift_limit(steps[0])
    # it refuses a branch that changes its input
    outputs: State = tape.run_inverting(steps, members, state, {}, limit, private=private)
    return outputs


def run_alone(step: Step, state: State, context: Mapping[str, Any]) -> Any:
    """Run a step that no sequence runs: renews its words and checks its range."""
    if step.grid is None or step.delegates:
        # a delegating step's inner one recognises a run by the identity of its tensors
        renew_words(state)
        return run_in_mode(step, state, context)

    def run() -> tuple[Any, State]:
        renew_words(state)
        outputs = run_in_mode(step, on_grid_of(step, state), context)
        return outputs, streams_of(outputs, step)

    return run_on_adapted_grid(step, run)


def run_on_adapted_grid(module: nn.Module, run: Callable[[], tuple[Any, State]]) -> Any:
    """``run()``, which may begin chains of steps; again if their grids have adapted.

    Args:
        module: runs again only in evaluation mode: statistics must not count a batch twice.
        run: returns its result, and the tensors in it.

    Raises:
        RangeError: a stream left its range, and no gradient needs the outputs.
    """
    if is_replaying() or not keeps_words():  # the first pass has checked
        return run()[0]
    error: RangeError | None = None
    inside = collects_chains()
    for _ in range(6):
        with begun_chains() as scales:
            result, tensors = run()
        if not inside:  # chains that began in earlier calls
            scales = list(dict.fromkeys([*scales, *scales_of(tensors)]))
        error = finish_chains(scales, tensors)
        if error is None:
            break
        if any(m.training for m in module.modules()):
            break
    if error is not None and error.reason and not any(t.requires_grad for t in tensors):
        raise error
    return result


def on_grid_of(step: Step, state: State) -> State:
    """The state, rounded to the step's grid if it has one."""
    if step.grid is None or not keeps_words():
        return state
    cut = len(state) - step.float_streams
    if not can_have_words(state[:cut]):
        return state
    return (*put_on_grid(state[:cut], step), *state[cut:])


def no_float_inverse_message(step: Step, mode: str) -> str:
    """The message for a step whose inverse works only in fixed point, in another mode."""
    return (
        f"{name_of(step)} has no inverse in floating point, in which mode {mode!r} computes: use "
        "'exact', which inverts it on integers, or 'recompute' or 'store'"
    )
