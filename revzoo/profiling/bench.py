"""Compares time and memory of training steps.

On a shared machine, only times measured close together are comparable. So every round runs all
candidates once, and ratios are computed within a round.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from revzoo.core.modes import set_memory
from revzoo.core.twins import images_for, in_training
from revzoo.profiling.audit import audit
from revzoo.profiling.clock import step_seconds
from revzoo.profiling.count import checked_shape
from revzoo.profiling.plan import PLANNED, Planner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one candidate."""

    name: str  # of the model
    memory: str  # its mode
    seconds: float  # median of a step
    ratio: float  # its time over the first candidate's, median over rounds
    low: float  # lower quartile of the ratio
    high: float  # upper quartile of the ratio
    images_per_second: float  # of the median step
    peak_bytes: int  # counted, see revzoo.audit


def bench(
    build: Callable[[], nn.Module],
    name: str,
    modes: Sequence[str],
    shape: Sequence[int],
    *,
    rounds: int = 5,
) -> list[Measured]:
    """Measure a model in several memory modes.

    Args:
        build: makes the model, with the same weights each time.
        name: the model's name in the results.
        modes: memory modes; the first is the base of the ratios.
        shape: of the batch.
        rounds: at least 2; every candidate runs once in each.

    Raises:
        ValueError: a mode is unknown or does not fit; the shape is not valid; too few rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds={rounds}: expected 2 or more, for a spread")
    shape = checked_shape(shape)
    candidates: dict[str, tuple[nn.Module, Tensor]] = {}
    peaks: dict[str, int] = {}
    for mode in dict.fromkeys(modes):
        model = in_training(build())
        planned = PLANNED.get(mode)
        if planned is None:
            set_memory(model, mode)
        elif planned.plans(model):
            # as in a run; a nominal processor gives the same plan in every benchmark
            planner = Planner(model, shape, clock=False)
            set_memory(model, planned.plan(planner))
        peaks[mode] = audit(model, shape, modes=[]).peak_bytes
        candidates[mode] = model, images_for(model, shape)
    log.debug("warming up")
    for candidate in candidates.values():
        step_seconds(*candidate)  # also allocates the gradients
    seconds: dict[str, list[float]] = {mode: [] for mode in candidates}
    for number in range(rounds):
        log.debug("round %d of %d", number + 1, rounds)
        for mode, candidate in candidates.items():
            seconds[mode].append(step_seconds(*candidate))
    return [_measured(name, mode, seconds, shape[0], peaks[mode]) for mode in candidates]


def _measured(
    name: str, mode: str, seconds: Mapping[str, Sequence[float]], batch: int, peak: int
) -> Measured:
    first = next(iter(seconds.values()))
    # by round: both times of a ratio were measured within the same seconds
    ratios = [time / base for time, base in zip(seconds[mode], first, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    median = statistics.median(seconds[mode])
    return Measured(name, mode, median, middle, low, high, batch / median, peak)
