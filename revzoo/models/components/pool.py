"""Pooling of feature maps or tokens over all their places, by timm's names (R. Wightman).

avg         mean over the places
max         largest value
avgmax      half of their sum
catavgmax   both, side by side: twice the channels
(empty)     no pooling: returns the map or the tokens
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice

Places = tuple[int, ...]


def _avg(x: Tensor, places: Places) -> Tensor:
    return x.mean(places)


def _max(x: Tensor, places: Places) -> Tensor:
    return x.amax(places)


POOLS: dict[str, Callable[[Tensor, Places], Tensor]] = {
    "avg": _avg,
    "max": _max,
    "avgmax": lambda x, places: 0.5 * (_avg(x, places) + _max(x, places)),
    "catavgmax": lambda x, places: torch.cat((_avg(x, places), _max(x, places)), dim=1),
    # timm's name for no pooling is the empty string
    "": lambda x, places: x,
}


class GlobalPool(nn.Module):
    """``(B, C, H, W)`` or ``(B, N, C)`` to ``(B, C * widening)``.

    Args:
        kind: a name in :data:`POOLS`.
        places: the dimensions to pool over: ``(2, 3)`` of maps, ``(1,)`` of tokens.

    Raises:
        ValueError: unknown kind.
    """

    def __init__(self, kind: str, *, places: Places) -> None:
        super().__init__()
        check_choice("global_pool", kind, POOLS)
        self.kind = kind
        self.places = places

    @property
    def widening(self) -> int:
        """Output channels divided by input channels."""
        return 2 if self.kind == "catavgmax" else 1

    def forward(self, x: Tensor) -> Tensor:
        return POOLS[self.kind](x, self.places)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, places={self.places}"
