"""Injective padding: channels of zeros for a wider network, and frames around images.

    (B, C, H, W) -> (B, C + extra, H, W)

A reversible network keeps the number of values, so it is as wide as its input. Appended channels of
zeros widen it without loss: the inverse strips them (the injective i-RevNet, Jacobsen et al. 2018,
arXiv 1802.07088). ``torch.nn.functional.pad`` has no inverse.

NOTE [ Zeros are not reconstructed ]
    In floating point, reconstructed zeros are noise of about 1e-6. A branch that reads them
    normalises this noise: the variance of zeros is 0, so a batch normalisation in training
    multiplies by ``1 / sqrt(eps)``, 316 with torch's default. Two of them turn 1e-6 into 0.1, so
    recomputed activations and gradients would be wrong. After two couplings, every channel of both
    streams depends on the image. So in mode ``invert`` the two couplings after a padding keep their
    inputs and are recomputed, and the inverse of the first one sets the zeros again before its
    branch reads them. Mode ``exact`` reconstructs the zeros, so training does not need this; but
    its inverse does, for features that were changed or read from a file.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice, check_count, counts_of
from revzoo.core.invertible import Invertible, State, Step
from revzoo.core.saved import keeping_shape_of
from revzoo.core.words import apply_with_words
from revzoo.layers.coupling import AdditiveCoupling
from revzoo.layers.streams import Streamwise

RECOMPUTED = 2  # couplings after a padding that are PaddedCouplings


class ChannelPadding(Invertible):
    """``(B, C, H, W) -> (B, C + extra, H, W)``, zeros last.

    Injective, not bijective: the inverse drops the extra channels, even if they are not zero.

    Args:
        extra: number of channels to append, at least 1.

    Raises:
        ValueError: ``extra`` is out of range; in the inverse, too few channels.

    Example:
        >>> revzoo.ChannelPadding(29)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 32, 32, 32])
    """

    streams = 1
    exact = True

    def __init__(self, extra: int) -> None:
        super().__init__()
        check_count("extra", extra)
        self.extra = extra

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        if x.dim() != 4:
            raise ValueError(
                f"ChannelPadding({self.extra}) got a stream of shape {tuple(x.shape)}: expected "
                "(B, C, H, W)"
            )
        # pairs from the last dimension on: width, height, channels
        return functional.pad(x, (0, 0, 0, 0, 0, self.extra))

    def inverse(self, y: Tensor, **context: Any) -> Tensor:
        if y.dim() != 4 or y.shape[1] <= self.extra:
            raise ValueError(
                f"the inverse of ChannelPadding({self.extra}) got a stream of shape "
                f"{tuple(y.shape)}: expected (B, C, H, W) with more than {self.extra} channels"
            )
        return y[:, : -self.extra]

    def extra_repr(self) -> str:
        return str(self.extra)


class SpatialPadding(Streamwise):
    """``(B, C, H, W) -> (B, C, H + top + bottom, W + left + right)`` for each stream.

    Injective: the inverse crops the frame, with any values. There is no log-determinant.
    NOTE [ Zeros are not reconstructed ] also applies to a constant frame, but a normalisation
    includes the rest of the channel, too.

    Args:
        padding: as ``torch.nn.functional.pad`` takes it: two numbers for each padded dimension,
            the last one first, ``(left, right, top, bottom)``; or one number for ``(B, C, H, W)``.
        mode: ``"constant"``, ``"reflect"``, ``"replicate"`` or ``"circular"``.
        value: of a constant padding; only 0 fits mode ``exact``.
        streams: number of streams of the state.

    Raises:
        ValueError: an argument is out of range; in the inverse, a stream without the frame.

    Example:
        >>> pad = revzoo.SpatialPadding((1, 2, 0, 0), mode="reflect", streams=1)
        >>> pad(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 3, 8, 11])
    """

    inexact = "its value is not a multiple of their unit"
    log_det = Invertible.log_det

    def __init__(
        self,
        padding: int | Sequence[int],
        *,
        mode: str = "constant",
        value: float = 0.0,
        streams: int = 2,
    ) -> None:
        super().__init__(streams=streams)
        self.padding = counts_of(padding, repeat=4, least=0)
        if not self.padding or len(self.padding) % 2:
            raise ValueError(
                f"padding={padding}: expected two numbers, 0 or more, for each dimension, the last "
                "dimension first"
            )
        check_choice("mode", mode, ("constant", "reflect", "replicate", "circular"))
        if value and mode != "constant":
            raise ValueError(f"value={value}: expected 0, since mode={mode!r} repeats the image")
        self.mode = mode
        self.value = value
        self.exact = not value

    def transform(self, x: Tensor) -> Tensor:
        padded = len(self.padding) // 2
        if x.dim() < 2 + padded:
            raise ValueError(
                f"SpatialPadding({self.padding}) got a stream of shape {tuple(x.shape)}: it pads "
                f"the last {padded} dimensions, but neither batch nor channels. Give two numbers "
                "for each dimension after the channels, (1, 1) for signals"
            )
        with keeping_shape_of(x):
            return functional.pad(x, self.padding, self.mode, self.value or None)

    def restore(self, y: Tensor) -> Tensor:
        frames = [a + b for a, b in zip(self.padding[::2], self.padding[1::2], strict=True)]
        sizes = y.shape[: 1 - y.dim() : -1]  # without batch and channels, the last one first
        if len(sizes) < len(frames) or any(map(operator.le, sizes, frames)):
            raise ValueError(
                f"the inverse of SpatialPadding({self.padding}) got a stream of shape "
                f"{tuple(y.shape)}: expected one that is larger than the frame"
            )
        return functional.pad(y, [-n for n in self.padding])

    def extra_repr(self) -> str:
        return f"{self.padding}, mode={self.mode!r}, value={self.value}, streams={self.streams}"


class ReadsZeros(Step):
    """A step that reads a padding's zeros: its mode is ``recompute`` if ``invert`` was set.

    See NOTE [ Zeros are not reconstructed ].
    """

    @property
    def memory(self) -> str:
        mode: str = vars(self).get("memory", "invert")  # as in every step
        return "recompute" if mode == "invert" else mode

    @memory.setter
    def memory(self, mode: str) -> None:
        vars(self)["memory"] = mode


class PaddedCoupling(ReadsZeros, AdditiveCoupling):
    """One of the two couplings after a padding (NOTE [ Zeros are not reconstructed ]).

    ``filled`` is the number of channels of the second input stream before the padding's zeros; None
    for all, as in the second coupling.
    """

    def __init__(self, branch: nn.Module, *, filled: int | None = None) -> None:
        super().__init__(branch)
        self.filled = filled

    def inverse(self, y1: Tensor, y2: Tensor, **context: Any) -> State:
        if self.filled is not None:
            (y1,) = apply_with_words(self._padded, (y1,))
        return super().inverse(y1, y2, **context)

    def _padded(self, y1: Tensor) -> Tensor:
        # a copy, since the caller may hold y1; the values are zero up to rounding
        y1 = y1.clone()
        y1[:, self.filled :] = 0
        return y1
