"""Flattening with a way back: ``torch.nn.Flatten`` forgets the shape, this layer is given it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from revzoo.layers.streams import Streamwise


class InvertibleFlatten(Streamwise):
    """``(B, *shape) -> (B, prod(shape))`` for each stream.

    Args:
        shape: of one stream without its batch dimension, e.g. ``(C, H, W)``.
        streams: how many streams the state has.

    Raises:
        ValueError: ``shape`` is empty or holds a size below 1; at the call, another shape.

    Example::

        InvertibleFlatten((4, 8, 8))(x1, x2)  # two of (B, 256)
    """

    exact = True

    def __init__(self, shape: Sequence[int], *, streams: int = 2) -> None:
        super().__init__(streams=streams)
        self.shape = tuple(shape)
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape={self.shape}: expected the sizes of one image, (C, H, W)")

    def transform(self, x: Tensor) -> Tensor:
        self._check(x, self.shape, "InvertibleFlatten")
        return x.flatten(1)

    def restore(self, y: Tensor) -> Tensor:
        self._check(y, (math.prod(self.shape),), "the inverse of InvertibleFlatten")
        return torch.unflatten(y, 1, self.shape)

    def _check(self, x: Tensor, expected: tuple[int, ...], name: str) -> None:
        if x.shape[1:] != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"{name} got a stream of shape {tuple(x.shape)}: expected (B, {sizes}); build it "
                "for the shape of one stream without its batch dimension"
            )

    def extra_repr(self) -> str:
        return f"{self.shape}, streams={self.streams}"
