"""Couplings: a residual function of one stream, combined with the other.

A coupling is invertible for any residual function, because the function's argument passes through
unchanged: with ``(y1, y2) = (x2, x1 + F(x2))``, ``x2 = y1`` and ``x1 = y2 - F(y1)``. Two couplings
form the block of Gomez et al. 2017 (arXiv 1707.04585, equation 6); one is the block of Jacobsen et
al. 2018 (arXiv 1802.07088).

Legend: B batch, C channels of one stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable
from revzoo.core.fixedpoint.rounding import round_to_grid
from revzoo.core.fixedpoint.words import Fixed, words_in
from revzoo.core.invertible import Invertible, State, name_of
from revzoo.core.replay import Recorder
from revzoo.core.sums import add
from revzoo.layers.streams import zero_log_det

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
