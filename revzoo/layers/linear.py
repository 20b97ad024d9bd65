"""Linear maps that lose no information: a matrix mixes the channels of all streams.

    y = W x + b        at each position, on the last dimension or along the channels

A learned generalisation of a permutation: Glow (Kingma and Dhariwal 2018, arXiv 1807.03039, section
3.2). ``torch.nn.Linear`` has no inverse, and its matrix may become singular. Two parametrisations
cannot, and make inverse or determinant cheap:

================  ====================================  =====================  ================
name              W                                     inverse                log abs det W
================  ====================================  =====================  ================
``plu``           P L (U + diag(sign(s) exp(log_s)))    two triangular solves  sum(log_s)
``orthogonal``    exp(A - A^T) Q                        the transpose          0
================  ====================================  =====================  ================

P is a fixed permutation, L lower triangular with a unit diagonal, U strictly upper triangular. A is
strictly lower triangular and Q a fixed rotation. Both start at a random rotation.
``torch.nn.utils.parametrizations.orthogonal`` is the second one without an interface for the
inverse; torch lacks the first. Known limit: ``exp(log_s)`` is not bounded, so a PLU matrix
may become badly conditioned; the orthogonal one cannot.

For more features, W is the first n columns of an invertible ``(m, m)`` matrix, so the map pads with
zeros, then applies the matrix. Its left inverse, the first n rows of the inverse matrix, recovers
every x. It also accepts a y outside the range of W: an orthogonal matrix keeps lengths, and the
inverse then returns the x whose image is closest, like ``torch.linalg.pinv``.

Streams keep their dtype, also under autocast: the inverse could not undo a rounding to bfloat16,
see :mod:`revzoo.layers.streams`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice, check_count
from revzoo.core.invertible import State, bare, name_of
from revzoo.layers.rearrange import Squeeze
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.streams import Joint, at_least_float32, without_autocast

MatrixKind = Literal["plu", "orthogonal"]


class PLUMatrix(nn.Module):
    """``W = P L (U + diag(sign(s) exp(log_s)))`` of size ``(n, n)`` (Glow, equation 10)."""

    permutation: Tensor
    sign: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        # start with a rotation, which keeps volumes and has condition number 1
        p, lower, upper = torch.linalg.lu(nn.init.orthogonal_(torch.empty(n, n)))
        s = upper.diagonal()
        self.register_buffer("permutation", p)
        self.register_buffer("sign", s.sign())
        # log and fixed sign, so that no entry of the diagonal can reach 0
        self.log_s = nn.Parameter(s.abs().log())
        self.lower = nn.Parameter(lower.tril(-1))
        self.upper = nn.Parameter(upper.triu(1))

    def forward(self) -> Tensor:
        permutation, lower, upper = self._factors()
        return permutation @ lower @ upper

    def inverse(self) -> Tensor:
        permutation, lower, upper = self._factors()
        solved = torch.linalg.solve_triangular(
            lower, permutation.mT, upper=False, unitriangular=True
        )
        return torch.linalg.solve_triangular(upper, solved, upper=True)

    def log_abs_det(self) -> Tensor:
        return self.log_s.sum()

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        lower, upper, log_s, sign, permutation = map(
            at_least_float32, (self.lower, self.upper, self.log_s, self.sign, self.permutation)
        )
        unit = torch.eye(len(log_s), dtype=lower.dtype, device=lower.device)
        # masked, since the parameters are full matrices: loaded ones may have other entries
        return permutation, lower.tril(-1) + unit, upper.triu(1) + (sign * log_s.exp()).diag()


class OrthogonalMatrix(nn.Module):
    """``W = exp(A - A^T) Q`` of size ``(n, n)``: a rotation for any A."""

    start: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("start", nn.init.orthogonal_(torch.empty(n, n)))
        self.skew = nn.Parameter(torch.zeros(n, n))

    def forward(self) -> Tensor:
        # the lower triangle alone, since A - A^T has only n (n - 1) / 2 degrees of freedom
        a = at_least_float32(self.skew).tril(-1)
        return torch.linalg.matrix_exp(a - a.mT) @ _orthogonalised(at_least_float32(self.start))

    def inverse(self) -> Tensor:
        return self().mT

    def log_abs_det(self) -> Tensor:
        return self.skew.new_zeros(())


MATRICES: dict[MatrixKind, type[PLUMatrix | OrthogonalMatrix]] = {
    "plu": PLUMatrix,
    "orthogonal": OrthogonalMatrix,
}


class _Linear(Joint):
    """``y = W x + b``; W is the first ``in_features`` columns of the square matrix."""

    inexact = "products with a matrix leave the grid"

    bias: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, *, matrix: MatrixKind, dim: int, streams: int
    ) -> None:
        super().__init__(in_features, dim=dim, streams=streams)
        check_choice("matrix", matrix, MATRICES)
        self.matrix = MATRICES[matrix](out_features)

    def transform(self, x: Tensor) -> Tensor:
        with without_autocast(x):
            # the first columns: as if x were padded by zeros
            y = self._mixed(self.matrix()[:, : self.size], x)
            return y if self.bias is None else y + self.per_channel(self.bias, y)

    def restore(self, y: Tensor) -> Tensor:
        with without_autocast(y):
            y = y if self.bias is None else y - self.per_channel(self.bias, y)
            # the other rows would recover the zeros
            return self._mixed(self.matrix.inverse()[: self.size], y)

    def log_det_of(self, x: Tensor) -> Tensor:
        return self.at_each_position(self.matrix.log_abs_det(), x)

    def _mixed(self, matrix: Tensor, x: Tensor) -> Tensor:
        # not conv2d or linear, which may compute in TF32: with 10 bits of mantissa the inverse
        # would have a relative error of 1e-3
        equation = "ij,bj...->bi..." if self.dim == 1 else "ij,...j->...i"
        return torch.einsum(equation, matrix.to(x.dtype), x)


class InvertibleLinear(_Linear):
    """``(..., n) -> (..., n)``, ``y = W x``, for all streams concatenated along ``dim``.

    There is no bias: put an :class:`~revzoo.ActNorm` before it.

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

    def __init__(
        self, features: int, *, matrix: MatrixKind = "plu", dim: int = -1, streams: int = 2
    ) -> None:
        super().__init__(features, features, matrix=matrix, dim=dim, streams=streams)
        self.bias = None


class InvertibleConv1x1(InvertibleLinear):
    """``(B, C, H, W) -> (B, C, H, W)``: ``y[:, :, h, w] = W x[:, :, h, w]`` (Glow, section 3.2).

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


class InjectiveLinear(_Linear):
    """``(..., n) -> (..., m)``, ``y = W x + b``, for all streams concatenated along ``dim``.

    InvTorch's ``Linear`` and ``Conv2d``.

    Args:
        in_features: n, of all streams together.
        out_features: m, at least n. All streams have the same size, before and after.
        bias: whether to add b.
        matrix: parametrisation of the ``(m, m)`` matrix: ``"orthogonal"`` or ``"plu"``.
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
        check_count("in_features", in_features)
        check_count("out_features", out_features)
        check_count("streams", streams)
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
        super().__init__(in_features, out_features, matrix=matrix, dim=dim, streams=streams)
        self.out_features = out_features
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        y = self.transform(self._alike(state, self.size))
        return bare(y.chunk(len(state), dim=self.dim))

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        x = self.restore(self._alike(state, self.out_features))
        return bare(x.chunk(len(state), dim=self.dim))

    def log_det_of(self, x: Tensor) -> Tensor:
        if self.out_features > self.size:
            raise NotImplementedError(
                f"{name_of(self)} maps {self.size} features to {self.out_features}: the Jacobian "
                "is not square and has no determinant; expected a map that keeps their number"
            )
        return super().log_det_of(x)

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


def _orthogonalised(q: Tensor) -> Tensor:
    """The rotation nearest to ``q``, which a cast may have rounded.

    Two Newton-Schulz steps (Higham 2008, "Functions of Matrices", section 8.3). Each squares the
    error: 4e-3 of bfloat16 becomes 1e-10, 6e-8 of float32 becomes float64 rounding.
    """
    for _ in range(2):
        q = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return q
