"""Invertible linear maps: a square matrix that mixes the channels of all streams.

    y = W x        at each position, on the last dimension or along the channels

A learned generalisation of a permutation: Glow (Kingma and Dhariwal 2018, arXiv 1807.03039, section
3.2). ``torch.nn.Linear`` has no inverse and may become singular; for the matrices see
:mod:`revzoo.layers.matrix`. There is no bias: put an :class:`~revzoo.ActNorm` before it.

Streams keep their dtype, also under autocast: the inverse could not undo a rounding to bfloat16,
see :mod:`revzoo.layers.precision`.
"""

from __future__ import annotations

from torch import Tensor

from revzoo._checks import check_choice
from revzoo.layers.matrix import MATRICES, MatrixKind, mix
from revzoo.layers.precision import without_autocast
from revzoo.layers.streams import Joint


class InvertibleLinear(Joint):
    """``(..., n) -> (..., n)``, ``y = W x``, for all streams concatenated along ``dim``.

    Args:
        features: n, of all streams together.
        matrix: parametrisation of W: ``"plu"`` or ``"orthogonal"``, which keeps volumes.
        dim: -1 for the last dimension, 1 for channels.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, the streams do not add up to n.

    Example:
        >>> linear, x = revzoo.InvertibleLinear(8, streams=1), torch.randn(2, 5, 8)
        >>> torch.allclose(linear.inverse(linear(x)), x, atol=1e-4)
        True
        >>> linear.log_det(x).shape  # 5 log abs det W for each of the batch
        torch.Size([2])
    """

    inexact = "products with a matrix leave the grid"

    def __init__(
        self, features: int, *, matrix: MatrixKind = "plu", dim: int = -1, streams: int = 2
    ) -> None:
        super().__init__(features, dim=dim, streams=streams)
        check_choice("matrix", matrix, MATRICES)
        self.matrix = MATRICES[matrix](features)

    def transform(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            return mix(self.matrix(), x, self.dim)

    def restore(self, y: Tensor) -> Tensor:
        with without_autocast(y):
            return mix(self.matrix.inverse(), y, self.dim)

    def log_det_of(self, x: Tensor) -> Tensor:
        return self.at_each_position(self.matrix.log_abs_det(), x)
