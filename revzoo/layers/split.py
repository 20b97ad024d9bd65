"""Splitting one tensor into two streams and merging them again.

Being steps themselves, they let a chain of sequences that pass one tensor on keep one state in
all.

The halves are copies, dense in memory as reconstructed streams are. torch sums over a view with
gaps in another order than over a dense tensor, so a branch that begins with a normalisation would
not repeat its value bit for bit, as mode ``exact`` needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revzoo.core.invertible import Invertible, State
from revzoo.layers.streams import no_change_of_volume


def halves(x: Tensor, dim: int = 1) -> State:
    """The two halves of ``x`` along ``dim``, dense, with the order of its strides."""
    return tuple(t.clone(memory_format=torch.preserve_format) for t in x.chunk(2, dim=dim))


class Split(Invertible):
    """``(B, 2C, ...) -> (B, C, ...), (B, C, ...)``: the two halves along ``dim``.

    Raises:
        ValueError: the tensor has no such dimension, or its size there is odd.
    """

    streams = 1
    outputs = 2
    exact = True

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor, **context: Any) -> State:
        if not -x.dim() <= self.dim < x.dim() or x.shape[self.dim] % 2:
            raise ValueError(
                f"got one tensor of shape {tuple(x.shape)} to split in two streams along dim "
                f"{self.dim}: expected an even number of channels there; choose dim, pad the "
                "channels or pass two streams"
            )
        return halves(x, self.dim)

    def inverse(self, x1: Tensor, x2: Tensor, **context: Any) -> State:
        return (torch.cat((x1, x2), dim=self.dim),)

    def log_det(self, x: Tensor, **context: Any) -> Tensor:
        return no_change_of_volume(x)


class Merge(Invertible):
    """``(B, C, ...), (B, C, ...) -> (B, 2C, ...)``: the inverse of :class:`Split`."""

    exact = True
    outputs = 1

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x1: Tensor, x2: Tensor, **context: Any) -> State:
        # The gradient of cat() is a view of the merged one, which would live as long as either
        # half; the product's gradient is dense and separate.
        return (torch.cat((x1 * 1, x2 * 1), dim=self.dim),)

    def inverse(self, y: Tensor, **context: Any) -> State:
        return halves(y, self.dim)

    def log_det(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return no_change_of_volume(x1)
