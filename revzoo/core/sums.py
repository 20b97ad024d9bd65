"""Sums on fixed-point streams, as functions of autograd.

Each rounds a float value to the grid, adds it to the words of a stream, and returns the float
tensor of the sum, with its words: see NOTE [ Words and floats ] in
:mod:`revzoo.core.words`. The gradients ignore the rounding. Every gradient that flows
through a stream passes the node that computed the stream, so the backward pass reports the ranges
to the guard there.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from revzoo.core.guard import note_scale
from revzoo.core.invertible import Step
from revzoo.core.kernels import (
    EXTRA_BITS,
    Growth,
    Scale,
    add_and_read,
    for_samples_of,
    free_to_read,
    in_chunks,
    magnitudes,
    quantise,
    sample_count,
    with_sum,
)
from revzoo.core.words import (
    Fixed,
    Grid,
    counting_changes,
    fixed_of,
    read_with_words,
    set_words,
)


class _Begun(threading.local):
    scales: list[Scale] | None = None


_begun = _Begun()


@contextmanager
def begun_chains() -> Iterator[list[Scale]]:
    """Collects the scales of the chains that begin in the context."""
    outer, _begun.scales = _begun.scales, []
    try:
        yield _begun.scales
    finally:
        _begun.scales = outer


def collects_chains() -> bool:
    """Whether a caller checks the chains that begin here."""
    return _begun.scales is not None


def put_on_grid(state: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
    """Round the state to the grid of ``step`` and give it words, unless it has such words.

    The gradient of the rounding is the identity.
    """
    grid: Grid | None = step.grid
    assert grid is not None
    wide = any(t.dtype == torch.float64 for t in state)
    word_type = torch.int64 if wide else torch.int32
    fixed = [f for t in state if (f := fixed_of(t)) is not None and f.words.dtype == word_type]
    if len(fixed) == len(state) and _are_on(grid, fixed):
        return state
    bits = grid if isinstance(grid, int) else None
    # one scale for all if dimension 0 is not a batch
    count = sample_count(state)
    rows = [magnitudes(t, count) for t in state if t.numel()]
    sizes = functools.reduce(torch.maximum, rows) if rows else _filled(state, count, 0.0)
    growth = step.growth = step.growth or Growth()
    down = growth.units(sizes) if bits is None else _filled(state, count, 2.0**-bits)
    scale = Scale(down * 2.0**-EXTRA_BITS if wide else down, sizes, growth, word_type, bits)
    if _begun.scales is not None:
        _begun.scales.append(scale)
    return tuple(_rounded_to(t, scale, step, fits=bits is None) for t in state)


def _are_on(grid: Grid, fixed: Sequence[Fixed]) -> bool:
    if isinstance(grid, int):
        return all(f.scale.bits == grid for f in fixed)
    scale = fixed[0].scale
    # a chain that left its range goes on as a new one, on the adapted grid
    return scale.bits is None and scale.failure is None and all(f.scale is scale for f in fixed)


def _filled(state: tuple[Tensor, ...], count: int, value: float) -> Tensor:
    # float32 for any default dtype; filled on the device, without a transfer
    return state[0].new_full((count,), value, dtype=torch.float32)


class _Rounded(torch.autograd.Function):
    """``x`` -> the float tensor of its words; the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fixed: Fixed, step: Step | None) -> Tensor:
        ctx.scale, ctx.step = fixed.scale, step
        return read_with_words(fixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        note_scale(ctx.scale, ctx.step)
        return gradient, None, None


def _rounded_to(x: Tensor, scale: Scale, step: Step | None, *, fits: bool = False) -> Tensor:
    words = torch.empty_like(x, dtype=scale.word_type)
    fixed = Fixed(words, scale, x.dtype, bound=0.0)
    if x.numel():
        value = x.detach()
        peak = in_chunks(quantise, (value, words), scale.shaped(x.dim())[0])
        if not fits or free_to_read(value):
            fixed.measure(peak, 0.0, value, value, step)
        else:  # the scale was made for this input: only inputs of 1e36 do not fit
            fixed.down = torch.where(scale.sizes < scale.end, scale.down, math.nan)
    rounded: Tensor = _Rounded.apply(x, fixed, step)
    return rounded


def plus(
    fixed: Fixed, value: Tensor, dtype: torch.dtype, step: Step | None, *, sums: bool = False
) -> tuple[Tensor, Fixed]:
    """``fixed + value`` without recording: the float tensor of the sum, and the words, apart.

    If it ``sums``, it sets the checksum of ``fixed``.
    """
    words, scale = torch.empty_like(fixed.words), fixed.scale
    with counting_changes():
        total = torch.empty_like(words, dtype=dtype)
    summed = Fixed(words, scale, dtype, down=fixed.down, bound=0.0)
    if total.numel():
        tensors = fixed.words, value, words, total
        figures = scale.shaped(words.dim())[0], fixed.shaped_down()
        if sums:
            peak, fixed.checksum = with_sum(add_and_read, tensors, fixed.words, *figures)
        else:
            peak = in_chunks(add_and_read, tensors, *figures)
        left = summed.measure(peak, fixed.bound, total, value, step)
        if left is not None:
            total.masked_fill_(for_samples_of(left, total.dim()), math.nan)
    return total, summed


class _Sum(torch.autograd.Function):
    """``x + value`` on the words of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, fixed: Fixed, step: Step | None) -> Tensor:
        ctx.dtype, ctx.scale, ctx.step = value.dtype, fixed.scale, step
        total, words = plus(fixed, value, x.dtype, ctx.step)
        set_words(total, words)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        note_scale(ctx.scale, ctx.step)
        return gradient, gradient.to(ctx.dtype), None, None


def add(x: Tensor, value: Tensor, fixed: Fixed, step: Step | None = None) -> Tensor:
    """``x + value`` on the grid of ``x``, whose words are ``fixed``, in ``step``."""
    total: Tensor = _Sum.apply(x, value, fixed, step)
    return total


def put_on_grid_of(fixed: Fixed, x: Tensor, step: Step) -> Tensor:
    """``x`` on the grid and in the dtype of ``fixed``, with words; the gradient passes."""
    return _rounded_to(x.to(fixed.dtype), fixed.scale, step)


def read_for(fixed: Fixed, x: Tensor, step: Step) -> Tensor:
    """The float tensor of ``fixed``, with its words; its gradient goes to ``x``."""
    read: Tensor = _Rounded.apply(x, fixed, step)
    return read
