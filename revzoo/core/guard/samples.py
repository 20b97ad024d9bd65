"""Samples of streams for the guard: single values, spread evenly over the stream; their errors."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from revzoo.core.fixedpoint.words import Streams
from revzoo.core.tensors import has_values, values_of

# A random mask may change one image of a batch, so each image needs some values. More of them would
# cost memory: the tape keeps a sample of each stream.
SAMPLED = 128  # values of a stream
_SMALLEST_CHANNEL = 4  # values; the spread of fewer means little

# masks and indices; not bytes, in which kernels keep uninitialised workspaces
CHOICES = (torch.bool, torch.int32, torch.int64)


class Sample(NamedTuple):
    """Values of one stream of a state."""

    stream: int
    values: Tensor


def sample(computed: Streams, known: Streams) -> list[Sample]:
    """Sample the streams that a replay computes, except those that it knows.

    Leaves out fixed-point streams, whose words are summed, and tensors without values to compare.
    """
    changed = [
        (i, t)
        for i, t in enumerate(computed)
        if isinstance(t, Tensor) and not any(t is other for other in known)
    ]
    return [Sample(i, values) for i, t in changed if (values := sample_of(t)) is not None]


def sample_of(t: Tensor) -> Tensor | None:
    """Sampled values of one stream; None if it has no values to compare."""
    return values_in(t) if _comparable(t) else None


def _comparable(t: Tensor) -> bool:
    t = _plain(t)
    values = t.is_floating_point() or t.is_complex() or t.dtype in CHOICES
    return values and t.layout is torch.strided and has_values(t)


def _plain(t: Tensor) -> Tensor:
    return t if type(t) is Tensor else values_of(t)


def values_in(t: Tensor) -> Tensor:
    """The sampled values of a stream, in the same places for every layout."""
    t = _plain(t)
    if t.requires_grad:
        t = t.detach()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return torch.take(t, _places(t.numel(), t.device))


@functools.lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    # One in each of equal parts, at random: a stride would visit the same rows, columns or channels
    # of every image. The guard must not draw from the caller's random numbers.
    size = min(count, SAMPLED)
    parts = torch.arange(size, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    within = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return ((parts + within) * (count / size)).long().clamp_max(count - 1).to(device)


def spread_of_channels(t: Tensor) -> Tensor | None:
    """For each sampled value, the range of values of its channel; None if there are no channels.

    Infinity for a channel of equal values: only a constant can be added to it, which no norm
    amplifies.
    """
    t = _plain(t).detach()
    if not t.is_floating_point():
        return None
    # tokens (B, N, C) and signals (B, C, L) look alike, so we take both dims; images: dim 1
    dims = [d for d in ((1, 2) if t.dim() == 3 else (1,)) if d < t.dim()]
    spreads = []
    for d in dims:
        if t.numel() // t.shape[d] >= _SMALLEST_CHANNEL:
            others = [other for other in range(t.dim()) if other != d]
            spread = t.amax(others).float() - t.amin(others).float()
            spread = torch.where(spread > 0, spread, math.inf)
            channel = _places(t.numel(), t.device) // t.shape[d + 1 :].numel() % t.shape[d]
            spreads.append(spread[channel])
    return functools.reduce(torch.minimum, spreads) if spreads else None


def operand_of(t: Tensor, computed: Streams, known: Streams) -> Tensor | None:
    """The stream in ``known`` from which a replay computed ``t``; None if it cannot be told.

    Its size is that of the rounding errors, if ``t`` is smaller: in ``x = y - F(z)``, it is y.
    """
    passed_on = set(map(id, computed))
    for other in reversed(known):
        if (
            isinstance(other, Tensor)
            and id(other) not in passed_on
            and other.shape == t.shape
            and other.is_floating_point() == t.is_floating_point()
            and other.is_complex() == t.is_complex()
        ):
            return other
    return None


@dataclass(slots=True, eq=False)
class Comparison:
    """Sampled values of one reconstructed stream, to compare with the forward pass's.

    Attributes:
        stream: its index in the state.
        expected: the values in the forward pass.
        actual: the values now.
        operand: values of the stream from which it was computed.
        spread: of the channel of each value; None if it is not checked.
        used: whether a replay has read the stream.
        overflowed: whether the chain ended in values that are not finite.
        drift: the largest error, relative to the largest value of stream and operand.
        lost: the largest error relative to ``spread``.
    """

    stream: int
    expected: Tensor
    actual: Tensor
    operand: Tensor
    spread: Tensor | None = None
    used: bool = False
    overflowed: bool = False
    drift: float = 0.0
    lost: float = 0.0


def measure(comparisons: Sequence[Comparison]) -> None:
    """Set ``drift`` and ``lost`` of each comparison (host sync)."""
    groups: dict[tuple[object, ...], list[Comparison]] = {}
    for c in comparisons:
        t = c.actual
        key = t.device, t.shape, t.dtype, c.expected.dtype, c.spread is None
        groups.setdefault(key, []).append(c)
    # one stack for all streams of one kind: a transfer for each would stall the device each time
    for alike in groups.values():
        _measure(alike)


def _measure(comparisons: list[Comparison]) -> None:
    # in place, since the stacks of a deep network may take more memory than its streams
    expected = _stack([c.expected for c in comparisons])
    difference = _stack([c.actual for c in comparisons]).sub_(expected).abs_()
    figures = [difference.amax(1), expected.abs_().amax(1)]
    if spreads := [c.spread for c in comparisons if c.spread is not None]:
        figures.append(difference.div_(_stack(spreads)).amax(1))
    del expected, difference
    # not relative to each value: rounding errors have the size of the largest summand
    figures[1] = figures[1].maximum(_stack([c.operand for c in comparisons]).abs_().amax(1))
    for c, values in zip(comparisons, torch.stack(figures, 1).tolist(), strict=True):
        error, size, *lost = values if all(map(math.isfinite, values)) else _where_finite(c)
        c.drift, c.lost = error / max(size, sys.float_info.min), sum(lost)


def _where_finite(c: Comparison) -> list[float]:
    """Error, size and loss of a comparison in which some values are not finite."""
    expected, actual, operand = (t.cpu().double() for t in (c.expected, c.actual, c.operand))
    # infinite in the forward pass already, or lost behind an overflow: nothing to compare
    compared = expected.isfinite()
    if c.overflowed:
        compared &= actual.isfinite()
    difference = torch.where(compared, (actual - expected).abs(), 0)
    difference = torch.where(difference.isnan(), math.inf, difference)
    size = torch.cat((expected, operand)).nan_to_num(0, 0, 0).abs().amax()
    figures = [difference.amax(), size]
    if c.spread is not None:
        figures.append((difference / c.spread.cpu()).nan_to_num(0, math.inf).amax())
    return [float(t) for t in figures]


def _stack(tensors: list[Tensor]) -> Tensor:
    stacked = torch.stack(tensors)
    # float32 would round integers
    floats = torch.float32 if stacked.is_floating_point() else torch.float64
    return stacked.to(torch.promote_types(stacked.dtype, floats))
