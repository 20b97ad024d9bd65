"""Samples of streams for the guard: weighted sums and single values, at random places."""

from __future__ import annotations

import functools
import math
import random
from typing import NamedTuple

import torch
from torch import Tensor

from revzoo.core.fixedpoint.words import Fixed, Scale, Streams
from revzoo.core.tensors import has_values, values_of

# A random mask may change only one image of a batch. So we compare many values, as sums, which need
# little memory.
SUMS = 64  # compare at most this many sums of a stream
FEWEST_SUMS = 8  # fewest sums of a stream, unless it has fewer values
SUMMED = 64  # values in a sum; fewer in a small stream
OPERAND = 32  # values sampled of an operand, to know its size
PER_CHANNEL = 4  # values compared per channel
CHANNELS = 128  # compare at most this many channels of a stream; each training step picks others
VARIANTS = 4  # choices of places in channels, made in advance; each forward pass takes one
_ROW = 32  # torch's CPU kernels reduce rows of a multiple of this 2 to 20 times faster
_SMALLEST_CHANNEL = 4  # values; the spread of fewer means little

_draw = random.Random(0)  # draws places without using the caller's random numbers


def draw_places(seed: int) -> None:
    """Seed the choice of the places that the next forward passes sample.

    A resumed run then measures the same drift as a run without interruption.
    """
    _draw.seed(seed)


class _Channels(NamedTuple):
    """The sampled channels of a stream: dimension, number of channels, chosen indices."""

    dim: int
    size: int
    chosen: tuple[int, ...] | None  # None for all


class SamplePlan(NamedTuple):
    """The places of a stream to compare: sums, and single values of channels."""

    order: tuple[int, ...]  # dimensions, from the largest stride to the smallest
    summed: range  # indices of the values in the sums, with the dimensions in this order
    each: int  # values in a sum
    singles: Tensor | None = None  # indices: PER_CHANNEL of the first channel, then of the next
    channels: tuple[_Channels, ...] = ()  # in the order of ``singles``


# masks and indices; not bytes, in which kernels keep uninitialised workspaces
CHOICES = (torch.bool, torch.int32, torch.int64)

Sampled = tuple[Tensor | Fixed | None, ...]
"""The recomputed tensors that the forward pass sampled; None for one that no graph needs now."""


class Samples(NamedTuple):
    """Figures of a computed stream, and values of an operand, which show the size of rounding."""

    stream: int
    figures: Tensor  # see figures_of()
    operand: Tensor
    plan: SamplePlan
    scale: Scale | None = None  # of words


def sample(computed: Streams, known: Streams, *, channels: bool = True) -> list[Samples]:
    """Sample each stream, except streams that the step passes on unchanged.

    Args:
        computed: the streams that a replay recomputes.
        known: the streams that the replay starts from.
        channels: whether to compare each channel's error with the channel's spread.
    """
    # the drift is relative to the operand that is added, which sets the size of rounding errors
    operands = [
        values_of(t)
        for t in known
        if isinstance(t, Tensor)
        and t.dtype not in CHOICES  # nobody adds to these
        and _comparable(t)
        and not _among(t, computed)
    ]
    samples = []
    for i, t in enumerate(computed):
        if _among(t, known) or not _comparable(t):
            continue
        t = values_of(t) if isinstance(t, Tensor) else t
        operand, singles = None, None
        if isinstance(t, Tensor):
            # the operand of a sum has the stream's shape; without one, values were only moved
            operand = next((o for o in reversed(operands) if o.shape == t.shape), None)
            if channels and t.is_floating_point():
                singles = _draw.choice(_singles(t.shape, t.device))
        # a fixed-point stream must be equal bit for bit: rounding cannot lose a channel
        plan = SamplePlan(_order_of(t), *_draw_summed(_count(t)), *(singles or ()))
        figures = figures_of(t, plan)
        size = figures[:1]  # without an operand, any value of the stream
        if operand is not None:
            size = _values_at(operand.detach(), _spread(_count(operand), operand.device))
        scale = t.scale if isinstance(t, Fixed) else None
        samples.append(Samples(i, figures, size, plan, scale))
    return samples


def _among(t: Tensor | Fixed, state: Streams) -> bool:
    return any(t is other for other in state)


def _comparable(t: Tensor | Fixed) -> bool:
    if isinstance(t, Fixed):
        return has_values(t.words)
    t = values_of(t)
    values = t.is_floating_point() or t.is_complex() or t.dtype in CHOICES
    return values and t.layout is torch.strided and has_values(t)


def _count(t: Tensor | Fixed) -> int:
    """Number of values; a complex one counts as two, as view_as_real shows it."""
    count = t.shape.numel()
    return 2 * count if isinstance(t, Tensor) and t.is_complex() else count


def figures_of(t: Tensor | Fixed, plan: SamplePlan, scale: Scale | None = None) -> Tensor:
    """Single values of a stream, then its weighted sums; of a fixed-point stream, of its words."""
    values = t.words if isinstance(t, Fixed) else t.detach()
    places, each = plan.summed, plan.each
    ordered = values.permute(plan.order) if plan.order else values
    if ordered.is_contiguous() and not values.is_complex():  # a view takes less time than indices
        size = len(places) // each, each
        offset = ordered.storage_offset() + places.start
        rows = ordered.as_strided(size, (each * places.step, places.step), offset)
    else:  # complex, not dense, or the replay has another layout
        indices = torch.arange(places.start, places.stop, places.step, device=values.device)
        rows = _values_at(ordered, indices).view(-1, each)
    if scale is not None and isinstance(t, Tensor):  # a step that lost its words
        rows = rows.double() * scale.up
    # the weights have the wide type, so the products have it, too
    weighted = rows * weights_of(plan, rows.device, _wide(rows.dtype))
    # errors of random sign cancel in sums, not in single values
    singles = weighted[:, 0] if plan.singles is None else _values_at(values, plan.singles)
    return torch.cat((singles, weighted.sum(1)))


def _order_of(t: Tensor | Fixed) -> tuple[int, ...]:
    """The dimensions of a stream, from the largest stride to the smallest.

    Empty if the stream is contiguous, or complex, which is sampled by indices.
    """
    values = t.words if isinstance(t, Fixed) else t
    return () if values.is_contiguous() or values.is_complex() else _sorted_dims(values.stride())


@functools.lru_cache(maxsize=256)
def _sorted_dims(strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(strides)), key=strides.__getitem__, reverse=True))


@functools.cache
def _wide(dtype: torch.dtype) -> torch.dtype:
    """A type in which sums of values of this type do not overflow."""
    if dtype.is_floating_point:
        return torch.promote_types(dtype, torch.float32)
    return torch.float64 if dtype == torch.int64 else torch.int64


def weights_of(plan: SamplePlan, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Weights of the values in a sum, all different: values that swap places change the sum.

    Without singles the first is 1, so the weighted values hold the first values themselves.
    """
    return _weights(plan.each, plan.singles is None, device, dtype)


@functools.lru_cache(maxsize=256)
def _weights(each: int, first_is_one: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    weights = ((1 + _golden(SUMMED)) * SUMMED).long()[:each]
    if first_is_one:
        weights[0] = 1
    return weights.to(device, dtype)


def _values_at(t: Tensor, places: Tensor) -> Tensor:
    return torch.take(torch.view_as_real(t.resolve_conj()) if t.is_complex() else t, places)


def channel_ranges(t: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each channel."""
    rows = t.movedim(dim, -1)
    count = _ROW // math.gcd(_ROW, t.shape[dim])  # of pixels in a row
    if t.device.type == "cpu" and rows.is_contiguous() and rows.numel() % (_ROW * count) == 0:
        pixels = rows.view(-1, count, t.shape[dim])
        return pixels.amin(0).amin(0), pixels.amax(0).amax(0)
    others = [d for d in range(t.dim()) if d != dim]
    return t.amin(others), t.amax(others)


def _draw_summed(count: int) -> tuple[range, int]:
    """Indices spread evenly over ``count`` values, and how many of them make a sum."""
    stride = _stride(count)
    values = count // stride
    # few sums of a small stream: they would take memory beside it
    sums = min(max(-(-values // SUMMED), FEWEST_SUMS), values)
    each = values // sums
    total = sums * each
    start = _draw.randrange(count - (total - 1) * stride)
    return range(start, start + total * stride, stride), each


@functools.lru_cache(maxsize=256)
def _stride(count: int) -> int:
    """The smallest stride that leaves at most SUMS * SUMMED values and is coprime to ``count``."""
    stride = -(-count // (SUMS * SUMMED))
    # coprime: otherwise it may visit the same columns of every row
    while math.gcd(stride, count) != 1:
        stride += 1
    return stride


@functools.lru_cache(maxsize=256)
def _spread(count: int, device: torch.device) -> Tensor:
    """Indices of OPERAND elements spread over ``count``, equal for every layout."""
    # multiples of the golden ratio leave no large gap and repeat no row or column, unlike a stride
    return (_golden(OPERAND) * count).long().to(device)


@functools.lru_cache(maxsize=256)
def _singles(
    shape: torch.Size, device: torch.device
) -> list[tuple[Tensor, tuple[_Channels, ...]] | None]:
    """VARIANTS choices of places in channels, for streams of this shape; None without channels."""
    # tokens (B, N, C) and signals (B, C, L) look alike, so we sample both dims; images: dim 1
    dims = [d for d in ((1, 2) if len(shape) == 3 else (1,)) if d < len(shape)]
    dims = [d for d in dims if shape.numel() // shape[d] >= _SMALLEST_CHANNEL]
    if not dims:
        return [None]
    choices: list[tuple[Tensor, tuple[_Channels, ...]] | None] = []
    for variant in range(VARIANTS):
        parts = [_places_in_channels(shape, d, variant) for d in dims]
        places = torch.cat([places for places, _ in parts]).to(device)
        choices.append((places, tuple(channels for _, channels in parts)))
    return choices


def _places_in_channels(shape: torch.Size, dim: int, variant: int) -> tuple[Tensor, _Channels]:
    size, inner = shape[dim], shape[dim + 1 :].numel()
    chosen = torch.arange(size, device="cpu")
    if size > CHANNELS:
        # the guard must not draw from the caller's random numbers
        generator = torch.Generator("cpu").manual_seed(variant)
        chosen = torch.randperm(size, generator=generator, device="cpu")[:CHANNELS]
    golden = _golden(len(chosen) * PER_CHANNEL, variant / VARIANTS)
    rest = (golden * (shape.numel() // size)).long().view(-1, PER_CHANNEL)
    places = (rest // inner * size + chosen[:, None]) * inner + rest % inner
    subset = tuple(chosen.tolist()) if size > CHANNELS else None
    return places.flatten(), _Channels(dim, size, subset)


def _golden(count: int, start: float = 0) -> Tensor:
    """Numbers spread evenly over [0, 1); on the CPU, for any default device."""
    steps = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return (steps * ((math.sqrt(5) - 1) / 2) + start).frac()
