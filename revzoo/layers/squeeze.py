"""Invertible downsampling: space to depth, on every stream.

    (B, C, H, W) -> (B, b*b*C, H/b, W/b)

and likewise for signals ``(B, C, L)`` and volumes ``(B, C, D, H, W)``, with a factor per axis.

Convolutions with stride lose information; a squeeze only moves it (the psi of i-RevNet, Jacobsen
et al. 2018, arXiv 1802.07088, section 3.2; RealNVP, Dinh et al. 2017, arXiv 1605.08803). torch has
the operation for images, a single factor and one channel order, ``pixel_unshuffle``; published
i-RevNet weights need the other. torch has no wavelets.

===========  =========================================  ==================
``order``    channel that pixel (dy, dx) of c goes to   used by
===========  =========================================  ==================
``torch``    ``(c*b + dy)*b + dx``                      pixel_unshuffle
``irevnet``  ``(dy*b + dx)*C + c``                      the i-RevNet release
===========  =========================================  ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from revzoo._checks import check_choice, counts_of
from revzoo.layers.streams import Streamwise

Order = Literal["torch", "irevnet"]


class Squeeze(Streamwise):
    """``(B, C, H, W) -> (B, b*b*C, H/b, W/b)`` for each stream of the state.

    Args:
        factor: b, at least 2, for images; or one for each axis after the channels, at least 1:
            ``(b,)`` for signals, ``(1, 2, 2)`` for volumes that keep their depth.
        order: of the new channels, ``"torch"`` or ``"irevnet"`` (see the module).
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, height or width (in the inverse:
            channels) are not divisible.

    Example:
        >>> squeeze = revzoo.Squeeze(2)
        >>> [tuple(y.shape) for y in squeeze(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))]
        [(1, 12, 16, 16), (1, 12, 16, 16)]
    """

    exact = True

    def __init__(
        self, factor: int | Sequence[int] = 2, *, order: Order = "torch", streams: int = 2
    ) -> None:
        super().__init__(streams=streams)
        self.factors = counts_of(factor, repeat=2)
        if math.prod(self.factors) < 2:
            raise ValueError(
                f"factor={factor!r}: expected a whole number of at least 2, or one of at least 1 "
                "for each axis, not all 1"
            )
        check_choice("order", order, ("torch", "irevnet"))
        self.factor = factor
        self.order: Order = order

    def transform(self, x: Tensor) -> Tensor:
        sizes = x.shape[2:]
        if len(sizes) != len(self.factors) or any(map(int.__mod__, sizes, self.factors)):
            raise ValueError(
                f"{type(self).__name__}({self._shown}) got a stream of shape {tuple(x.shape)}: "
                f"expected {self._expected} with sizes divisible by {self._shown}; pad or crop "
                "it, or give one factor for each axis after the channels"
            )
        return self._mixed(_squeezed(x, self.factors, order=self.order))

    def restore(self, y: Tensor) -> Tensor:
        block = math.prod(self.factors)
        if y.dim() != len(self.factors) + 2 or y.shape[1] % block:
            raise ValueError(
                f"the inverse of {type(self).__name__}({self._shown}) got a stream of shape "
                f"{tuple(y.shape)}: expected {self._expected} with channels divisible by {block}"
            )
        return unsqueezed(self._mixed(y), self.factors, order=self.order)

    def _mixed(self, y: Tensor) -> Tensor:
        """Mixes the channels of a block; its own inverse."""
        return y

    @property
    def _shown(self) -> str:
        same = len(self.factors) == 2 and len({*self.factors}) == 1
        return str(self.factors[0] if same else self.factors)

    @property
    def _expected(self) -> str:
        names = {1: "L", 2: "H, W", 3: "D, H, W"}
        return f"(B, C, {names.get(len(self.factors), '...')})"

    def extra_repr(self) -> str:
        return f"{self._shown}, order={self.order!r}"


class HaarSqueeze(Squeeze):
    """``(B, C, H, W) -> (B, 4C, H/2, W/2)`` for each stream: Haar bands of 2x2 blocks.

    Each block of pixels ``a b / c d`` becomes an average and three details:

        low        (a + b + c + d) / 2        horizontal (a - b + c - d) / 2
        vertical   (a + b - c - d) / 2        diagonal   (a - b - c + d) / 2

    The map is orthonormal (Haar 1910; Ardizzone et al. 2019, arXiv 1907.02392, section 3.2) and is
    its own inverse on a block. Halving leaves the fixed-point grid, so mode ``exact`` refuses the
    layer.

    Args:
        order: ``"torch"`` puts the four bands of a channel next to each other, ``"irevnet"`` the
            channels of a band, all averages first.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, height or width are odd (in the
            inverse: channels are not a multiple of 4).

    Example:
        >>> haar = revzoo.HaarSqueeze()
        >>> [tuple(y.shape) for y in haar(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8))]
        [(1, 12, 4, 4), (1, 12, 4, 4)]
    """

    exact = False
    inexact = "it halves sums, which leaves the grid"

    def __init__(self, *, order: Order = "torch", streams: int = 2) -> None:
        super().__init__(2, order=order, streams=streams)

    def _mixed(self, y: Tensor) -> Tensor:
        dim, shape = (2, (-1, 4)) if self.order == "torch" else (1, (4, -1))
        a, b, c, d = torch.unflatten(y, 1, shape).unbind(dim)
        # two butterflies: 8 additions per block instead of the 12 of the formulas
        above, below = a + b, c + d
        across_above, across_below = a - b, c - d
        bands = (
            above + below,
            across_above + across_below,
            above - below,
            across_above - across_below,
        )
        return torch.stack(bands, dim).flatten(1, 2) / 2


def _squeezed(x: Tensor, factors: tuple[int, ...], *, order: Order) -> Tensor:
    batch, channels, *sizes = x.shape
    small = [n // b for n, b in zip(sizes, factors, strict=True)]
    # one kernel instead of a permuted copy; it returns empty tensors in their old shape
    if x.numel() and order == "torch" and len(factors) == 2 and factors[0] == factors[1]:
        return functional.pixel_unshuffle(x, factors[0])
    # (B, C, H/b, b, W/b, b) -> (B, C, b, b, H/b, W/b)
    pairs = [n for pair in zip(small, factors, strict=True) for n in pair]
    inner, outer = range(3, 2 + len(pairs), 2), range(2, 2 + len(pairs), 2)
    blocks = x.reshape(batch, channels, *pairs).permute(0, 1, *inner, *outer)
    if order == "irevnet":
        blocks = blocks.movedim(1, 1 + len(factors))
    return blocks.reshape(batch, channels * math.prod(factors), *small)


def unsqueezed(y: Tensor, factors: tuple[int, ...], *, order: Order) -> Tensor:
    """The inverse of a squeeze: ``(B, b1*b2*C, H, W) -> (B, C, b1*H, b2*W)``."""
    batch, channels, *small = y.shape
    channels //= math.prod(factors)
    if y.numel() and order == "torch" and len(factors) == 2 and factors[0] == factors[1]:
        return functional.pixel_shuffle(y, factors[0])
    n = len(factors)
    if order == "torch":
        blocks = y.reshape(batch, channels, *factors, *small)
    else:
        blocks = y.reshape(batch, *factors, channels, *small).movedim(1 + n, 1)
    pairs = [axis for i in range(n) for axis in (2 + n + i, 2 + i)]
    sizes = [m * b for m, b in zip(small, factors, strict=True)]
    return blocks.permute(0, 1, *pairs).reshape(batch, channels, *sizes)
