"""Channel permutations, so that couplings change all channels over time.

A coupling changes one half of the channels. RealNVP (Dinh et al. 2017, arXiv 1605.08803) reverses
or alternates them between couplings, others shuffle them by a fixed random permutation (Ardizzone
et al. 2019, arXiv 1907.02392). Values only move, so the layer is exact on fixed-point streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from revzoo._checks import counts_of
from revzoo.layers.streams import Joint


class ChannelPermutation(Joint):
    """Channel ``i`` of the output is channel ``order[i]`` of the input, all streams together.

    Args:
        channels: of all streams together.
        order: ``"random"``, ``"reverse"`` or the permutation itself.
        seed: seed of the random order, which depends on no other random state.
        dim: dimension of the channels, 1 or -1.
        streams: number of streams of the state.

    The order is a buffer: loading a checkpoint replaces it.

    Raises:
        ValueError: ``order`` is not a permutation; at the call, the number of channels differs.

    Example:
        >>> revzoo.ChannelPermutation(4, order="reverse", streams=1)(torch.arange(4.0)[None])
        tensor([[3., 2., 1., 0.]])
    """

    exact = True

    order: Tensor

    def __init__(
        self,
        channels: int,
        *,
        order: Literal["random", "reverse"] | Sequence[int] = "random",
        seed: int = 0,
        dim: int = 1,
        streams: int = 2,
    ) -> None:
        super().__init__(channels, dim=dim, streams=streams)
        self.register_buffer("order", _permutation(channels, order, seed))

    def transform(self, x: Tensor) -> Tensor:
        return x.index_select(self.dim, self.order)

    def restore(self, y: Tensor) -> Tensor:
        return y.index_select(self.dim, self.order.argsort())


def _permutation(channels: int, order: str | Sequence[int], seed: int) -> Tensor:
    if isinstance(order, str) and order == "random":
        return torch.randperm(channels, generator=torch.Generator().manual_seed(seed))
    if isinstance(order, str) and order == "reverse":
        return torch.arange(channels - 1, -1, -1)
    values = order.tolist() if hasattr(order, "tolist") else order  # arrays of NumPy and torch
    numbers = counts_of(values, repeat=0, least=0)
    if sorted(numbers) != list(range(channels)):
        raise ValueError(
            f"order={order!r}: expected 'random', 'reverse' or each of 0 to {channels - 1} once"
        )
    return torch.tensor(numbers)
