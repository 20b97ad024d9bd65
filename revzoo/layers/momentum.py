"""The momentum residual block, whose velocity makes any residual function invertible.

    v <- gamma v + (1 - gamma) F(x),   x <- x + v
    x = x - v,   v = (v - (1 - gamma) F(x)) / gamma              the inverse

M. Sander, P. Ablin, M. Blondel, G. Peyré, "Momentum Residual Neural Networks", ICML 2021, arXiv
2102.07870. F acts on all channels, and the formula is that of a residual network but for the
velocity. With the velocity 0 at first, gamma = 0 is the residual network itself.

In floating point each inverse divides rounding errors by gamma. Mode ``exact`` keeps the bits that
the product with gamma drops, see :mod:`revzoo.layers.scaled_words`: 1 bit for each value and block
where gamma is 0.5 or more. It computes with the float32 that is nearest to gamma, in float64 too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable, check_number
from revzoo.core.invertible import Invertible, State, name_of
from revzoo.core.replay import Recorder
from revzoo.core.sums import add
from revzoo.core.words import Fixed, words_in
from revzoo.layers.scaled_words import SMALLEST, divide, multiply


class MomentumBlock(Invertible):
    """``(x, v) -> (x + v', v')`` with ``v' = gamma v + (1 - gamma) F(x)``; both ``(B, C, ...)``.

    Outside of a backward pass, mode ``exact`` has no side bits: :meth:`inverse` computes in
    floating point.

    Args:
        branch: the residual function F, from ``(B, C, ...)`` to the same shape.
        gamma: the momentum, at least 0.001 and below 1.

    Raises:
        ValueError: ``gamma`` is out of range; at the call, the shapes of ``F(x)`` and ``x`` differ.

    Example:
        >>> block = revzoo.MomentumBlock(nn.Linear(4, 4), gamma=0.9)
        >>> x, v = block(torch.randn(2, 4), torch.zeros(2, 4))
    """

    exact = True
    exact_inverse = False
    sums = True

    def __init__(self, branch: nn.Module, gamma: float = 0.9) -> None:
        super().__init__()
        check_callable("branch", branch)
        check_number("gamma", gamma, low=SMALLEST, high=1, open_high=True)  # inverses divide by it
        self.branch = branch
        self.gamma = float(gamma)

    def forward(self, x: Tensor, v: Tensor, **context: Any) -> State:
        value, scaled = self._value(x, context), self.gamma * v
        fixed, fixed_x = words_in(self, v), words_in(self, x)
        if fixed is None or fixed_x is None:
            v = scaled + value
            return x + v, v
        v = add(scaled, value, fixed.with_words(multiply(fixed.words, self._scale())[0]), self)
        return add(x, v, fixed_x, self), v

    def inverse(self, y: Tensor, v: Tensor, **context: Any) -> State:
        x = y - v
        return x, (v - self._value(x, context)) / self.gamma

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        y, v = outputs
        fixed, fixed_y = words_in(self, v), words_in(self, y)
        x: Tensor | Fixed
        before: Tensor | Fixed
        with torch.no_grad():
            x = y - v if fixed_y is None else fixed_y.minus(v, fixed_y.down)
        leaf = record.leaf(0, x)
        value = self._value(leaf, context)
        with torch.no_grad():
            if fixed is None:
                before = (v - value) / self.gamma
            else:
                scaled = fixed.minus(value, fixed.down)
                words = divide(scaled.words, self._scale(), record.saved)
                before = scaled.with_words(words)
        if not record.records:
            return (x, before), ()
        # No gradient depends on the values of v, so x stands in for it. Then the guard does not
        # take v for read: a v of zeros comes back as rounding errors, and nothing amplifies them.
        again = self.gamma * record.leaf(1, leaf) + value
        return (x, before), (leaf + again, again)

    def _value(self, x: Tensor, context: Mapping[str, Any]) -> Tensor:
        """``(1 - gamma) F(x)`` in the type of ``x``."""
        value: Tensor = self.branch(x, **context)
        if value.shape != x.shape:
            raise ValueError(
                f"{type(self.branch).__name__} of {name_of(self)} returned shape "
                f"{tuple(value.shape)} for a stream of shape {tuple(x.shape)}: the residual "
                "function of a momentum block must keep the shape"
            )
        return (1 - self.gamma) * value.to(x.dtype)

    def _scale(self) -> Tensor:
        """Gamma for products of words: a number on the host, which reads it without a sync."""
        return torch.tensor(self.gamma, device="cpu")

    def extra_repr(self) -> str:
        return f"gamma={self.gamma}"
