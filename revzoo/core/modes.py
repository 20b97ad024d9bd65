"""Memory modes: what a step does with the activations that its backward pass needs.

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

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from revzoo._checks import check_module, did_you_mean
from revzoo.core.calls import (
    call_on_grid,
    explain_streams,
    explain_transforms,
    refuse_changed_inputs,
    versions_of,
)
from revzoo.core.conditions import alone_in, beside_replays
from revzoo.core.fixedpoint import (
    AUTO,
    Grid,
    can_have_words,
    check_bits,
    keeps_words,
    put_on_grid,
    renew_words,
    within,
)
from revzoo.core.guard import check_forward_range
from revzoo.core.invertible import (
    State,
    Step,
    as_state,
    is_container,
    kind_of,
    name_of,
    plain_call,
    steps_in,
    streams_of,
)
from revzoo.core.offload import offloaded
from revzoo.core.reach import reached
from revzoo.core.slots import replays_are_rounded
from revzoo.core.tape import differentiates, record

_SETTINGS = ("memory", "grid")  # what set_memory sets on a step


class Mode:
    """The interface of a memory mode, and the mode ``store``."""

    name = "store"
    keeps = "every activation"
    costs = "nothing"
    inverts = False
    """Whether the mode recovers a step's inputs from the outputs."""
    on_host = False
    """Whether the mode keeps as much as ``store``, but in host memory."""
    grid: Grid | None = None
    """The default grid of the streams; None for floating-point streams."""

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        """Call ``step`` so that its backward pass finds its activations, kept or recomputed."""
        with beside_replays(step):
            return call_on_grid(plain_call, step, state, context)

    def check(self, module: nn.Module, steps: Sequence[Step]) -> None:
        """Raise a ValueError if the mode fits none of the ``steps`` of ``module``."""

    def drift_limit(self, step: Step) -> float | None:
        """Largest relative error that a replay of ``step`` may have; None: not measured."""
        return step.drift_limit


class _Offload(Mode):
    name = "offload"
    keeps = "every activation, in host memory"
    costs = "transfers"
    on_host = True

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        if reached(step.subject)[0].fills_late:  # copies would be taken before
            return super().run(step, state, context)
        with beside_replays(step), offloaded(step), explain_transforms(step):
            return call_on_grid(plain_call, step, state, context)


class _Recompute(Mode):
    name = "recompute"
    keeps = "the input of each step"
    costs = "one more evaluation of each step"

    def run(self, step: Step, state: State, context: Mapping[str, Any]) -> Any:
        # the inverting modes recompute steps without an inverse
        inverts = self.inverts and step.invertible
        # buffers are captured before the forward pass begins
        with alone_in(step.subject):
            return record(step, state, context, inverts=inverts, drift_limit=self.drift_limit(step))


class _Invert(_Recompute):
    name = "invert"
    keeps = "the last output of a chain of steps"
    costs = "one more evaluation of each branch"
    inverts = True

    def check(self, module: nn.Module, steps: Sequence[Step]) -> None:
        if not any(step.invertible for step in steps):
            raise ValueError(
                f"{kind_of(module)} has no invertible step, so memory mode {self.name!r} "
                "cannot apply: use 'recompute' or 'store', or a reversible model"
            )


class _Exact(_Invert):
    name = "exact"
    costs = "as invert, and sums of integers"
    grid = AUTO

    def drift_limit(self, step: Step) -> float | None:
        # inside a step that is inverted in floating point, replays get inputs with rounding errors
        return step.drift_limit if step.drift_limit is None or replays_are_rounded() else 0.0


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
    if name not in MODES:
        if name in ("auto", "budget"):  # revzoo.profiling.plan.PLANNED, on a higher floor
            raise ValueError(
                f"memory mode {name!r} is a plan, with a mode for each step: make one, "
                "plan = revzoo.plan_memory(model, input_shape, budget='4GiB'), and pass it, "
                f"revzoo.set_memory(model, plan); a run makes its own, revzoo train memory={name}"
            )
        known = ", ".join(map(repr, MODES))
        hint = did_you_mean(name, MODES)
        raise ValueError(f"unknown memory mode {name!r}: expected one of {known}{hint}")
    return MODES[name]


def run_step(step: Step, state: State, /, **context: Any) -> State:
    """Run ``step(*state, **context)`` in the memory mode ``step.memory``.

    It is a plain call if nothing requires gradient, inside ``torch.func`` transforms (which refuse
    saved-tensor hooks), in forward-mode AD, and if torch captures the whole call (``torch.compile``
    of a model, ``torch.export``, ``torch.jit.trace``). To keep the memory mode, compile the
    branches instead.

    Raises:
        RuntimeError: the step changed its input in place, or a hook on it changed its streams.
        ValueError: the step takes a different number of streams, or only integers can invert it.
    """
    return as_state(run_in_mode(step, state, context), step)


def run_in_mode(step: Step, state: State, context: Mapping[str, Any]) -> Any:
    """:func:`run_step` without the conversion to a tuple: returns what the step returned."""
    if len(state) != step.streams:
        raise ValueError(
            f"{name_of(step)} got {len(state)} streams, expected {step.streams}: pass that many, "
            f"or set streams = {len(state)} on the step"
        )
    # a delegating step runs inside another one, whose tape records it
    recorded = not step.delegates and differentiates(step, state, context)
    mode = mode_of(step.memory) if recorded else MODES["store"]
    if not step.delegates:  # the inner step recognises a run by the identity of its tensors
        state = on_grid_of(step, state)
    if mode.grid is not None and not can_have_words(state):  # complex streams, say
        mode = MODES["recompute" if step.needs_words else "invert"]
    if step.needs_words and mode.inverts and step.grid is None:
        raise ValueError(_needs_words(step, mode.name))
    watched = () if torch.compiler.is_compiling() else state  # a captured graph has no versions
    # a branch that works in place on its stream trains the two streams on different values
    versions = versions_of(watched)
    try:
        outputs = mode.run(step, state, context)
    except (RuntimeError, TypeError) as error:
        explain_streams(error, step, state, "forward")
        raise
    refuse_changed_inputs(name_of(step), watched, versions)
    return outputs


def run_alone(step: Step, state: State, context: Mapping[str, Any]) -> Any:
    """Run a step that no sequence runs: renews its words and checks its range."""
    renew_words(state)
    outputs = run_in_mode(step, state, context)
    if step.grid is not None:
        check_forward_range(step, streams_of(outputs, step))
    return outputs


def on_grid_of(step: Step, state: State) -> State:
    """The state, rounded to the step's grid if it has one."""
    if step.grid is None or not keeps_words():
        return state
    cut = len(state) - step.float_streams
    if not can_have_words(state[:cut]):
        return state
    with within(step):
        return (*put_on_grid(state[:cut], step.grid), *state[cut:])


def set_memory(
    module: nn.Module, mode: str | Mapping[str, str], *, grid: Grid | None = None
) -> None:
    """Choose the memory mode of every step in ``module``: a model, a stage, a block, one step.

    The modes ``invert`` and ``exact`` recompute a step that has no inverse (a stem, a change of
    resolution).

    Args:
        module: a module that holds steps.
        mode: a name in :data:`MODES`; or a plan, which maps paths in ``module`` to such names
            (``{"stages.0": "invert", "stages.1": "store"}``). If one path is inside another, the
            later entry counts. Steps outside the plan's paths keep their mode.
        grid: fractional bits of the fixed-point streams, whose range is ``2**(30 - grid)``; or
            ``"auto"``, the default of mode ``exact``: 23, or fewer for large inputs. The other
            modes compute in floating point by default, and in fixed point with a grid.

    Raises:
        TypeError: the mode is neither a name nor a plan.
        ValueError: unknown mode, path or grid; no step in ``module``; an inverting mode if no step
            has an inverse; ``invert`` for a step whose inverse works only in fixed point; ``exact``
            or a grid for a step that is not exact.

    Example:
        >>> model = revzoo.create_model("revnet38")
        >>> revzoo.set_memory(model, "invert")
        >>> revzoo.set_memory(model.stages[2], "recompute")
        >>> revzoo.set_memory(model, {"stages.0": "exact", "stages.1": "store"})
    """
    check_module("module", module)
    if not isinstance(mode, (str, Mapping)):
        raise TypeError(
            f"mode is {mode!r}: expected one of {', '.join(map(repr, MODES))}, or a plan from "
            "revzoo.plan_memory(...), which maps paths to modes"
        )
    plan = {"": mode} if isinstance(mode, str) else dict(mode)
    chosen = [(mode_of(name), _steps_at(module, path, name)) for path, name in plan.items()]
    for each, steps in chosen:
        if isinstance(mode, str):
            each.check(module, steps)
        _check_fit(each, grid, steps)
    # after all checks, so that an error changes nothing
    for each, steps in chosen:
        assign_memory(steps, each.name, grid=grid)
    if not isinstance(mode, str):
        for container in filter(is_container, module.modules()):
            # the container splits and merges its streams in the mode of its first step
            if first := next(iter(steps_in(container).values()), None):
                container.memory, container.grid = first.memory, first.grid


@contextlib.contextmanager
def memory(
    module: nn.Module, mode: str | Mapping[str, str], *, grid: Grid | None = None
) -> Iterator[None]:
    """Change the memory mode of ``module`` inside a ``with`` block; restore each step's mode after.

    Args:
        module: a module that holds steps.
        mode: see :func:`~revzoo.set_memory`.
        grid: see :func:`~revzoo.set_memory`.

    Raises:
        ValueError: as :func:`~revzoo.set_memory`; nothing changes.

    Example:
        >>> net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        >>> with revzoo.memory(net, "store"):
        ...     net(torch.randn(2, 8)).sum().backward()
        >>> [step.memory for step in net[0].steps]
        ['exact', 'exact']
    """
    steps = [m for m in module.modules() if isinstance(m, Step)]
    # from __dict__: a step may report a mode other than the one set (PaddedCoupling)
    before = [{k: vars(s)[k] for k in _SETTINGS if k in vars(s)} for s in steps]
    try:
        set_memory(module, mode, grid=grid)
        yield
    finally:
        for step, settings in zip(steps, before, strict=True):
            for key in _SETTINGS:
                vars(step).pop(key, None)
            vars(step).update(settings)


def modes_in(module: nn.Module) -> set[str]:
    """The memory modes in ``module``: of its steps, and of modules with ``memory_options``.

    Such a module is not a step, but runs in a mode ``memory`` that follows from other attributes.
    ``memory_options`` names these attributes.
    """
    others: Iterable[Any] = (m for m in module.modules() if hasattr(m, "memory_options"))
    return {step.memory for step in steps_in(module).values()} | {m.memory for m in others}


def _steps_at(module: nn.Module, path: str, mode: str) -> list[Step]:
    """The steps of ``module`` at a path; raises a ValueError if there are none."""
    try:
        part = module.get_submodule(path)
    except AttributeError:
        paths = [name for name, _ in module.named_modules()]
        raise ValueError(
            f"the plan has a mode for {path!r}, but {kind_of(module)} has no such part: use "
            f"the plan for the model that it was made for{did_you_mean(path, paths)}"
        ) from None
    steps = [m for m in part.modules() if isinstance(m, Step)]
    if not steps:
        for inner, m in part.named_modules():
            # modules of revzoo.compat.memcnn: they have a mode, but are not steps
            if options := getattr(m, "memory_options", None):
                raise ValueError(
                    f"{inner} {type(m).__name__}".strip()
                    + f" has no memory mode to set to {mode!r}: "
                    f"set its {options} instead, or build the model from ReversibleSequence and "
                    "ReversibleBlock"
                )
        raise ValueError(
            f"{kind_of(part)} holds no step whose memory mode could be set to {mode!r}: "
            "build it from ReversibleSequence, ReversibleBlock or your own Step, or make its "
            "blocks reversible: revzoo.make_reversible(model), on the command line --bits 4"
        )
    return steps


def default_mode(steps: Sequence[Step]) -> str:
    """``exact`` if it fits each step with an inverse, otherwise ``invert``."""
    return "exact" if all(step.exact for step in steps if step.invertible) else "invert"


def assign_memory(steps: Sequence[Step], mode: str, *, grid: Grid | None = None) -> None:
    """Set the mode of ``steps`` like :func:`set_memory`, but allow that none has an inverse.

    Raises:
        ValueError: as :func:`set_memory`.
    """
    chosen = mode_of(mode)
    _check_fit(chosen, grid, steps)
    grid = chosen.grid if grid is None else grid
    for step in steps:
        step.memory = mode
        # a step without inverse is recomputed from its inputs, which need no grid
        step.grid = grid if step.invertible else None


def _check_fit(mode: Mode, grid: Grid | None, steps: Sequence[Step]) -> None:
    """Raise a ValueError if a step cannot run in ``mode`` on ``grid``; None: the mode's grid."""
    grid = mode.grid if grid is None else grid
    if grid is not None:
        _check_grid(grid, steps)
    elif mode.inverts:
        for step in steps:
            if step.needs_words:
                raise ValueError(_needs_words(step, mode.name))


def _needs_words(step: Step, mode: str) -> str:
    return (
        f"{name_of(step)} has no inverse in floating point, in which mode {mode!r} computes: use "
        "'exact', which inverts it on integers, or 'recompute' or 'store'"
    )


def _check_grid(grid: Grid, steps: Sequence[Step]) -> None:
    check_bits(grid)
    for step in reversed(steps):  # reversed: name a member rather than its container
        if step.invertible and not step.exact:
            raise ValueError(
                f"{name_of(step)} {step.inexact}: use 'invert' for it, or additive couplings, "
                "squeezes and permutations instead, which are exact"
            )
