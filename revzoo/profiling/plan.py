"""The planner: a memory mode for each step, so that a training step is fast within a budget.

::

    plan = revzoo.plan_memory(model, (64, 3, 32, 32), budget=2**30)
    revzoo.set_memory(model, plan)

torch's ``torch._functorch.config.activation_memory_budget`` plans compiled graphs for a share of
the activations instead of bytes; ``torch.utils.checkpoint`` leaves the choice to the user. Both can
only recompute from kept tensors; here a step can also be inverted.

Known limits: we count neither the memory that a kernel frees before it returns nor the allocator's
waste. A step that the forward pass calls several times is stored only if all are. Steps inside
another step's branch get the mode of that step.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from revzoo._checks import check_choice, either
from revzoo.core.guard import SAMPLED
from revzoo.core.invertible import kind_of, steps_in
from revzoo.core.modes import (
    INVERTING,
    default_mode,
    in_table_order,
    mode_of,
    refuse_own_memory,
    set_memory,
)
from revzoo.core.twins import fake_twin, images_for
from revzoo.profiling.chain import Chain, Choice, Outcome, chain_of, fastest, leanest
from revzoo.profiling.clock import speed
from revzoo.profiling.count import (
    Trace,
    checked_arguments,
    modes_on,
    trace_step,
    uncounted_in,
    undisturbed,
)
from revzoo.profiling.stages import stages_of
from revzoo.profiling.units import bytes_from, in_one_unit, in_units, peak_note

log = logging.getLogger(__name__)

_RANDOM_STATES = 2**13
"""Bytes of random states and small tensors that a step may keep."""

_COUNTED = 8
"""The search for one budget counts at most this many plans."""

_GUESSES = 8
"""How many numbers :func:`largest` tries before it bisects."""

SLACK = 1.02
"""The largest peak of ``balanced``, as a multiple of the inverting mode's peak."""


class BudgetError(ValueError):
    """The budget is below the peak of every plan."""


@dataclass(frozen=True, eq=False)
class Plan(Mapping[str, str]):
    """A memory mode for each step; as a mapping, step path to mode."""

    modes: dict[str, str]
    """Step path to mode, as plain data; :func:`revzoo.set_memory` takes it, too."""
    peak_bytes: int
    """Largest number of bytes alive at once in a training step: parameters, gradients, input,
    activations and ``extra``."""
    seconds: float
    """Predicted time of forward and backward pass."""
    budget: int
    """The budget of the plan, in bytes."""
    inverting: str | None = None
    """The mode in which steps with an inverse could be inverted; None if no step has one."""
    uncounted: tuple[str, ...] = ()
    """Users of memory that the peak does not count, and why; usually empty."""
    extra: int = 0
    """Bytes in the peak for an optimiser's state and copies of the weights."""

    def __getitem__(self, path: str) -> str:
        return self.modes[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self.modes)

    def __len__(self) -> int:
        return len(self.modes)

    def __str__(self) -> str:
        stages: dict[str, dict[str, str]] = {}
        for path, stage in stages_of([*filter(None, self.modes)]).items():
            # with dots: a stage "t" is not part of "net"
            rest = f".{path}".partition(f".{stage}.")[2]
            stages.setdefault(stage, {})[rest] = self.modes[path]
        width = max(map(len, stages), default=0)
        sized = in_one_unit(max(self.peak_bytes, self.budget))
        lines = [peak_note(self.extra, sized)]
        for stage, modes in stages.items():
            lines.append(f"{stage:{width}}  {count_modes(list(modes.values()))}")
            if len({*modes.values()}) > 1:
                margin = " " * (width + 2)
                runs = "; ".join(_runs(modes))
                lines += textwrap.wrap(runs, 79, initial_indent=margin, subsequent_indent=margin)
        lines.append(
            f"peak {sized(self.peak_bytes)} of {sized(self.budget)}, "
            f"{self.seconds:.3g} s a step"
            + (f"; inverting mode: {self.inverting}" if self.inverting else "")
        )
        for note in self.uncounted:
            lines += textwrap.wrap(f"not counted: {note}", 79, subsequent_indent="    ")
        return "\n".join(lines)


def _runs(modes: Mapping[str, str]) -> Iterator[str]:
    """The runs of steps in one mode: ``steps.0 to steps.3: exact``."""
    for mode, run in itertools.groupby(modes, modes.__getitem__):
        first, *_, last = [*run] * 2
        yield f"{first}{f' to {last}' * (first != last)}: {mode}"


def count_modes(modes: Sequence[str]) -> str:
    """The number of steps in each mode: ``6 store, 12 exact``."""
    return ", ".join(f"{modes.count(mode)} {mode}" for mode in in_table_order(modes))


class Planner:
    """Plans for one model and one shape of input. Counts training steps first.

    If the model's parameters change, make a new planner. The arguments and errors are those of
    :func:`plan_memory`; ``device`` is the device of the training, None for the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        input_shape: Sequence[int],
        *,
        inverting: str | None = None,
        clock: bool = True,
        extra: int | str = 0,
        device: torch.device | None = None,
    ) -> None:
        self.model = model
        self.shape, self.extra = checked_arguments(model, input_shape, extra)
        self.inverting = inverting or inverting_mode(model)
        check_choice("inverting", self.inverting, INVERTING)
        self._called: list[str] | None = None  # the steps that the last forward pass called
        with undisturbed(model):
            # for all counted steps: a copy takes about a third of the time of a counted step
            self._twin = fake_twin(model, device)
            self._images = images_for(self._twin, self.shape)
            self.modes = self._modes()
            store, other = self._step_in("store"), self._step_in(self.modes[-1])
            if other.base != store.base:
                # the first pass left tensors in the model, such as features: count a later one
                store = self._step_in("store")
            # the others only if store does not fit: a count takes as long as a few steps
            self._traces = {"store": store, self.modes[-1]: other}
            if not (calls := store.named_calls()):
                raise ValueError(
                    f"the forward pass of {type(model).__name__} calls none of its "
                    f"{len(steps_in(model))} steps, so there is nothing to plan: expected a call "
                    "such as self.steps(x), not self.steps.forward(x)"
                )
            # bytes that fake tensors do not show: the guard keeps a sample of each stream in either
            # pass, and replays update copies of a norm's statistics
            widths = sum(t.dtype.itemsize for _, call in calls for t in call.layout)
            norms = (m for m in model.modules() if isinstance(m, _NormBase))
            self.reserve = _RANDOM_STATES * len(calls) + 2 * SAMPLED * widths
            self.reserve += sum(t.nbytes for m in norms for t in m.buffers())
            self._speed = speed(self._images) if clock else 1.0

    def _modes(self) -> tuple[str, ...]:
        """The modes that a plan may choose, ``store`` first, an inverting mode last."""
        steps = steps_in(self._twin).values()
        if not steps:
            refuse_own_memory(self._twin, "plan")
            raise ValueError(
                f"{kind_of(self._twin)} has no step to plan: make its blocks reversible, "
                "revzoo.make_reversible(model) or --bits 4, or build it from ReversibleSequence, "
                "ReversibleBlock or your own Step"
            )
        modes = modes_on(p.device for p in self._twin.parameters())
        modes = [name for name in modes if not mode_of(name).inverts]
        return (*modes, *[self.inverting] * any(step.invertible for step in steps))

    def _trace(self, mode: str) -> Trace:
        """A training step with every step in this mode, counted once."""
        if mode not in self._traces:
            self._traces[mode] = self._step_in(mode)
        return self._traces[mode]

    @functools.cached_property
    def chain(self) -> Chain:
        """The steps of the model, with their bytes and nanoseconds in each mode."""
        chain = chain_of([self._trace(mode) for mode in self.modes])
        return replace(chain, base=chain.base + self.extra)

    @functools.cached_property
    def leanest(self) -> Plan:
        """The plan with the lowest peak."""
        return self._counted(leanest(self.chain), 0)

    @property
    def least(self) -> int:
        """The smallest possible budget, in bytes."""
        return self.leanest.peak_bytes + self.reserve

    def plan(self, budget: int | str) -> Plan:
        """The fastest plan within ``budget`` bytes.

        Raises:
            BudgetError: no plan fits; the message suggests a smaller batch or images.
            ValueError: the budget is not a number of bytes.
        """
        limit = bytes_from(budget)
        room = goal = limit - self.reserve
        store = self._pure("store")
        if store.peak <= goal:  # nothing is faster
            modes = dict.fromkeys(self._called or (), "store")
            return self._planned(modes, self._trace("store"), store, limit)
        # The chain predicts the peak of mixed modes only roughly, so we count each plan and, if it
        # exceeds the goal, search again with less room.
        for _ in range(_COUNTED):
            choices = fastest(self.chain, room)
            if choices is None:
                break
            plan = self._counted(choices, limit)
            if plan.peak_bytes <= goal:
                return plan
            room -= plan.peak_bytes - goal
        if limit < self.least:
            raise BudgetError(self._too_small(limit))
        return replace(self.leanest, budget=limit)

    def within(self, budget: int) -> tuple[Plan, str]:
        """The fastest plan within ``budget`` bytes; if there is none, the leanest, and why."""
        try:
            return self.plan(budget), ""
        except BudgetError as error:
            return replace(self.leanest, budget=budget), str(error)

    def balanced(self) -> Plan:
        """The fastest plan whose peak is at most :data:`SLACK` times the inverting mode's.

        The leanest plan if there is none.
        """
        least = self.pure(self.inverting) or self.pure("recompute")
        assert least is not None
        # even the leanest plan may peak higher than the chain predicted
        return self.within(int(SLACK * least.peak) + self.reserve)[0]

    def pure(self, mode: str) -> Outcome | None:
        """Peak and nanoseconds with every step in one mode; None if the mode does not fit.

        The inverting modes recompute steps without an inverse.
        """
        if mode in self.modes:
            return self._pure(mode)
        if mode in INVERTING and self.inverting in self.modes:
            with contextlib.suppress(ValueError):  # it does not fit every step
                return self._pure(mode)
        return None

    def _pure(self, mode: str) -> Outcome:
        return self._outcome(self._trace(mode))

    def _outcome(self, trace: Trace) -> Outcome:
        chain = chain_of([trace])  # with the steps that the trace left out
        count = chain.outcome([link.choices[0] for link in chain.links])
        return Outcome(count.peak + self.extra, int(self._speed * count.cost))

    def pures(self) -> dict[str, Outcome]:
        """:meth:`pure` of each mode that fits, by mode."""
        outcomes = {mode: self.pure(mode) for mode in in_table_order((*self.modes, *INVERTING))}
        return {mode: outcome for mode, outcome in outcomes.items() if outcome is not None}

    def frontier(self, points: int = 20) -> list[Plan]:
        """Plans at increasing budgets, from the smallest possible to ``store`` for every step."""
        low = self.least
        high = max(low, self._pure("store").peak + self.reserve)
        intervals = max(1, points - 1)
        return [self.plan(low + (high - low) * k // intervals) for k in range(points)]

    def _counted(self, choices: Sequence[Choice], budget: int) -> Plan:
        """The plan; its peak is counted in a fake training step in these modes."""
        pairs = zip(self.chain.links, choices, strict=True)
        modes = {link.name: choice.mode for link, choice in pairs if link.name is not None}
        trace = self._step_in(modes)
        cost = int(self._speed * sum(choice.cost for choice in choices))
        return self._planned(modes, trace, Outcome(self._outcome(trace).peak, cost), budget)

    def _planned(self, modes: dict[str, str], trace: Trace, count: Outcome, budget: int) -> Plan:
        inverting = self.inverting if self.inverting in self.modes else None
        notes = (*uncounted_in(self.model), *trace.uncounted)
        return Plan(modes, count.peak, count.cost / 1e9, budget, inverting, notes, self.extra)

    def _step_in(self, modes: str | Mapping[str, str]) -> Trace:
        """Count a training step in these modes."""
        log.debug("counting a training step in %s", modes if isinstance(modes, str) else "a plan")
        with undisturbed(self.model):
            set_memory(self._twin, modes)
            trace = trace_step(self._twin, self._images, shortens=True)
        called = [name for name, _ in trace.named_calls()]
        if called != self._called and self._called is not None:
            raise ValueError(
                f"the forward pass of {type(self.model).__name__} does not call the same steps "
                "each time: expected the same calls in every pass. Set the memory modes by hand, "
                "as with revzoo.set_memory(model, 'recompute')"
            )
        self._called = called
        return trace

    def _too_small(self, limit: int) -> str:
        need, fixed = self.least, self.chain.base
        unit = " (with a unit, such as 500MiB)" if limit < 2**20 else ""
        sized = in_one_unit(need)
        shown = in_units(limit) if unit else sized(limit)
        remedies = [f"a larger budget{unit}", "a smaller model"]
        # the share of the activations that fits; they grow with the number of images
        fits = int(self.shape[0] * (limit - fixed) / max(1, need - fixed))
        if fits > 0:
            remedies.insert(1, f"a batch of about {fits}")
        extra = ", input, the optimiser's state and other copies" if self.extra else " and input"
        return (
            f"budget={shown} is less than any plan needs: at least {sized(need)} for "
            f"an input of {'x'.join(map(str, self.shape))}. Of these, {sized(fixed)} are "
            f"parameters, gradients{extra}, and {sized(self.reserve)} a reserve for random "
            f"states, statistics and the guard; use {either(remedies)}"
        )


def plan_memory(
    model: nn.Module,
    input_shape: Sequence[int],
    budget: int | str,
    *,
    inverting: str | None = None,
    clock: bool = True,
    extra: int | str = 0,
) -> Plan:
    """The fastest assignment of memory modes to steps whose peak is at most ``budget`` bytes.

    Neither runs nor changes the model: memory and work are counted on fake tensors, and a small
    network is timed. If training uses autocast, call this under autocast.

    Args:
        model: a module that holds steps and takes one floating-point tensor, also on the meta
            device. Wrap one with other inputs in a module that makes them from such a tensor.
        input_shape: of the batch, e.g. ``(64, 3, 32, 32)``.
        budget: bytes, or a string such as ``"4GiB"``, for parameters, gradients, input, activations
            and ``extra``.
        inverting: the mode for steps that have an inverse: ``invert``, which is faster, or
            ``exact``, which is free of drift; None for the current inverting mode of the model's
            steps; if none inverts, ``exact`` if it fits all of them, otherwise ``invert``.
        clock: measure the speed of this machine for ``plan.seconds``. False: assume a nominal
            processor. The modes are the same.
        extra: bytes to add, such as an optimiser's state; a number, or a string as for a budget.

    Returns:
        A plan for :func:`revzoo.set_memory`.

    Raises:
        BudgetError: a ValueError; no plan fits. The message gives the smallest budget and remedies.
        TypeError: the model is not a module, or is TorchScript.
        ValueError: the model has or calls no step, or nothing in it requires gradient; the shape,
            the budget or ``extra`` is not valid; ``inverting`` is unknown or does not fit; a layer
            is lazy, or a tensor sparse.

    Example:
        >>> model = revzoo.create_model("revnet38")
        >>> plan = revzoo.plan_memory(model, (64, 3, 32, 32), budget="200MiB", clock=False)
        >>> revzoo.set_memory(model, plan)
        >>> plan.peak_bytes <= 200 * 2**20
        True
    """
    bytes_from(budget)  # raises before the planner spends seconds
    planner = Planner(model, input_shape, inverting=inverting, clock=clock, extra=extra)
    return planner.plan(budget)


class PlannedMode:
    """A value of ``memory.mode`` for which a run plans each step's mode; this is ``balanced``.

    To add one, write a subclass and add it to :data:`PLANNED`.
    """

    name = "balanced"
    fills_device = False
    """Whether its budget is the memory that the device has free."""
    bounded = False
    """Whether it respects ``memory.bytes``; then a run that cannot be planned cannot start."""

    def plans(self, model: nn.Module) -> bool:
        """Whether it plans this model; if not, a run keeps the model's default mode."""
        # without an inverse, the default mode is the fastest
        return self.bounded or mode_of(getattr(model, "default_memory", "store")).inverts

    def plan(self, planner: Planner, budget: Any = None) -> Plan:
        """The plan of a run; ``budget`` is in bytes, for modes that have one."""
        return planner.balanced()


class _Auto(PlannedMode):
    name = "auto"
    fills_device = True

    def plans(self, model: nn.Module) -> bool:
        return bool(steps_in(model))

    def plan(self, planner: Planner, budget: Any = None) -> Plan:
        if budget is None:  # the system does not say what is free
            return planner.balanced()
        plan, reason = planner.within(bytes_from(budget))
        if reason:
            log.warning("memory=auto uses the leanest plan: %s", reason)
        return plan


class _Budget(PlannedMode):
    name = "budget"
    bounded = True

    def plan(self, planner: Planner, budget: Any = None) -> Plan:
        return planner.plan(budget)


PLANNED: Mapping[str, PlannedMode] = {
    mode.name: mode for mode in (_Auto(), PlannedMode(), _Budget())
}


def inverting_mode(model: nn.Module) -> str:
    """The current inverting mode of ``model``'s steps; if none inverts, ``exact`` if it fits."""
    steps = [*steps_in(model).values()]
    present = (step.memory for step in steps if mode_of(step.memory).inverts)
    return next(present, default_mode(steps))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of an optimiser's state after a step.

    Args:
        optimizer: of parameters on the meta device, so that it allocates nothing.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.empty_like(p)
    optimizer.step()  # optimisers create their state in the first step
    kept = (value for state in optimizer.state.values() for value in state.values())
    return sum(t.nbytes for t in kept if isinstance(t, torch.Tensor))


def largest(
    need: Callable[[int], int | None], budget: int, *, start: int, power: int = 1, most: int = 2**20
) -> int | None:
    """The largest integer whose ``need`` is at most ``budget``.

    We assume that the need is linear in ``number ** power``. The next guess is where the line
    through the last two needs reaches the budget; the first line starts at zero. After ``_GUESSES``
    guesses we bisect. For an impossible number we take the need of the next smaller possible one.

    Args:
        need: bytes for a number, increasing; None for an impossible number. A call takes seconds.
        budget: bytes.
        start: the first guess.
        power: 1 for a batch, 2 for the side of an image.
        most: the largest number to try.

    Returns:
        None if not even the smallest possible number fits.
    """
    low, high = 0, most + 1  # low fits, high does not
    best: int | None = None
    guess, last = start, (0, 0)
    for tries in itertools.count(1):
        guess = min(max(guess, low + 1), high - 1)
        needs = ((n, need(n)) for n in range(guess, low, -1))
        at, size = next(((n, size) for n, size in needs if size is not None), (guess, 0))
        if size <= budget:
            low = guess  # the numbers between them are impossible
            best = at if size else best
        else:
            high = at
        if high - low <= 1:
            break
        run, rise = at**power - last[0] ** power, size - last[1]
        if size and run * rise > 0 and tries < _GUESSES:
            fits = at**power + (budget - size) * run / rise
            guess = int(max(0, fits) ** (1 / power))
        else:
            guess = (low + high) // 2 if high <= most else 2 * low
        last = (at, size) if size else last
    return best
