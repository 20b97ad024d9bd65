"""Learning-rate schedules as dataclasses that build torch's schedulers.

Torch counts in steps, a recipe in fractions of a run. Schedulers advance after every optimiser
step, so a recipe does not depend on the size of the data set.

* ``step``: multiply at fixed fractions of the run. RevNet (Gomez et al. 2017, arXiv 1707.04585)
  divides by 10 at 40k and 60k of 80k steps, that is at 1/2 and 3/4.
* ``onecycle``: rise, then anneal (Smith and Topin 2017, arXiv 1708.07120).
* ``cosine``: linear warm-up, then half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983).
* ``constant``: for debugging.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

from revzoo._checks import build_dataclass, check_choice, check_number


class Schedule(ABC):
    """A recipe's learning rate, independent of the length of the run."""

    @abstractmethod
    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        """Torch's scheduler for a run of ``total_steps`` optimiser steps."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule(Schedule):
    """Multiply the rate by ``gamma`` at each of ``milestones`` (fractions of the run)."""

    milestones: Sequence[float] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            check_number("optim.schedule.milestones", milestone, high=1, open_low=True)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(
                f"optim.schedule.milestones={list(self.milestones)}: expected fractions of the "
                "run in rising order, such as [0.5, 0.75]"
            )
        check_number("optim.schedule.gamma", self.gamma, high=1, open_low=True)

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # at least 1: a milestone at step 0 would lower the first rate
        steps = [max(1, round(milestone * total_steps)) for milestone in self.milestones]
        return MultiStepLR(optimizer, milestones=steps, gamma=self.gamma)


@dataclass(frozen=True, kw_only=True)
class OneCycleSchedule(Schedule):
    """Rise from ``lr * start`` to ``lr`` in the fraction ``warmup`` of the run, then anneal."""

    warmup: float = 0.25
    start: float = 0.04
    end: float = 1e-5
    anneal: str = "cos"

    def __post_init__(self) -> None:
        check_number("optim.schedule.warmup", self.warmup, high=1, open_low=True, open_high=True)
        check_number("optim.schedule.start", self.start, high=1, open_low=True)
        check_number("optim.schedule.end", self.end, high=1, open_low=True)
        check_choice("optim.schedule.anneal", self.anneal, ("cos", "linear"))

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # torch divides by warmup * total_steps - 1, so a warm-up of one step is impossible
        rises = self.warmup * total_steps > 1
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=self.warmup if rises else 0.0,
            # torch's factors divide; ours multiply
            div_factor=1 / self.start,
            final_div_factor=self.start / self.end,
            anneal_strategy=self.anneal,  # type: ignore[arg-type]  # checked in __post_init__
            cycle_momentum=False,  # keep the recipe's momentum
        )


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(Schedule):
    """Linear rise in the fraction ``warmup`` of the run, then half a cosine to ``lr * end``."""

    warmup: float = 0.05
    end: float = 0.0

    def __post_init__(self) -> None:
        check_number("optim.schedule.warmup", self.warmup, high=1, open_high=True)
        check_number("optim.schedule.end", self.end, high=1)

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        rise = round(self.warmup * total_steps)
        # at least 1: the scheduler also computes the rate after the last step
        fall = max(1, total_steps - rise)

        def factor(step: int) -> float:
            if step < rise:
                # above 0 at the first step, which would otherwise change nothing
                return (step + 1) / (rise + 1)
            cosine = math.cos(math.pi * min(1.0, (step - rise) / fall))
            return self.end + (1 - self.end) * (1 + cosine) / 2

        # not CosineAnnealingLR, whose floor is one rate for all groups
        return LambdaLR(optimizer, factor)


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Schedule):
    """Keep the learning rate."""

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # a scheduler without effect, so that all recipes log and save one
        return ConstantLR(optimizer, factor=1.0, total_iters=0)


SCHEDULES: dict[str, type[Schedule]] = {
    "step": StepSchedule,
    "onecycle": OneCycleSchedule,
    "cosine": CosineSchedule,
    "constant": ConstantSchedule,
}


def make_schedule(spec: Mapping[str, Any]) -> Schedule:
    """The schedule that ``{"name": ..., **options}`` describes.

    Raises:
        ValueError: for an unknown name or option, naming the nearest valid one.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(
            f'optim.schedule={spec!r}: expected a mapping such as {{"name": "onecycle"}}'
        )
    options = dict(spec)
    name = options.pop("name", None)
    check_choice("optim.schedule.name", name, sorted(SCHEDULES))
    return build_dataclass(SCHEDULES[str(name)], options, where="optim.schedule")
