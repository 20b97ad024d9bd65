"""Splitting one tensor into two streams and merging them again.

Both are steps, so a chain of sequences that exchange one tensor still keeps only one state.

The halves are dense copies, like reconstructed streams. torch sums a view with gaps in a different
order than a dense tensor. So a branch that begins with a normalisation would not repeat its value
bit for bit, as mode ``exact`` needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo._checks import counts_of, is_count
from revzoo.core.invertible import Invertible, State
from revzoo.layers.streams import zero_log_det

Parts = tuple[int, int]
HALVES: Parts = (1, 1)


def halves(x: Tensor, dim: int = 1, parts: Parts = HALVES) -> State:
    """Two pieces of ``x`` along ``dim`` with relative sizes ``parts``, as dense copies.

    Raises:
        ValueError: the tensor has no such dimension, its size is not divisible, or it is nested.
    """
    _check_has(x, dim)
    if x.is_nested:  # the backward pass of torch.split would end in a segmentation fault
        raise ValueError("got a nested tensor to split in two streams: pass two streams instead")
    unit = x.shape[dim] // sum(parts)  # not divmod(), which torch.jit.trace does not take
    if x.shape[dim] % sum(parts):
        number = "an even number" if parts == HALVES else f"a multiple of {sum(parts)}"
        raise ValueError(
            f"got one tensor of shape {tuple(x.shape)} to split in two streams along dim={dim}: "
            f"expected {number} of channels there; choose another dim, other relative sizes "
            "(split= of a sequence, parts= of Split), pad the channels or pass two streams"
        )
    # not torch.split alone, whose pieces are views with gaps: see the module
    pieces = torch.split(x, [unit * n for n in parts], dim)
    return tuple(t.clone(memory_format=torch.preserve_format) for t in pieces)


def check_cut(dim: int, parts: Sequence[int], *, name: str = "parts") -> tuple[int, Parts]:
    """``dim`` and ``parts`` as Split and Merge keep them; ``name`` is the argument for ``parts``.

    Raises:
        ValueError: ``dim`` is not a whole number, ``parts`` are not two positive ones.
    """
    if not is_count(dim, least=-sys.maxsize):
        raise ValueError(f"dim={dim!r}: expected a dimension of the tensor, such as 1 or -1")
    counts = counts_of(parts, repeat=0)
    if len(counts) != 2:
        raise ValueError(
            f"{name}={parts!r}: expected the relative sizes of two streams, two whole numbers of "
            "at least 1, such as (1, 2)"
        )
    return int(dim), (counts[0], counts[1])


def _check_has(x: Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        fits = f"a dim from {-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with dimensions"
        raise ValueError(f"dim={dim}: got a tensor of shape {tuple(x.shape)}, expected {fits}")


class _Cut(Invertible):
    exact = True

    def __init__(self, dim: int = 1, parts: Parts = HALVES) -> None:
        super().__init__()
        self.dim, self.parts = check_cut(dim, parts)

    def log_det(self, x: Tensor, *others: Tensor, **context: Any) -> Tensor:
        return zero_log_det(x)


class Split(_Cut):
    """``(B, 2C, ...) -> (B, C, ...), (B, C, ...)``: the two halves along ``dim``.

    Args:
        dim: where the tensor is split.
        parts: relative sizes of the pieces: ``(1, 2)`` splits 3 channels into 1 and 2.

    Raises:
        ValueError: the tensor has no such dimension, or its size is not divisible.

    Example:
        >>> revzoo.Split()(torch.arange(4.0)[None])
        (tensor([[0., 1.]]), tensor([[2., 3.]]))
    """

    streams = 1
    outputs = 2

    def forward(self, x: Tensor, **context: Any) -> State:
        return halves(x, self.dim, self.parts)

    def inverse(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return torch.cat((x1, x2), dim=self.dim)


class Merge(_Cut):
    """``(B, C, ...), (B, C, ...) -> (B, 2C, ...)``: the inverse of :class:`Split`.

    Raises:
        ValueError: the sizes of the streams do not match ``parts``.

    Example:
        >>> revzoo.Merge()(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[0., 0., 1., 1.]])
    """

    outputs = 1

    def forward(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        _check_has(x1, self.dim)
        first, second = self.parts
        if x1.shape[self.dim] * second != x2.shape[self.dim] * first:
            raise ValueError(
                f"got streams of shape {tuple(x1.shape)} and {tuple(x2.shape)} to merge along "
                f"dim={self.dim}: expected sizes of {first} to {second} there, or the inverse "
                "would cut elsewhere. A coupling swaps the streams, a ReversibleBlock swaps them "
                "back; or pass the streams one by one"
            )
        # the gradients of cat() are views of one tensor, which would live as long as either of
        # them; the gradient of a product is dense and separate. Words have no gradient
        words = x1.dtype in (torch.int32, torch.int64)
        pieces = (x1, x2) if words else (x1 * 1, x2 * 1)
        return torch.cat(pieces, dim=self.dim)

    def inverse(self, y: Tensor, **context: Any) -> State:
        return halves(y, self.dim, self.parts)
