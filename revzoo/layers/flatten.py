"""Invertible flattening, which stores the shape; ``torch.nn.Flatten`` forgets it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from revzoo._checks import counts_of, is_count
from revzoo.layers.streams import Streamwise


class InvertibleFlatten(Streamwise):
    """``(B, *shape) -> (B, prod(shape))`` for each stream, or only some of the dimensions.

    Args:
        shape: of one stream without its batch dimension, e.g. ``(C, H, W)``.
        start_dim: the first dimension to flatten, the batch being 0, as in torch; at least 1.
        end_dim: the last one.
        streams: number of streams of the state.

    Raises:
        ValueError: ``shape`` is empty or has a size below 1; a dimension is out of range; at the
            call, a stream has a different shape.

    Example:
        >>> flat = revzoo.InvertibleFlatten((4, 8, 8))
        >>> [tuple(y.shape) for y in flat(torch.zeros(2, 4, 8, 8), torch.zeros(2, 4, 8, 8))]
        [(2, 256), (2, 256)]
    """

    exact = True

    def __init__(
        self, shape: Sequence[int], *, start_dim: int = 1, end_dim: int = -1, streams: int = 2
    ) -> None:
        super().__init__(streams=streams)
        self.shape = counts_of(shape, repeat=0)
        if not self.shape:
            raise ValueError(f"shape={shape}: expected the sizes of one image, (C, H, W)")
        dims = 1 + len(self.shape)
        ends = (start_dim, end_dim)
        # 0 for a number that is not a dimension: the check below refuses it
        first, last = (d % dims if is_count(d, -dims) and d < dims else 0 for d in ends)
        if not 1 <= first <= last:
            raise ValueError(
                f"start_dim={start_dim}, end_dim={end_dim}: expected dimensions 1 to {dims - 1} of "
                f"(B, {', '.join(map(str, self.shape))}), the first not after the last"
            )
        self.start_dim, self.end_dim = first, last
        # shape has no batch dimension, so dimension d is its item d - 1
        self._sizes = self.shape[first - 1 : last]
        self._flat = (*self.shape[: first - 1], math.prod(self._sizes), *self.shape[last:])

    def transform(self, x: Tensor) -> Tensor:
        self._check(x, self.shape, "InvertibleFlatten")
        return x.flatten(self.start_dim, self.end_dim)

    def restore(self, y: Tensor) -> Tensor:
        self._check(y, self._flat, "the inverse of InvertibleFlatten")
        return torch.unflatten(y, self.start_dim, self._sizes)

    def _check(self, x: Tensor, expected: tuple[int, ...], name: str) -> None:
        if x.shape[1:] != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"{name} got a stream of shape {tuple(x.shape)}: expected (B, {sizes}); build it "
                "for the shape of one stream without its batch dimension"
            )

    def extra_repr(self) -> str:
        return f"{self.shape}, {self.start_dim} to {self.end_dim}, streams={self.streams}"
