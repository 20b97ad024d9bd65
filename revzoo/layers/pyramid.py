"""Steps on the levels of a feature pyramid: streams of different shapes, the finest first.

    LevelCoupling   x_i += F(x_j)              additive, between any two streams
    SplitLevels     splits each level in halves, the streams of a residual block's couplings
    NewLevel        appends a level of zeros
    MergePyramid    puts all levels in one tensor, by space to depth
    ChannelCopies   repeats the image's channels, to fill the first level
    Rearranged      moves the values of some successive streams

All are exact: sums and moves of values. ``torch.nn`` has maps of one tensor only.

Shapes: B batch, C channels, H, W height and width of a level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo.core.invertible import Invertible, State, as_state, bare
from revzoo.layers.coupling import AdditiveCoupling
from revzoo.layers.streams import Merge, halves

_MERGE = Merge()


class LevelCoupling(AdditiveCoupling):
    """``x_i += F(x_j)`` for two streams, target and source, which may differ in shape."""

    exact = True
    pair: tuple[int, int]

    def __init__(self, branch: nn.Module, *, target: int, source: int, streams: int) -> None:
        super().__init__(branch)
        self.pair = target, source
        self.streams = streams

    def forward(self, *state: Tensor, **context: Any) -> State:
        i, j = self.pair
        y = self.combine(state[i], self._values(state[j], context)[0])
        return *state[:i], y, *state[i + 1 :]

    def inverse(self, *state: Tensor, **context: Any) -> State:
        i, j = self.pair
        x = self.uncombine(state[i], self._values(state[j], context)[0])
        return *state[:i], x, *state[i + 1 :]

    def extra_repr(self) -> str:
        return "target={}, source={}, streams={}".format(*self.pair, self.streams)


class ChannelCopies(Invertible):
    """``(B, of, H, W) -> (B, channels, H, W)``: repeats the channels in order; injective."""

    streams = 1
    exact = True
    guarded = False

    def __init__(self, channels: int, *, of: int) -> None:
        super().__init__()
        self.channels = channels
        self.of = of

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return x.repeat(1, -(-self.channels // self.of), 1, 1)[:, : self.channels]

    def inverse(self, y: Tensor, **context: Any) -> Tensor:
        return y[:, : self.of]


class SplitLevels(Invertible):
    """The halves of each level: ``(x_0, x_1, ...) -> (a_0, b_0, a_1, b_1, ...)``.

    A level ``(B, C, H, W)`` becomes two streams ``(B, C / 2, H, W)``.
    """

    exact = True
    guarded = False  # the couplings beside it are

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.streams = levels

    @property
    def outputs(self) -> int:
        return 2 * self.streams

    def forward(self, *state: Tensor, **context: Any) -> State:
        return tuple(half for x in state for half in halves(x))

    def inverse(self, *state: Tensor, **context: Any) -> State:
        return tuple(map(_MERGE.forward, state[::2], state[1::2]))


class NewLevel(Invertible):
    """Appends a level of zeros ``(B, channels, H / 2, W / 2)``; the inverse drops it.

    The last level before is ``(B, C, H, W)``.
    """

    exact = True
    guarded = False

    def __init__(self, channels: int, *, levels: int) -> None:
        super().__init__()
        self.channels = channels
        self.streams = levels

    @property
    def outputs(self) -> int:
        return self.streams + 1

    def forward(self, *state: Tensor, **context: Any) -> State:
        batch, _, height, width = state[-1].shape
        # the couplings that follow add to it; the first that reads it comes after them
        zeros = state[-1].new_zeros(batch, self.channels, height // 2, width // 2)
        return *state, zeros

    def inverse(self, *state: Tensor, **context: Any) -> State:
        return state[:-1]


class MergePyramid(Invertible):
    """All levels in one tensor of the coarsest size: finer levels are squeezed (space to depth).

    Level i of L, ``(B, c_i, H 2^(L-1-i), W 2^(L-1-i))``, gives ``c_i 4^(L-1-i)`` channels.
    """

    exact = True
    outputs = 1

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.streams = len(channels)
        self.factors = [2**i for i in reversed(range(self.streams))]
        self.sizes = [c * f**2 for c, f in zip(channels, self.factors, strict=True)]

    def forward(self, *state: Tensor, **context: Any) -> Tensor:
        return torch.cat([*map(functional.pixel_unshuffle, state, self.factors)], dim=1)

    def inverse(self, z: Tensor, **context: Any) -> State:
        return tuple(map(functional.pixel_shuffle, torch.split(z, self.sizes, dim=1), self.factors))


class Rearranged(Invertible):
    """Moves the values of some successive streams; the other streams pass.

    The function ``there`` takes some streams, beginning ``at`` one, and gives others; ``back`` is
    its inverse.
    """

    exact = True
    guarded = False

    def __init__(
        self,
        there: Callable[..., Tensor | State],
        back: Callable[..., Tensor | State],
        *,
        at: int,
        streams: int,
        takes: int,
        gives: int,
    ) -> None:
        super().__init__()
        self.there, self.back = there, back
        self.at, self.streams, self.takes, self.gives = at, streams, takes, gives

    @property
    def outputs(self) -> int:
        return self.streams - self.takes + self.gives

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._moved(self.there, state, self.takes)

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._moved(self.back, state, self.gives)

    def _moved(self, fn: Callable[..., Tensor | State], state: State, count: int) -> Tensor | State:
        end = self.at + count
        return bare((*state[: self.at], *as_state(fn(*state[self.at : end])), *state[end:]))
