"""Sets the memory mode of the steps of a module, for good or inside a ``with`` block."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from revzoo._checks import check_module, did_you_mean
from revzoo.core.fixedpoint.words import Grid, check_grid
from revzoo.core.invertible import Step, all_steps, is_container, kind_of, name_of, steps_in
from revzoo.core.modes import MODES, Mode, mode_of, no_float_inverse_message

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
        if isinstance(mode, str):
            each.check(module, steps)
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
    if grid is not None:
        _check_grid(grid, steps)
    elif mode.inverts:
        for step in steps:
            if step.needs_words:
                raise ValueError(no_float_inverse_message(step, mode.name))


def _check_grid(grid: Grid, steps: Sequence[Step]) -> None:
    check_grid(grid)
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
