"""Splitting one tensor into two streams and merging them again.

Being steps themselves, they let a chain of sequences that pass one tensor on keep one state in
all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from revzoo.core.invertible import Invertible, State


class Split(Invertible):
    """``(B, 2C, ...) -> (B, C, ...), (B, C, ...)``: the two halves along dim 1.

    Raises:
        ValueError: fewer than two dimensions or an odd number of channels.
    """

    streams = 1
    exact = True

    def forward(self, x: Tensor) -> State:
        if x.dim() < 2 or x.shape[1] % 2:
            raise ValueError(
                f"got one tensor of shape {tuple(x.shape)} to split in two streams along dim 1: "
                "expected an even number of channels; pad the channels or pass two streams"
            )
        x1, x2 = x.chunk(2, dim=1)
        return x1, x2

    def inverse(self, x1: Tensor, x2: Tensor) -> State:
        return (torch.cat((x1, x2), dim=1),)


class Merge(Invertible):
    """``(B, C, ...), (B, C, ...) -> (B, 2C, ...)``: the inverse of :class:`Split`."""

    exact = True

    def forward(self, x1: Tensor, x2: Tensor) -> State:
        return (torch.cat((x1, x2), dim=1),)

    def inverse(self, y: Tensor) -> State:
        y1, y2 = y.chunk(2, dim=1)
        return y1, y2
