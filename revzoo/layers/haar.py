"""Haar wavelets as an invertible downsampling: a squeeze whose channels are frequency bands.

    (B, C, H, W) -> (B, 4C, H/2, W/2)

Each 2x2 block of pixels ``a b / c d`` becomes an average and three details:

    low        (a + b + c + d) / 2        horizontal (a - b + c - d) / 2
    vertical   (a + b - c - d) / 2        diagonal   (a - b - c + d) / 2

This map is orthonormal (Haar 1910; as a layer of invertible networks: Ardizzone et al. 2019, arXiv
1907.02392, section 3.2) and is its own inverse on a block. torch has no wavelets.

Known limit: halving leaves the fixed-point grid, so mode ``exact`` refuses the layer. The lifted
integer transform would stay on the grid, but is not orthonormal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from revzoo.layers.squeeze import Order, Squeeze

FACTOR = 2  # side of a block


class HaarSqueeze(Squeeze):
    """``(B, C, H, W) -> (B, 4C, H/2, W/2)`` for each stream: Haar bands of 2x2 blocks.

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
        super().__init__(FACTOR, order=order, streams=streams)

    def transform(self, x: Tensor) -> Tensor:
        return self._between_pixels_and_bands(super().transform(x))

    def restore(self, y: Tensor) -> Tensor:
        self.check_squeezed(y)
        return super().restore(self._between_pixels_and_bands(y))

    def _between_pixels_and_bands(self, y: Tensor) -> Tensor:
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
