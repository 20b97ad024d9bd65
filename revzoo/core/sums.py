"""Sums on fixed-point streams, as functions of autograd.

Each rounds a float value to the grid, adds it to the words of a stream, and returns the float
tensor of the sum, with its words: see NOTE [ Words and floats ] in
:mod:`revzoo.core.fixedpoint.words`. The gradients ignore the rounding. Every gradient that flows
through a stream passes the node that computed the stream, so the backward pass reports the ranges
to the guard there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo.core.fixedpoint.bits import unpack_bits
from revzoo.core.fixedpoint.integer_kernels import (
    add_and_read,
    in_chunks,
    quantise,
    shift_in,
    shift_out,
    subtract_and_read,
)
from revzoo.core.fixedpoint.words import (
    DEFAULT_BITS,
    EXTRA_BITS,
    Amax,
    Fixed,
    Grid,
    Scale,
    amaxes_used_by,
    counting_changes,
    fixed_of,
    involves_half,
    largest,
    magnitude,
    read_with_words,
    set_words,
    span_of,
    within,
)
from revzoo.core.guard.drift import note_amaxes
from revzoo.core.invertible import Step

_EXPECTED_RANGE = 8.0  # inputs below this have DEFAULT_BITS
_LARGEST_RANGE = 2.0**116  # also for an infinite input: the end of the range must be a float32
# the fewest bits that grid="auto" chooses: each doubling of the input above 4 costs one
COARSEST_BITS = DEFAULT_BITS - int(math.log2(_LARGEST_RANGE / (_EXPECTED_RANGE / 2)))


def put_on_grid(state: tuple[Tensor, ...], grid: Grid) -> tuple[Tensor, ...]:
    """Round the state to one grid and give it words, unless it has words of that grid.

    The gradient of the rounding is the identity.
    """
    wide = any(t.dtype == torch.float64 for t in state)
    word_type = torch.int64 if wide else torch.int32
    fixed = [f for t in state if (f := fixed_of(t)) is not None and f.words.dtype == word_type]
    if len(fixed) == len(state) and _are_on(grid, fixed):
        return state
    bits = grid if isinstance(grid, int) else None
    down = _down_for(state) if bits is None else _scalar(state, 2.0**-bits)
    scale = Scale(down * 2.0**-EXTRA_BITS if wide else down, word_type, bits)
    return tuple(_rounded_to(t, scale) for t in state)


def _are_on(grid: Grid, fixed: Sequence[Fixed]) -> bool:
    if isinstance(grid, int):
        return all(f.scale.bits == grid for f in fixed)
    scale = fixed[0].scale
    return scale.bits is None and all(f.scale is scale for f in fixed)


def _down_for(state: tuple[Tensor, ...]) -> Tensor:
    """2**-DEFAULT_BITS or more, by the largest value (rule 5 of NOTE [ Words and floats ]).

    A power of two, so that products with it do not round.
    """
    sizes = [largest(t).float() for t in state if t.numel()]
    size = functools.reduce(torch.maximum, sizes) if sizes else _scalar(state, 0.0)
    size = size.clamp(_EXPECTED_RANGE / 2, _LARGEST_RANGE)
    # frexp instead of log2, which may round to the wrong power of two
    mantissa, _ = torch.frexp(size)  # in [0.5, 1), so that the quotient is a power of two
    return size / mantissa * (2.0**-DEFAULT_BITS / _EXPECTED_RANGE)


def _scalar(state: tuple[Tensor, ...], value: float) -> Tensor:
    # float32 for any default dtype; filled on the device, without a transfer
    return state[0].new_full((), value, dtype=torch.float32)


class _Rounded(torch.autograd.Function):
    """``x`` -> the float tensor of its words; the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fixed: Fixed) -> Tensor:
        ctx.amaxes = amaxes_used_by(fixed)
        return read_with_words(fixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        note_amaxes(ctx.amaxes)
        return gradient, None


def _rounded_to(x: Tensor, scale: Scale) -> Tensor:
    words = torch.empty_like(x, dtype=scale.word_type)
    in_chunks(quantise, (x.detach(), words), scale.up)
    amax = None
    if x.numel():
        span = span_of(x)
        amax = Amax(magnitude(span), span, scale, half=involves_half(x))
    rounded: Tensor = _Rounded.apply(x, Fixed(words, scale, x.dtype, amax))
    return rounded


def _summed(
    fill: Callable[..., None],
    fixed: Fixed,
    parts: tuple[Tensor, ...],
    dtype: torch.dtype,
    *options: Any,
    weight: int,
) -> tuple[Tensor, Fixed]:
    """Compute a sum; returns its float tensor, with words, and the words.

    Args:
        fill: computes the sum from ``parts`` into words and floats.
        fixed: the stream that is added to.
        parts: the summands; the value is the last one.
        dtype: of the float tensor.
        *options: passed to ``fill`` after the scales.
        weight: how many times the value counts in the amax.
    """
    value, words, scale = parts[-1], torch.empty_like(fixed.words), fixed.scale
    with counting_changes():
        total = torch.empty_like(words, dtype=dtype)
    summed = Fixed(words, scale, dtype)
    if value.numel():
        before = () if fixed.amax is None else (fixed.amax,)
        low, high = span_of(value)
        if weight != 1:
            low, high = weight * low.float(), weight * high.float()
        size = magnitude([low, high, *(end for amax in before for end in amax.after)])
        summed.amax = Amax(size, (), scale, half=involves_half(value, total), before=before)
        in_chunks(fill, (*parts, words, total), scale.up, summed.amax.down, *options)
        summed.amax.after = span_of(total)
    set_words(total, summed)
    return total, summed


class _Sum(torch.autograd.Function):
    """``x + sign * value`` on the words of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, fixed: Fixed, sign: int) -> Tensor:
        ctx.sign, ctx.dtype = sign, value.dtype
        fill = add_and_read if sign > 0 else subtract_and_read
        total, summed = _summed(fill, fixed, (fixed.words, value), x.dtype, weight=1)
        ctx.amaxes = amaxes_used_by(summed)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        note_amaxes(ctx.amaxes)
        return gradient, (gradient if ctx.sign > 0 else -gradient).to(ctx.dtype), None, None


def plus(fixed: Fixed, value: Tensor, dtype: torch.dtype, step: Step) -> tuple[Tensor, Fixed]:
    """``fixed + value`` without recording: the float tensor of the sum, and its words.

    Args:
        fixed: the words of a stream.
        value: of the same shape.
        dtype: of the float tensor.
        step: the step that adds.
    """
    with within(step):
        return _summed(add_and_read, fixed, (fixed.words, value), dtype, weight=1)


def add(x: Tensor, value: Tensor, fixed: Fixed, *, sign: int = 1) -> Tensor:
    """``x + sign * value``, rounded to the grid of ``x``, with words.

    Args:
        x: a stream.
        value: of the same shape.
        fixed: the words of ``x``.
        sign: 1 or -1.
    """
    total: Tensor = _Sum.apply(x, value, fixed, sign)
    return total


class _SecondDifference(torch.autograd.Function):
    """``(1 + b) value - 2 b x + b before`` on the words of ``before``."""

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, x: Tensor, value: Tensor, fixed: Fixed, bits: int
    ) -> Tensor:
        # the gradient ignores the rounding and the dropped bits
        ctx.b, ctx.dtype = 2.0**-bits, value.dtype
        # 2 b x is at most as large as the stream, so value and 2 b x count as two values
        parts = (fixed.words, x, value)
        total, summed = _summed(shift_in, fixed, parts, x.dtype, bits, weight=2)
        ctx.amaxes = amaxes_used_by(summed)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        note_amaxes(ctx.amaxes)
        b = ctx.b
        of_value = (gradient * (1 + b)).to(ctx.dtype)
        return gradient * b, gradient * (-2 * b), of_value, None, None


def second_difference(before: Tensor, x: Tensor, value: Tensor, fixed: Fixed, bits: int) -> Tensor:
    """``(1 + b) value - 2 b x + b before`` with ``b = 2**-bits``, with words.

    Args:
        before: a stream; the product with b drops the low ``bits`` of its words.
        x: the stream that ``value`` was computed from.
        value: of the same shape.
        fixed: the words of ``before``.
        bits: at least 1.
    """
    total: Tensor = _SecondDifference.apply(before, x, value, fixed, bits)
    return total


def undo_second_difference(
    total: Fixed, x: Tensor, value: Tensor, side: Tensor, bits: int
) -> Fixed:
    """Recover ``before``; ``side`` are the low bits of its words, from ``pack_bits``."""
    words = torch.empty_like(total.words)
    in_chunks(shift_out, (total.words, x, value, words), total.scale.up, bits)
    # the shift has left zeros in the low bits, where the dropped bits go
    words |= unpack_bits(side, words, bits)
    return total.with_words(words)


def put_on_grid_of(fixed: Fixed, x: Tensor) -> Tensor:
    """``x`` on the grid and in the dtype of ``fixed``, with words; the gradient passes."""
    return _rounded_to(x.to(fixed.dtype), fixed.scale)
