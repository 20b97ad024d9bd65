"""Layers that rearrange values: squeezes (also with Haar wavelets), flattening, permutations.

A squeeze is an invertible downsampling, space to depth:

    (B, C, H, W) -> (B, b*b*C, H/b, W/b)

and likewise for signals ``(B, C, L)`` and volumes ``(B, C, D, H, W)``, with a factor per axis.
Convolutions with stride lose information; a squeeze only moves it (the psi of i-RevNet, Jacobsen
et al. 2018, arXiv 1802.07088, section 3.2; RealNVP, Dinh et al. 2017, arXiv 1605.08803). torch has
the operation for images, a single factor and one channel order, ``pixel_unshuffle``; published
i-RevNet weights need the other. torch has no wavelets, and ``torch.nn.Flatten`` forgets the shape.

===========  =========================================  ==================
``order``    channel that pixel (dy, dx) of c goes to   used by
===========  =========================================  ==================
``torch``    ``(c*b + dy)*b + dx``                      pixel_unshuffle
``irevnet``  ``(dy*b + dx)*C + c``                      the i-RevNet release
===========  =========================================  ==================
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from revzoo._checks import check_choice, counts_of, is_count
from revzoo.layers.streams import Joint, Streamwise

Order = Literal["torch", "irevnet"]


class Squeeze(Streamwise):
    """``(B, C, H, W) -> (B, b*b*C, H/b, W/b)`` for each stream of the state.

    Args:
        factor: b, at least 2, for images; or one for each axis after the channels, at least 1:
            ``(b,)`` for signals, ``(1, 2, 2)`` for volumes that keep their depth.
        order: of the new channels, ``"torch"`` or ``"irevnet"`` (see the module).
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, height or width (in the inverse:
            channels) are not divisible.

    Example:
        >>> squeeze = revzoo.Squeeze(2)
        >>> [tuple(y.shape) for y in squeeze(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))]
        [(1, 12, 16, 16), (1, 12, 16, 16)]
    """

    exact = True

    def __init__(
        self, factor: int | Sequence[int] = 2, *, order: Order = "torch", streams: int = 2
    ) -> None:
        super().__init__(streams=streams)
        self.factors = counts_of(factor, repeat=2)
        if math.prod(self.factors) < 2:
            raise ValueError(
                f"factor={factor!r}: expected a whole number of at least 2, or one of at least 1 "
                "for each axis, not all 1"
            )
        check_choice("order", order, ("torch", "irevnet"))
        self.factor = factor
        self.order: Order = order

    def transform(self, x: Tensor) -> Tensor:
        sizes = x.shape[2:]
        if len(sizes) != len(self.factors) or any(map(int.__mod__, sizes, self.factors)):
            raise ValueError(
                f"{type(self).__name__}({self._shown}) got a stream of shape {tuple(x.shape)}: "
                f"expected {self._expected} with sizes divisible by {self._shown}; pad or crop "
                "it, or give one factor for each axis after the channels"
            )
        return self._mixed(_squeezed(x, self.factors, order=self.order))

    def restore(self, y: Tensor) -> Tensor:
        block = math.prod(self.factors)
        if y.dim() != len(self.factors) + 2 or y.shape[1] % block:
            raise ValueError(
                f"the inverse of {type(self).__name__}({self._shown}) got a stream of shape "
                f"{tuple(y.shape)}: expected {self._expected} with channels divisible by {block}"
            )
        return unsqueezed(self._mixed(y), self.factors, order=self.order)

    def _mixed(self, y: Tensor) -> Tensor:
        """Mixes the channels of a block; its own inverse."""
        return y

    @property
    def _shown(self) -> str:
        same = len(self.factors) == 2 and len({*self.factors}) == 1
        return str(self.factors[0] if same else self.factors)

    @property
    def _expected(self) -> str:
        names = {1: "L", 2: "H, W", 3: "D, H, W"}
        return f"(B, C, {names.get(len(self.factors), '...')})"

    def extra_repr(self) -> str:
        return f"{self._shown}, order={self.order!r}"


class HaarSqueeze(Squeeze):
    """``(B, C, H, W) -> (B, 4C, H/2, W/2)`` for each stream: Haar bands of 2x2 blocks.

    Each block of pixels ``a b / c d`` becomes an average and three details:

        low        (a + b + c + d) / 2        horizontal (a - b + c - d) / 2
        vertical   (a + b - c - d) / 2        diagonal   (a - b - c + d) / 2

    The map is orthonormal (Haar 1910; Ardizzone et al. 2019, arXiv 1907.02392, section 3.2) and is
    its own inverse on a block. Halving leaves the fixed-point grid, so mode ``exact`` refuses the
    layer.

    Args:
        order: ``"torch"`` puts the four bands of a channel next to each other, ``"irevnet"`` the
            channels of a band, all averages first.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; at the call, height or width are odd (in the
            inverse: channels are not a multiple of 4).

    Example:
        >>> haar = revzoo.HaarSqueeze()
        >>> [tuple(y.shape) for y in haar(torch.zeros(1, 3, 8, 8), torch.zeros(1, 3, 8, 8))]
        [(1, 12, 4, 4), (1, 12, 4, 4)]
    """

    exact = False
    inexact = "it halves sums, which leaves the grid"

    def __init__(self, *, order: Order = "torch", streams: int = 2) -> None:
        super().__init__(2, order=order, streams=streams)

    def _mixed(self, y: Tensor) -> Tensor:
        dim, shape = (2, (-1, 4)) if self.order == "torch" else (1, (4, -1))
        a, b, c, d = torch.unflatten(y, 1, shape).unbind(dim)
        # two butterflies: 8 additions per block instead of the 12 of the formulas
        above, below = a + b, c + d
        across_above, across_below = a - b, c - d
        bands = (
            above + below,
            across_above + across_below,
            above - below,
            across_above - across_below,
        )
        return torch.stack(bands, dim).flatten(1, 2) / 2


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


class ChannelPermutation(Joint):
    """Channel ``i`` of the output is channel ``order[i]`` of the input, all streams together.

    A coupling changes one half of the channels. RealNVP (Dinh et al. 2017, arXiv 1605.08803)
    reverses or alternates them between couplings, others shuffle them by a fixed random permutation
    (Ardizzone et al. 2019, arXiv 1907.02392).

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


def _squeezed(x: Tensor, factors: tuple[int, ...], *, order: Order) -> Tensor:
    batch, channels, *sizes = x.shape
    small = [n // b for n, b in zip(sizes, factors, strict=True)]
    # one kernel instead of a permuted copy; it returns empty tensors in their old shape
    if x.numel() and order == "torch" and len(factors) == 2 and factors[0] == factors[1]:
        return functional.pixel_unshuffle(x, factors[0])
    # (B, C, H/b, b, W/b, b), then the blocks' axes go to the channels
    pairs = [n for pair in zip(small, factors, strict=True) for n in pair]
    inner = range(3, 3 + 2 * len(factors), 2)
    outer = range(2, 2 + 2 * len(factors), 2)
    axes = (1, *inner) if order == "torch" else (*inner, 1)
    blocks = x.reshape(batch, channels, *pairs).permute(0, *axes, *outer)
    return blocks.reshape(batch, channels * math.prod(factors), *small)


def unsqueezed(y: Tensor, factors: tuple[int, ...], *, order: Order) -> Tensor:
    """The inverse of a squeeze: ``(B, b1*b2*C, H, W) -> (B, C, b1*H, b2*W)``."""
    batch, channels, *small = y.shape
    channels //= math.prod(factors)
    if y.numel() and order == "torch" and len(factors) == 2 and factors[0] == factors[1]:
        return functional.pixel_shuffle(y, factors[0])
    n = len(factors)
    split = (channels, *factors) if order == "torch" else (*factors, channels)
    first, at = (2, 1) if order == "torch" else (1, 1 + n)  # of the blocks' axes, of C
    pairs = [axis for i in range(n) for axis in (2 + n + i, first + i)]
    blocks = y.reshape(batch, *split, *small).permute(0, at, *pairs)
    sizes = [m * b for m, b in zip(small, factors, strict=True)]
    return blocks.reshape(batch, channels, *sizes)


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
