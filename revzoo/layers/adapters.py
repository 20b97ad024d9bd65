"""MemCNN's two adapters: they make an ordinary branch return scale and shift.

For :class:`~revzoo.ScaledCoupling` (van de Leemput et al. 2019, MemCNN, JOSS 4(39) 1576).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable
from revzoo.core.invertible import State


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
