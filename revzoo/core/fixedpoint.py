"""Fixed-point streams: sums without rounding, hence reconstructions without error.

Floating-point addition rounds, so ``(x + v) - v`` is not ``x`` and a deep network reconstructs its
input with an error that grows on the way. On the grid of multiples of ``2**-bits``, all sums below
``2**(mantissa - bits)`` are exact (mantissa: 24 bits of float32, 53 of float64). With the input
and every branch value rounded to the grid, ``(x + v) - v == x`` bit for bit at any depth. Gomez et
al. 2017 (arXiv 1707.04585, section 3.2) suggest fixed point; the argument comes from exactly
reversible learning in Maclaurin et al. 2015 (arXiv 1502.03492), without its information buffer,
which additions do not need.

The price is a rounding of each branch value to ``2**-bits``. The default of 14 bits leaves float32
streams a range of +-1024 and a resolution of 6e-5, sixty times finer than bfloat16 at 1.

torch's own quantisation (``fake_quantize``) clamps silently and saves a mask for the backward pass;
here leaving the range is an error, and nothing is saved.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from revzoo.core.invertible import State
from revzoo.core.layout import has_values
from revzoo.core.replay import version_of

DEFAULT_BITS = 14
_MANTISSA = {torch.float32: 24, torch.float64: 53}
WITH_GRID = frozenset(_MANTISSA)


class _Round(torch.autograd.Function):
    """Round to multiples of ``1 / scale``; the gradient is the identity (straight-through)."""

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

    The gradient passes through unchanged.
    """
    rounded: Tensor = _Round.apply(x, 2.0**bits)
    return rounded


def round_to_grid_(x: Tensor, bits: int) -> Tensor:
    """As :func:`round_to_grid`, in place and without gradient."""
    return x.mul_(2.0**bits).round_().mul_(2.0**-bits)


def range_of(dtype: torch.dtype, bits: int) -> float:
    """Sums of grid values of smaller magnitude are exact.

    Raises:
        ValueError: no grid in ``dtype``: its mantissa is too short.
    """
    if dtype not in _MANTISSA:
        raise ValueError(
            f"memory mode 'exact' got a stream of {dtype}: expected float32 or float64. Keep the "
            "model in float32 and compute the branches in the narrow type under torch.autocast"
        )
    return 2.0 ** (_MANTISSA[dtype] - bits)


def check_bits(bits: int) -> int:
    """Return ``bits``, or raise a ValueError that says what a grid may be."""
    if isinstance(bits, bool) or not isinstance(bits, int) or not 0 <= bits <= 23:
        raise ValueError(
            f"grid={bits!r}: expected the number of fractional bits, 0 to 23 (default "
            f"{DEFAULT_BITS}: resolution 2**-{DEFAULT_BITS}, range +-{2 ** (24 - DEFAULT_BITS)})"
        )
    return bits


_on_grid: Any = WeakTensorKeyDictionary()  # bits of the grid, version of the tensor


def put_on_grid(state: State, bits: int) -> State:
    """The state rounded to the grid, but for streams that are known to lie on it."""
    for t in state:
        range_of(t.dtype, bits)
    return tuple(t if _is_on_grid(t, bits) else round_to_grid(t, bits) for t in state)


def _is_on_grid(t: Tensor, bits: int) -> bool:
    marked, version = _on_grid.get(t, (bits + 1, 0))
    return marked <= bits and version == version_of(t)


def mark_on_grid(state: State, bits: int) -> State:
    """Remember that the streams lie on the grid."""
    for t in state:
        _on_grid[t] = bits, version_of(t)
    return state


class Extremes(NamedTuple):
    """How far a stream goes, on its device, and how far its sums are exact."""

    low: Tensor
    high: Tensor
    limit: float


def extremes(inputs: State, outputs: State, bits: int) -> list[Extremes]:
    """Those of each stream that a step has computed."""
    passed = {id(t) for t in inputs}
    return [
        Extremes(*torch.aminmax(t.detach()), range_of(t.dtype, bits))
        for t in outputs
        if id(t) not in passed and has_values(t)
    ]
