"""Square matrices that stay invertible during training.

An unconstrained matrix can become singular, and its inverse and determinant cost O(n^3). Two
parametrisations cannot become singular, and make inverse or determinant cheap:

================  ====================================  =====================  ================
name              W                                     inverse                log abs det W
================  ====================================  =====================  ================
``plu``           P L (U + diag(sign(s) exp(log_s)))    two triangular solves  sum(log_s)
``orthogonal``    exp(A - A^T) Q                        the transpose          0
================  ====================================  =====================  ================

P is a fixed permutation, L lower triangular with a unit diagonal, U strictly upper triangular
(Kingma and Dhariwal 2018, Glow, arXiv 1807.03039, section 3.2). A is strictly lower triangular and
Q a fixed rotation. Both start at a random rotation.

``torch.nn.utils.parametrizations.orthogonal`` is the second one without an interface for the
inverse; torch lacks the first. Known limit: ``exp(log_s)`` is not bounded, so a PLU matrix
may become badly conditioned; the orthogonal one cannot.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

MatrixKind = Literal["plu", "orthogonal"]


class PLUMatrix(nn.Module):
    """``W = P L (U + diag(sign(s) exp(log_s)))`` of size ``(n, n)`` (Glow, equation 10)."""

    permutation: Tensor
    sign: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        # start with a rotation, which keeps volumes and has condition number 1
        p, lower, upper = torch.linalg.lu(_random_rotation(n))
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
            _widened, (self.lower, self.upper, self.log_s, self.sign, self.permutation)
        )
        unit = torch.eye(len(log_s), dtype=lower.dtype, device=lower.device)
        # masked, since the parameters are full matrices: loaded ones may have other entries
        return permutation, lower.tril(-1) + unit, upper.triu(1) + (sign * log_s.exp()).diag()


class OrthogonalMatrix(nn.Module):
    """``W = exp(A - A^T) Q`` of size ``(n, n)``: a rotation for any A."""

    start: Tensor

    def __init__(self, n: int) -> None:
        super().__init__()
        self.register_buffer("start", _random_rotation(n))
        self.skew = nn.Parameter(torch.zeros(n, n))

    def forward(self) -> Tensor:
        # the lower triangle alone, since A - A^T has only n (n - 1) / 2 degrees of freedom
        a = _widened(self.skew).tril(-1)
        return torch.linalg.matrix_exp(a - a.mT) @ _orthogonalised(_widened(self.start))

    def inverse(self) -> Tensor:
        return self().mT

    def log_abs_det(self) -> Tensor:
        return self.skew.new_zeros(())


MATRICES: dict[MatrixKind, type[PLUMatrix | OrthogonalMatrix]] = {
    "plu": PLUMatrix,
    "orthogonal": OrthogonalMatrix,
}


def mix(matrix: Tensor, x: Tensor, dim: int) -> Tensor:
    """``matrix`` times the vectors of ``x`` along ``dim``, 1 or -1."""
    # not conv2d or linear, which may compute in TF32 or in autocast's dtype
    equation = "ij,bj...->bi..." if dim == 1 else "ij,...j->...i"
    return torch.einsum(equation, matrix.to(x.dtype), x)


def _random_rotation(n: int) -> Tensor:
    """An orthogonal ``(n, n)``, drawn like a layer's weights from torch's random state."""
    return nn.init.orthogonal_(torch.empty(n, n))


def _orthogonalised(q: Tensor) -> Tensor:
    """The rotation nearest to ``q``, which a cast may have rounded.

    Two Newton-Schulz steps (Higham 2008, "Functions of Matrices", section 8.3). Each squares the
    error: 4e-3 of bfloat16 becomes 1e-10, 6e-8 of float32 becomes float64 rounding.
    """
    for _ in range(2):
        q = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return q


def _widened(t: Tensor) -> Tensor:
    """At least float32: torch cannot solve linear systems in narrower dtypes."""
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t
