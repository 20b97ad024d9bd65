"""Couplings that multiply a stream by a scale and add a shift, both functions of the other stream.

    (x1, x2) -> (x2, x1 * s + t)        (s, t) from branch(x2)

:class:`AffineCoupling` bounds its scales, so that the inverse is well conditioned. Networks trained
elsewhere may not bound them: the branch of a :class:`ScaledCoupling` returns scale and shift.
MemCNN's two adapters make an ordinary branch return them (van de Leemput et al. 2019, JOSS 4(39)
1576). Known limit: with a scale near zero the reconstruction is wrong, and the guard raises.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable, check_number
from revzoo.core.invertible import State, name_of
from revzoo.layers.coupling import Coupling
from revzoo.layers.streams import log_det_dtype


class _Scaling(Coupling):
    """``x1 * s + t``; :meth:`_coefficients` computes ``s`` and ``t`` from the branch's value."""

    inexact = "products with its scales leave the grid"

    def _coefficients(self, value: Tensor, stream: Tensor) -> State:
        raise NotImplementedError

    def _scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    def _unscaled(self, y: Tensor, scale: Tensor) -> Tensor:
        return y / scale

    def _log_abs(self, scale: Tensor) -> Tensor:
        return scale.abs().log()

    def combine(self, x1: Tensor, value: Tensor) -> Tensor:
        scale, shift = self._coefficients(value, x1)
        return self._scaled(x1, scale) + shift

    def uncombine(self, y2: Tensor, value: Tensor) -> Tensor:
        scale, shift = self._coefficients(value, y2)
        return self._unscaled(y2 - shift, scale)

    def log_det(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return self._log_det_of(self._values(x2, context)[0], x1)

    def forward_with_log_det(self, *state: Tensor, **context: Any) -> tuple[State, Tensor]:
        x1, x2 = state
        value, *extras = self._values(x2, context)
        return (x2, self.combine(x1, value), *extras), self._log_det_of(value, x1)

    def _log_det_of(self, value: Tensor, x1: Tensor) -> Tensor:
        log_abs = self._log_abs(self._coefficients(value, x1)[0])
        return log_abs.flatten(1).sum(1, dtype=log_det_dtype(log_abs))


class AffineCoupling(_Scaling):
    """``(x1, x2) -> (x2, x1 * s(x2) + t(x2))`` (RealNVP, Dinh et al. 2017, arXiv 1605.08803).

    The branch returns raw log-scales and shifts side by side. The scale is
    ``s = exp(clamp * 2/pi * atan(raw / clamp))``, smooth and between ``exp(-clamp)`` and
    ``exp(clamp)``: away from zero, so that the inverse is well conditioned (Ardizzone et al. 2019,
    arXiv 1907.02392, equation 7).

    Args:
        branch: from ``(B, C, ...)`` to ``(B, 2C, ...)``: raw log-scales, then shifts.
        clamp: largest absolute log-scale; the cited paper uses 1.9.

    Raises:
        ValueError: ``clamp`` is not positive, or the branch's value has the wrong shape.

    Example:
        >>> coupling = revzoo.AffineCoupling(nn.Conv2d(4, 8, 3, padding=1))
        >>> revzoo.is_invertible(coupling, torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8))
        True
    """

    def __init__(self, branch: nn.Module, *, clamp: float = 1.9) -> None:
        super().__init__(branch)
        check_number("clamp", clamp, open_low=True)
        self.clamp = clamp

    def _coefficients(self, value: Tensor, stream: Tensor) -> State:
        expected = (stream.shape[0], 2 * stream.shape[1], *stream.shape[2:])
        if value.shape != expected:
            raise ValueError(
                f"{type(self.branch).__name__} returned shape {tuple(value.shape)} for a stream of "
                f"shape {tuple(stream.shape)}: an affine coupling expects {expected}, raw "
                "log-scales and shifts side by side"
            )
        raw, shift = value.to(stream.dtype).chunk(2, dim=1)
        # atan, since it approaches the bounds slowly: a tanh saturates and its gradients vanish
        return self.clamp * (2 / math.pi) * torch.atan(raw / self.clamp), shift

    def _scaled(self, x: Tensor, log_scale: Tensor) -> Tensor:
        return x * log_scale.exp()

    def _unscaled(self, y: Tensor, log_scale: Tensor) -> Tensor:
        return y * (-log_scale).exp()

    def _log_abs(self, log_scale: Tensor) -> Tensor:
        return log_scale


class ScaledCoupling(_Scaling):
    """``(x1, x2) -> (x2, x1 * s + t)`` with ``(s, t) = branch(x2)``.

    Args:
        branch: returns two tensors of the shape of a stream, then ``extras`` others; no scale may
            be zero.

    Raises:
        TypeError: the branch returns something else.
        ValueError: the tensors do not have the shape of a stream.

    Example:
        >>> adapter = revzoo.AffineAdapterSigmoid(nn.Conv2d(4, 8, 3, padding=1))
        >>> coupling = revzoo.ScaledCoupling(adapter)
        >>> y1, y2 = coupling(torch.randn(1, 4, 8, 8), torch.randn(1, 4, 8, 8))
    """

    def __init__(self, branch: nn.Module) -> None:
        super().__init__(_Stacked(branch))

    def _values(self, x2: Tensor, context: Mapping[str, Any]) -> State:
        values: State = self.branch(x2, **context)
        if len(values) != 1 + self.extras:
            raise TypeError(
                f"{type(self.branch.branch).__name__} returned {1 + len(values)} tensors, expected "
                f"{2 + self.extras}, scale, shift and the extra outputs of {name_of(self)}: set "
                "the coupling's extras to the number of tensors after the shift"
            )
        return values

    def _coefficients(self, value: Tensor, stream: Tensor) -> State:
        if value.shape[1:] != stream.shape:
            raise ValueError(
                f"scale and shift have shape {tuple(value.shape[1:])} for a stream of shape "
                f"{tuple(stream.shape)}: expected the same"
            )
        return value.to(stream.dtype).unbind()


class _Stacked(nn.Module):
    """A branch's pair as one tensor ``(2, B, C, ...)``, which a coupling takes; then its extras."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        check_callable("branch", branch)
        self.branch = branch

    def forward(self, x: Tensor, **context: Any) -> State:
        values = self.branch(x, **context)
        pair = values[:2] if isinstance(values, (tuple, list)) else ()
        if len(pair) != 2 or not all(isinstance(t, Tensor) for t in pair):
            raise TypeError(
                f"{type(self.branch).__name__} returned a {type(values).__name__}, expected a pair "
                "of tensors, scale and shift: wrap it in AffineAdapterSigmoid, say"
            )
        shapes = [tuple(t.shape) for t in pair]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{type(self.branch).__name__} returned scale and shift of shapes {shapes[0]} and "
                f"{shapes[1]}: expected the shape of a stream for both"
            )
        # one tensor, since a coupling takes one value from its branch
        return torch.stack(tuple(pair)), *values[2:]


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
