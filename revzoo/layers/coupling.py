"""Couplings: a residual function of one stream, combined with the other.

A coupling is invertible for any residual function, because the function's argument passes through
unchanged: with ``(y1, y2) = (x2, x1 + F(x2))``, ``x2 = y1`` and ``x1 = y2 - F(y1)``. Two couplings
form the block of Gomez et al. 2017 (arXiv 1707.04585, equation 6); one is the block of Jacobsen et
al. 2018 (arXiv 1802.07088).

Affine couplings multiply a stream by a scale and add a shift, both functions of the other stream:

    (x1, x2) -> (x2, x1 * s + t)        (s, t) from branch(x2)

:class:`AffineCoupling` bounds its scales, so that the inverse is well conditioned. Networks trained
elsewhere may not bound them: the branch of a :class:`ScaledCoupling` returns scale and shift.
MemCNN's two adapters make an ordinary branch return them (van de Leemput et al. 2019, JOSS 4(39)
1576). Known limit: with a scale near zero the reconstruction is wrong, and the guard raises.

Legend: B batch, C channels of one stream.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable, check_number
from revzoo.core.invertible import Invertible, State, name_of
from revzoo.core.kernels import round_to_grid
from revzoo.core.replay import Recorder
from revzoo.core.sums import add
from revzoo.core.words import Fixed, words_in
from revzoo.layers.streams import log_det_dtype, zero_log_det

# attribute: the methods that make its inherited value wrong if they change, and the value then
_FACTS: Mapping[str, tuple[frozenset[str], Any]] = {
    "replay": (frozenset(("forward",)), Invertible.replay),
    "log_det": (frozenset(("forward", "combine")), Invertible.log_det),
    "forward_with_log_det": (
        frozenset(("forward", "combine", "log_det")),
        Invertible.forward_with_log_det,
    ),
    "exact": (frozenset(("forward", "combine", "uncombine")), False),
    "adds": (frozenset(("forward", "combine", "uncombine", "replay")), False),
}


class Coupling(Invertible):
    """``(x1, x2) -> (x2, combine(x1, branch(x2)))``, inverted by ``uncombine``.

    A replay evaluates the branch once: the value inverts the coupling, and the saved tensors are
    recorded. With ``extras = n`` the branch returns a tuple: the value, then n extra outputs.
    Subclasses define :meth:`combine` and :meth:`uncombine`, and may define ``log_det``. A subclass
    with its own ``combine`` or ``forward`` does not inherit ``log_det``.

    Example:
        >>> class Xor(revzoo.Coupling):
        ...     def combine(self, x, value):
        ...         return x ^ value
        ...
        ...     uncombine = combine
        >>> Xor(nn.Identity()).inverse(*Xor(nn.Identity())(torch.tensor([5]), torch.tensor([3])))
        (tensor([5]), tensor([3]))
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # a subclass that changes the map inherits attributes that no longer hold: reset those that
        # it does not define itself; mixins before the first coupling may change the map, too
        bases = cls.__mro__[1:]
        first = next(i for i, c in enumerate(bases) if issubclass(c, Coupling))
        defined = {name for c in (cls, *bases[:first]) for name in vars(c)}
        for fact, (methods, default) in _FACTS.items():
            if methods & defined and fact not in defined:
                setattr(cls, fact, default)

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        check_callable("branch", branch)
        self.branch = branch

    def combine(self, x1: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define combine(x1, value) -> y2")

    def uncombine(self, y2: Tensor, value: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define uncombine(y2, value) -> x1")

    def forward(self, x1: Tensor, x2: Tensor, **context: Any) -> State:
        value, *extras = self._values(x2, context)
        return x2, self.combine(x1, value), *extras

    def inverse(self, y1: Tensor, y2: Tensor, **context: Any) -> State:
        return self.uncombine(y2, self._values(y1, context)[0]), y1

    def _values(self, x2: Tensor, context: Mapping[str, Any]) -> State:
        """The branch's value and its extra outputs."""
        return self._as_values(self.branch(x2, **context))

    def _as_values(self, values: Any) -> State:
        if not self.extras and isinstance(values, Tensor):
            return (values,)
        if not self.extras or not isinstance(values, tuple) or len(values) != 1 + self.extras:
            got = f"{len(values)} values" if isinstance(values, tuple) else type(values).__name__
            expected = f"a tuple of {1 + self.extras} tensors" if self.extras else "one tensor"
            raise TypeError(
                f"{type(self.branch).__name__} returned {got}, expected {expected}: wrap it in a "
                f"module that returns the tensor to combine in {name_of(self)}, or set the "
                "coupling's extras to the number of tensors after it"
            )
        return values

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        x2, y2 = outputs
        leaf2 = record.leaf(1, x2)
        # the branch runs once, for both purposes; Invertible.replay would run it twice
        value, *extras = self._values(leaf2, context)
        with torch.no_grad():
            x1 = self.uncombine(y2, value.detach())
        if not record.records:
            return (x1, x2), ()
        return (x1, x2), (leaf2, self.combine(record.leaf(0, x1), value), *extras)


class AdditiveCoupling(Coupling):
    """``(x1, x2) -> (x2, x1 + F(x2))`` (NICE, Dinh et al. 2014, arXiv 1410.8516).

    Args:
        branch: the residual function F, from ``(B, C, ...)`` to the same shape.

    Raises:
        ValueError: the shapes of the branch's value and ``x1`` differ.

    Example:
        >>> coupling = revzoo.AdditiveCoupling(nn.Identity())
        >>> coupling(torch.tensor([1.0]), torch.tensor([2.0]))
        (tensor([2.]), tensor([3.]))
        >>> coupling.inverse(torch.tensor([2.0]), torch.tensor([3.0]))
        (tensor([1.]), tensor([2.]))
    """

    exact = True
    sums = True
    adds = True

    def log_det(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return zero_log_det(x1)

    def checked_value(self, values: Any, stream: Tensor | Fixed) -> Tensor:
        """The tensor that the branch returned; it has the stream's shape."""
        if isinstance(values, Tensor) and values.shape == stream.shape:
            return values
        (value,) = self._as_values(values)
        self._check_shape(value, stream)
        return value

    def combine(self, x1: Tensor, value: Tensor) -> Tensor:
        self._check_shape(value, x1)
        if (fixed := words_in(self, x1)) is not None:
            return add(x1, value, fixed, self)
        return x1 + self.fitting(value, x1)

    def uncombine(self, y2: Tensor, value: Tensor) -> Tensor:
        self._check_shape(value, y2)
        if (fixed := words_in(self, y2)) is not None:
            return add(y2, -(value if value.is_floating_point() else value.float()), fixed, self)
        return y2 - self.fitting(value, y2)

    def _check_shape(self, value: Tensor, stream: Tensor | Fixed) -> None:
        if value.shape != stream.shape:
            raise ValueError(
                f"{type(self.branch).__name__} returned shape {tuple(value.shape)} for a stream of "
                f"shape {tuple(stream.shape)}: the residual function of an additive coupling must "
                "keep the shape"
            )

    def fitting(self, value: Tensor, stream: Tensor) -> Tensor:
        """``value`` as it is added to the stream: no wider, and on the step's grid."""
        # a wider value would widen the stream, so the inverse would not return the input's dtype
        wider = torch.promote_types(value.dtype, stream.dtype) != stream.dtype
        value = value.to(stream.dtype) if wider else value
        return round_to_grid(value, self.grid) if isinstance(self.grid, int) else value


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
