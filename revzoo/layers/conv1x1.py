"""Invertible 1x1 convolution: the channels of every pixel, mixed by one matrix.

Source: Kingma and Dhariwal 2018, "Glow: Generative Flow with Invertible 1x1 Convolutions", arXiv
1807.03039, section 3.2. It is a matrix product rather than ``conv2d``, which computes in TF32 by
default on GPUs that have it: with 10 bits of mantissa its inverse would be off by parts in 1e3.
"""

from __future__ import annotations

from revzoo.layers.linear import InvertibleLinear
from revzoo.layers.matrix import MatrixKind


class InvertibleConv1x1(InvertibleLinear):
    """``(B, C, H, W) -> (B, C, H, W)``: ``y[:, :, h, w] = W x[:, :, h, w]``.

    Args:
        channels: C, of all streams together; the matrix mixes the streams.
        matrix: ``"plu"`` after Glow, or ``"orthogonal"``, which keeps volume and condition.
        streams: how many streams the state has.

    Raises:
        ValueError: an argument is out of range; at the call, the streams have not C channels.

    Example:
        >>> mix = revzoo.InvertibleConv1x1(8)
        >>> y1, y2 = mix(torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 16, 16))
    """

    def __init__(self, channels: int, *, matrix: MatrixKind = "plu", streams: int = 2) -> None:
        super().__init__(channels, matrix=matrix, dim=1, streams=streams)
