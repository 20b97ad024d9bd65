"""Linear maps into more features, which lose no information.

    y = W x + b        W of shape (m, n), m >= n, with full column rank

W is the first n columns of an invertible ``(m, m)`` matrix A (:mod:`revzoo.layers.matrix`), so the
map pads with zeros, then applies A. Its left inverse, the first n rows of ``A^-1``, recovers every
x. It also accepts a y outside the range of W. With ``matrix="orthogonal"`` W keeps lengths, and the
inverse then returns the x whose image is closest, like ``torch.linalg.pinv`` (InvTorch's
``Linear`` and ``Conv2d``). ``torch.nn.Linear`` may lose rank during training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice, check_count
from revzoo.core.invertible import State, bare, name_of
from revzoo.layers.matrix import MATRICES, MatrixKind, mix
from revzoo.layers.precision import without_autocast
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.squeeze import Squeeze
from revzoo.layers.streams import Joint


class InjectiveLinear(Joint):
    """``(..., n) -> (..., m)``, ``y = W x + b``, for all streams concatenated along ``dim``.

    Args:
        in_features: n, of all streams together.
        out_features: m, at least n. All streams have the same size, before and after.
        bias: whether to add b.
        matrix: parametrisation of A: ``"orthogonal"`` or ``"plu"``.
        dim: -1 for the last dimension, 1 for channels.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, streams have the wrong size.
        NotImplementedError: by ``log_det``, if m is not n.

    Example:
        >>> linear, x = revzoo.InjectiveLinear(3, 5, streams=1), torch.randn(10, 3)
        >>> y = linear(x)
        >>> y.shape, torch.allclose(linear.inverse(y), x, atol=1e-4)
        (torch.Size([10, 5]), True)
    """

    inexact = "products with a matrix leave the grid"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        matrix: MatrixKind = "orthogonal",
        dim: int = -1,
        streams: int = 2,
    ) -> None:
        super().__init__(in_features, dim=dim, streams=streams)
        check_count("out_features", out_features)
        if out_features < in_features:
            raise ValueError(
                f"out_features={out_features}: expected at least in_features={in_features}, since "
                "fewer features cannot hold all values"
            )
        if in_features % streams or out_features % streams:
            raise ValueError(
                f"in_features={in_features}, out_features={out_features}: expected multiples of "
                f"streams={streams}, since all streams have the same size"
            )
        check_choice("matrix", matrix, MATRICES)
        self.out_features = out_features
        self.matrix = MATRICES[matrix](out_features)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        y = self.transform(self._alike(state, self.size))
        return bare(y.chunk(len(state), dim=self.dim))

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        x = self.restore(self._alike(state, self.out_features))
        return bare(x.chunk(len(state), dim=self.dim))

    def transform(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            # the first n columns: as if x were padded by zeros
            y = mix(self.matrix()[:, : self.size], x, self.dim)
            return y if self.bias is None else y + self.per_channel(self.bias, y)

    def restore(self, y: Tensor) -> Tensor:
        with without_autocast(y):
            y = y if self.bias is None else y - self.per_channel(self.bias, y)
            # the other rows would recover the zeros
            return mix(self.matrix.inverse()[: self.size], y, self.dim)

    def log_det_of(self, x: Tensor) -> Tensor:
        if self.out_features > self.size:
            raise NotImplementedError(
                f"{name_of(self)} maps {self.size} features to {self.out_features}: the Jacobian "
                "is not square and has no determinant; expected a map that keeps their number"
            )
        return self.at_each_position(self.matrix.log_abs_det(), x)

    def _alike(self, state: State, size: int) -> Tensor:
        each = size // self.streams
        if any(x.dim() < 2 or x.shape[self.dim] != each for x in state):
            shapes = ", ".join(str(tuple(x.shape)) for x in state)
            raise ValueError(
                f"{name_of(self)} got streams of shape {shapes}: expected {each} along dim "
                f"{self.dim} in each"
            )
        return state[0] if len(state) == 1 else torch.cat(state, dim=self.dim)

    def extra_repr(self) -> str:
        return f"{self.size}, {self.out_features}, dim={self.dim}, streams={self.streams}"


class PatchConv(ReversibleSequence):
    """A convolution with stride equal to kernel size: a squeeze, then a linear map of channels.

    ``(B, C, H, W) -> (B, m, H/b, W/b)`` with ``m >= b*b*C``; likewise for signals and volumes. It
    is ``torch.nn.Conv2d(C, m, b, stride=b)`` with an injective weight: the patch embedding of a
    vision transformer, or a downsampling convolution (InvTorch's ``Conv2d``).

    Args:
        in_channels: C, of all streams together.
        out_channels: m.
        kernel_size: b, for images; or one for each axis, ``(b,)`` for signals ``(B, C, L)``.
        bias: whether to add a bias.
        matrix: see :class:`InjectiveLinear`.
        streams: number of streams of the state.
        memory: see :class:`~revzoo.ReversibleSequence`.

    Raises:
        ValueError: an argument is out of range; at the call, ``kernel_size`` does not divide sizes.

    Example:
        >>> y = revzoo.PatchConv(3, 64, 4, streams=1)(torch.zeros(1, 3, 32, 32))
        >>> y.shape
        torch.Size([1, 64, 8, 8])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Sequence[int],
        *,
        bias: bool = True,
        matrix: MatrixKind = "orthogonal",
        streams: int = 2,
        memory: str = "invert",
    ) -> None:
        check_count("in_channels", in_channels)
        check_count("streams", streams)
        if in_channels % streams:
            raise ValueError(
                f"in_channels={in_channels}: expected a multiple of streams={streams}; for an "
                "image as one tensor give streams=1"
            )
        squeeze = Squeeze(kernel_size, streams=streams)
        linear = InjectiveLinear(
            in_channels * math.prod(squeeze.factors),
            out_channels,
            bias=bias,
            matrix=matrix,
            dim=1,
            streams=streams,
        )
        super().__init__([squeeze, linear], memory=memory)
        self.in_channels = in_channels

    def _check_count(self, state: State) -> None:
        super()._check_count(state)
        each = self.in_channels // self.streams
        if any(x.dim() > 1 and x.shape[1] != each for x in state):
            shapes = ", ".join(str(tuple(x.shape)) for x in state)
            raise ValueError(
                f"{name_of(self)} got streams of shape {shapes}: expected {each} channels in each"
            )
