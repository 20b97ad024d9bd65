"""Rounding to a grid in floating point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Round(torch.autograd.Function):
    """Round to multiples of ``1 / scale``; the gradient is the identity (straight-through)."""

    # transforms and forward-mode AD run the rounding, too
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return (x * scale).round_().mul_(1 / scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent


def round_to_grid(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded, half to even, to multiples of ``2**-bits``; same shape and dtype.

    The gradient passes through unchanged. A narrow type keeps its own precision.
    """
    rounded: Tensor = _Round.apply(x, 2.0**bits)
    return rounded
