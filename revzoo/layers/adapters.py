"""Affine couplings whose branch returns the scale, and MemCNN's two adapters for branches.

    (x1, x2) -> (x2, x1 * s + t)        (s, t) = branch(x2)

:class:`~revzoo.AffineCoupling` bounds its scales, so that the inverse is well conditioned. Networks
trained elsewhere may not bound them: here an adapter makes an ordinary branch return scale and
shift (van de Leemput et al. 2019, MemCNN, JOSS 4(39) 1576). Known limit: with a scale near zero the
reconstruction is wrong, and the guard raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable
from revzoo.core.invertible import State
from revzoo.layers.coupling import Coupling
from revzoo.layers.streams import log_det_dtype


class _Adapter(nn.Module):
    """Holds an ordinary branch as ``f``, its name in MemCNN's weights."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        check_callable("module", module)
        self.f = module


class AffineAdapterNaive(_Adapter):
    """``x -> (exp(f(x)), f(x))``: one value is both log-scale and shift.

    Args:
        module: f, which keeps the shape.

    Example:
        >>> scale, shift = revzoo.AffineAdapterNaive(nn.Identity())(torch.tensor([0.0, 1.0]))
        >>> scale, shift
        (tensor([1.0000, 2.7183]), tensor([0., 1.]))
    """

    def forward(self, x: Tensor, **context: Any) -> State:
        shift = self.f(x, **context)
        return shift.exp(), shift


class AffineAdapterSigmoid(_Adapter):
    """``x -> (sigmoid(h_odd + 2), h_even)`` with ``h = f(x)``: scales between 0 and 1.

    The offset of 2 starts scales near 0.88, as in Glow (Kingma and Dhariwal 2018, arXiv
    1807.03039, its release).

    Args:
        module: f, from ``(B, C, ...)`` to ``(B, 2C, ...)``: shifts and raw scales alternate.

    Raises:
        ValueError: at the call, f returns an odd number of channels.

    Example:
        >>> adapter = revzoo.AffineAdapterSigmoid(nn.Conv2d(4, 8, 1))
        >>> [part.shape[1] for part in adapter(torch.randn(1, 4, 8, 8))]
        [4, 4]
    """

    def forward(self, x: Tensor, **context: Any) -> State:
        h = self.f(x, **context)
        if h.shape[1] % 2:
            raise ValueError(
                f"{type(self.f).__name__} returned shape {tuple(h.shape)}: expected an even number "
                "of channels, shifts and raw scales in turn; let the module of an "
                "AffineAdapterSigmoid return twice the channels that it takes"
            )
        # in turn, not in halves: the order of MemCNN's weights
        return torch.sigmoid(h[:, 1::2] + 2.0), h[:, 0::2]


class ScaledCoupling(Coupling):
    """``(x1, x2) -> (x2, x1 * s + t)`` with ``(s, t) = branch(x2)``.

    Args:
        branch: returns two tensors of the shape of a stream; no scale may be zero.

    Raises:
        TypeError: the branch returns something else.
        ValueError: the tensors do not have the shape of a stream.

    Example:
        >>> adapter = revzoo.AffineAdapterSigmoid(nn.Conv2d(4, 8, 3, padding=1))
        >>> coupling = revzoo.ScaledCoupling(adapter)
        >>> y1, y2 = coupling(torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8))
    """

    inexact = "is not exact on fixed-point streams, since products with its scales leave the grid"

    def __init__(self, branch: nn.Module) -> None:
        super().__init__(_Stacked(branch))

    def log_det(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return self._log_det_of(self.branch(x2, **context), x1)

    def forward_with_log_det(self, *state: Tensor, **context: Any) -> tuple[State, Tensor]:
        x1, x2 = state
        value = self.branch(x2, **context)
        return (x2, self.combine(x1, value)), self._log_det_of(value, x1)

    def combine(self, x1: Tensor, value: Tensor) -> Tensor:
        scale, shift = self._pair(value, x1)
        return x1 * scale + shift

    def uncombine(self, y2: Tensor, value: Tensor) -> Tensor:
        scale, shift = self._pair(value, y2)
        return (y2 - shift) / scale

    def _log_det_of(self, value: Tensor, x1: Tensor) -> Tensor:
        scale, _ = self._pair(value, x1)
        return scale.abs().log().flatten(1).sum(1, dtype=log_det_dtype(scale))

    def _pair(self, value: Tensor, stream: Tensor) -> State:
        if value.shape[1:] != stream.shape:
            raise ValueError(
                f"scale and shift have shape {tuple(value.shape[1:])} for a stream of shape "
                f"{tuple(stream.shape)}: expected the same"
            )
        return value.to(stream.dtype).unbind()


class _Stacked(nn.Module):
    """A branch's pair as one tensor ``(2, B, C, ...)``, which a coupling takes."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        check_callable("branch", branch)
        self.branch = branch

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        pair = self.branch(x, **context)
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(
                f"{type(self.branch).__name__} returned a {type(pair).__name__}, expected a pair "
                "of tensors, scale and shift: wrap it in AffineAdapterSigmoid, say"
            )
        shapes = [tuple(t.shape) for t in pair]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{type(self.branch).__name__} returned scale and shift of shapes {shapes[0]} and "
                f"{shapes[1]}: expected the shape of a stream for both"
            )
        # one tensor, since a coupling takes one value from its branch
        return torch.stack(tuple(pair))
