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

A :class:`Mode` object defines how to run a step, and how much drift the mode allows. To add a mode,
write a subclass and add it to :data:`MODES`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from revzoo._checks import check_module, did_you_mean
from revzoo.core import tape
from revzoo.core.checkpoint import limit_of, run_recomputed
from revzoo.core.conditions import Conditions, Members, is_replaying
from revzoo.core.guard import RangeError, Replayed, finish_chains, scales_of
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    all_steps,
    as_state,
    explain_streams,
    explain_transforms,
    has_hooks,
    is_container,
    kind_of,
    name_of,
    plain_call,
    refuse_changed_inputs,
    runs_forward_alone,
    steps_in,
    streams_of,
)
from revzoo.core.kernels import DEFAULT_BITS, MAX_BITS
from revzoo.core.saved import are_watched, offloaded
from revzoo.core.sums import begun_chains, collects_chains, put_on_grid
from revzoo.core.tensors import runs_eagerly, tensors_of, versions_of
from revzoo.core.words import (
    AUTO,
    Grid,
    call_on_grid,
    can_have_words,
    keeps_words,
    renew_words,
)

_LAZY_WARNING = (
    "lazy layers have no weights yet: until they do, steps that hold them keep their activations, "
    "as with memory='store'. If memory is short, call the model on a batch under torch.no_grad() "
    "first, and remove layers that no pass calls"
)


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
            warnings.warn(_LAZY_WARNING, UserWarning, stacklevel=2)
            return super().run(step, state, context)
        return self.replayed(step, members, state, context)

    def replayed(
        self, step: Step, members: Members, state: State, context: Mapping[str, Any]
    ) -> Any:
        """Call ``step``, to evaluate it once more in the backward pass."""
        conditions = Conditions((step,), members, state, ambient=False)
        drift = None
        if step.drift_limit is not None and not members.quiet:
            drift = Replayed((step,), name_of(step), limit_of(step, state), False)

        def call(*state: Tensor, **context: Any) -> Any:
            return call_on_grid(plain_call, step, state, context)

        # layers that we know save the same tensors again, so torch need not compare their shapes
        check = "none" if members.quiet else "default"
        options = {"early_stop": members.quiet, "determinism_check": check}
        return run_recomputed(call, state, context, conditions, drift, **options)


class _Invert(_Recompute):
    name = "invert"
    keeps = "the last output of a chain of steps"
    inverts = True

    def replayed(
        self, step: Step, members: Members, state: State, context: Mapping[str, Any]
    ) -> Any:
        if not isinstance(step, Invertible) or not step.invertible or has_hooks(step):
            return super().replayed(step, members, state, context)
        return tape.run_inverting((step,), members, state, context, self.drift_limit(step))


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
        if name in ("auto", "balanced", "budget"):  # PLANNED of revzoo.profiling.plan
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
        raise ValueError(_no_float_inverse(step, mode))
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


def _no_float_inverse(step: Step, mode: Mode) -> str:
    return (
        f"{name_of(step)} has no inverse in floating point, in which mode {mode.name!r} computes: "
        "use 'exact', which inverts it on integers, or 'recompute' or 'store'"
    )


_SETTINGS = ("memory", "grid", "growth")  # what set_memory sets on a step


def set_memory(
    module: nn.Module, mode: str | Mapping[str, str], *, grid: Grid | None = None
) -> None:
    """Choose the memory mode of every step in ``module``: a model, a stage, a block, one step.

    The modes ``invert`` and ``exact`` recompute a step that has no inverse (a stem, a change of
    resolution). A module without steps takes only ``store``.

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
        ValueError: unknown mode, path or grid; no step in ``module`` for another mode than
            ``store``; an inverting mode if no step has an inverse; ``invert`` for a step whose
            inverse works only in fixed point; ``exact`` or a grid for a step that is not exact.

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
    chosen = [(mode_of(name), _steps_at(module, path, name, grid)) for path, name in plan.items()]
    for each, steps in chosen:
        invertible = any(step.invertible for step in steps)
        if isinstance(mode, str) and each.inverts and not invertible:
            raise ValueError(
                f"{kind_of(module)} has no invertible step, so memory mode {mode!r} cannot apply: "
                "use 'recompute' or 'store', or a reversible model"
            )
        _check_fit(each, grid, steps)
    # after all checks, so that an error changes nothing
    for each, steps in chosen:
        assign_memory(steps, each.name, grid=grid)
    if not isinstance(mode, str):
        for container in filter(is_container, module.modules()):
            # a step appended later takes the container's mode; a delegating step runs on its grid
            if first := next(iter(steps_in(container).values()), None):
                container.memory, container.grid = first.memory, first.grid


@contextlib.contextmanager
def memory(
    module: nn.Module, mode: str | Mapping[str, str], *, grid: Grid | None = None
) -> Iterator[None]:
    """Change the memory mode of ``module`` inside a ``with`` block; restore each step's mode after.

    Takes the arguments of :func:`~revzoo.set_memory`, and raises as it does; then nothing changes.

    Example:
        >>> net = revzoo.ReversibleSequence([revzoo.ReversibleBlock(nn.Linear(4, 4))])
        >>> with revzoo.memory(net, "store"):
        ...     net(torch.randn(2, 8)).sum().backward()
        >>> [step.memory for step in net[0].steps]
        ['exact', 'exact']
    """
    steps = all_steps(module).values()
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


def refuse_own_memory(module: nn.Module, purpose: str, *, prefix: str = "") -> None:
    """Refuse a module with ``memory_options`` (:func:`modes_in`) where steps are needed.

    Raises:
        ValueError: names the first one below ``prefix`` and its options.
    """
    for path, m in module.named_modules(prefix=prefix):
        if options := getattr(m, "memory_options", None):
            kind = type(m).__name__
            raise ValueError(
                (f"{path!r} ({kind})" if path else kind)
                + f" has no memory mode to {purpose}: set its {options} instead, or build the "
                "model from ReversibleSequence and ReversibleBlock"
            )


def _steps_at(module: nn.Module, path: str, mode: str, grid: Grid | None) -> list[Step]:
    """The steps of ``module`` at a path; raises a ValueError if ``mode`` needs some."""
    try:
        part = module.get_submodule(path)
    except AttributeError:
        paths = [name for name, _ in module.named_modules()]
        raise ValueError(
            f"the plan has a mode for {path!r}, but {kind_of(module)} has no such part: use "
            f"the plan for the model that it was made for{did_you_mean(path, paths)}"
        ) from None
    if isinstance(part, Step):
        part = part.subject  # steps inside a reversible block have its mode, as in any other step
    steps = [*all_steps(part).values()]
    if not steps:
        refuse_own_memory(part, f"set to {mode!r}", prefix=path)
        # a network without steps stores; a part of a step follows its step
        if part is module and mode == "store" and grid is None:
            return []
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
        step.close_checks = Step.close_checks
        step.growth = None
        # a step without inverse is recomputed from its inputs, which need no grid
        step.grid = grid if step.invertible else None


def _check_fit(mode: Mode, grid: Grid | None, steps: Sequence[Step]) -> None:
    """Raise a ValueError if a step cannot run in ``mode`` on ``grid``; None: the mode's grid."""
    grid = mode.grid if grid is None else grid
    if grid is None:
        for step in steps:
            if mode.inverts and step.needs_words:
                raise ValueError(_no_float_inverse(step, mode))
        return
    whole = isinstance(grid, int) and not isinstance(grid, bool)
    if grid != AUTO and not (whole and 0 <= int(grid) <= MAX_BITS):
        raise ValueError(
            f"grid={grid!r}: expected the number of fractional bits, 0 to {MAX_BITS} "
            f"({DEFAULT_BITS}: resolution 2**-{DEFAULT_BITS}, range +-{2 ** (30 - DEFAULT_BITS)}), "
            f"or {AUTO!r}: {DEFAULT_BITS}, fewer where the input is large"
        )
    for step in reversed(steps):  # reversed: name a member rather than its container
        if step.invertible and not step.exact:
            why = step.inexact or (
                "its class does not set exact = True (do so if it only moves values, and works on "
                "integers, too)"
            )
            raise ValueError(
                f"{name_of(step)} is not exact on fixed-point streams, since {why}: use 'invert' "
                "for it, or additive couplings, squeezes and permutations instead, which are exact"
            )
