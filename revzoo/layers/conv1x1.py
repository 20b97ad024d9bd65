"""Invertible 1x1 convolution: one matrix mixes the channels of every pixel.

Source: Kingma and Dhariwal 2018, "Glow: Generative Flow with Invertible 1x1 Convolutions", arXiv
1807.03039, section 3.2. We use a matrix product, since ``conv2d`` computes in TF32 by default on
GPUs that have it: with 10 bits of mantissa the inverse would have a relative error of 1e-3.
"""

from __future__ import annotations

from revzoo.layers.linear import InvertibleLinear
from revzoo.layers.matrix import MatrixKind


class InvertibleConv1x1(InvertibleLinear):
    """``(B, C, H, W) -> (B, C, H, W)``: ``y[:, :, h, w] = W x[:, :, h, w]``.

    Args:
        channels: C, of all streams together; the matrix mixes the streams.
        matrix: ``"plu"`` as in Glow, or ``"orthogonal"``, which keeps volume and condition number.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, the number of channels is not C.

    Example:
        >>> mix = revzoo.InvertibleConv1x1(8)
        >>> y1, y2 = mix(torch.zeros(1, 4, 16, 16), torch.zeros(1, 4, 16, 16))
    """

    def __init__(self, channels: int, *, matrix: MatrixKind = "plu", streams: int = 2) -> None:
        super().__init__(channels, matrix=matrix, dim=1, streams=streams)
