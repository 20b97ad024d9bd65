"""Rounding to a grid in floating point."""

from __future__ import annotations

from torch import Tensor


def round_to_grid(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded, half to even, to multiples of ``2**-bits``; same shape and dtype.

    The gradient passes through unchanged (straight-through). A narrow type keeps its own precision.
    """
    plain = x.detach()
    rounded = (plain * 2.0**bits).round_().mul_(2.0**-bits)
    # exact: x and its rounded value are within a factor of two, or one of them is zero
    return x + (rounded - plain)
