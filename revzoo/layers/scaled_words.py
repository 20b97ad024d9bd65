"""Products of fixed-point streams with a scale for each channel, undone bit for bit.

NOTE [ Scaled words ]
    A scale below 1 maps several words to one, so a product alone does not determine its factor.
    With ``scale = p / 2**s`` the product of a word x is ``w = floor(p x / 2**s)``. The words with
    the same w are ``ceil(w 2**s / p) + c`` with ``0 <= c < 1 / scale``. So we keep c: in
    ``ceil(log2(1 / scale))`` bits, 1 bit for scales from 0.5, none from 1 on. (The sign of the
    scale goes to the word.)

    p has 24 bits, so every float32 from 2**-7 on is such a scale, exactly; smaller ones are
    rounded to multiples of 2**-31. A float64 is rounded to 24 bits.

    Compare Maclaurin et al. 2015, arXiv 1502.03492, algorithm 3, whose buffer holds what the
    products drop as one integer. Here each bit of c is a plane, which holds the channels that need
    it; so a step reads its scales on the host. In a CUDA graph it cannot, and keeps 10 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from revzoo.core.saved import save_for_replay, saves_for_replay
from revzoo.core.tensors import capturing_cuda_graph, has_values, is_faked
from revzoo.layers.side_bits import pack_bits, unpack_bits

SMALLEST = 1e-3
"""The smallest magnitude of a scale."""

_MANTISSA = 24  # bits of a float32
_MOST_SHIFT = 31  # so that the products of words of 64 bits fit, in two parts
_BEYOND = 2.0**40  # p of a scale that is NaN or infinite
_PLANES = 10  # bits of c for the smallest scale
_CHUNK = {"cpu": 2**16}  # values that are multiplied together; they stay in a CPU core's cache
_CHUNK_OF_DEVICES = 2**22


def multiply(words: Tensor, scale: Tensor) -> tuple[Tensor, bool]:
    """The words ``(B, C, H, W)`` of the product with ``scale (1, C, 1, 1)``, rounded down.

    In a step that has a replay, it saves what :func:`divide` needs.

    Returns:
        The words; whether none is larger than its factor.
    """
    ratio = _Ratio.of(scale)
    counts = ratio.counts()
    product = torch.empty_like(words)
    dropped = torch.empty_like(words, dtype=torch.int16) if saves_for_replay() else None
    for rows in _chunks(words):
        product[rows], rest = ratio.times(words[rows].long())
        if dropped is not None:
            # exact in float64: a quotient that is no integer is 2**-24 away from one
            dropped[rows] = rest.double().div_(ratio.p)
    if dropped is not None:
        for bit, channels in enumerate(_planes(counts)):
            channels = channels.to(words.device)
            save_for_replay(channels)
            save_for_replay(pack_bits(_of(channels, dropped) >> bit, 1)[0])
    return product, counts is not None and min(counts) > 1


def divide(product: Tensor, scale: Tensor, saved: Sequence[Tensor]) -> Tensor:
    """The words ``(B, C, H, W)`` that :func:`multiply` got.

    It has saved, for each bit, its channels and its packed plane.
    """
    ratio = _Ratio.of(scale)
    dropped = torch.zeros_like(product, dtype=torch.int16)
    # from the highest bit on, whose channels all lower ones have, too
    for channels, packed in zip(saved[-2::-2], saved[::-2], strict=True):
        restored = unpack_bits(packed, _of(channels, dropped), 1)
        dropped = dropped.index_copy_(1, channels, restored) if len(channels) else restored
    words = torch.empty_like(product)
    for rows in _chunks(product):
        words[rows] = ratio.over(product[rows].long(), dropped[rows])
    return words


class _Ratio(NamedTuple):
    """A scale as ``sign p / 2**shift``, integers of 64 bits."""

    sign: Tensor
    p: Tensor
    shift: Tensor

    @staticmethod
    def of(scale: Tensor) -> _Ratio:
        scale = scale.detach().float()
        _, exponent = torch.frexp(scale)  # scale / 2**exponent is in [0.5, 1)
        shift = (_MANTISSA - exponent).clamp(0, _MOST_SHIFT).long()
        p = torch.ldexp(scale.abs().double(), shift).round()
        # the product with NaN or infinity is beyond every range
        p = p.nan_to_num(nan=_BEYOND, posinf=_BEYOND).long()
        return _Ratio(scale.sign().long(), p, shift)

    def counts(self) -> list[int] | None:
        """How many words have the same product, for each channel; None if the host cannot read."""
        if not has_values(self.p) or is_faked((self.p,)):
            return [2]  # as for 0.5: only shapes are wanted
        if capturing_cuda_graph():
            return None
        return (((1 << self.shift) + self.p - 1) // self.p).flatten().tolist()

    def times(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``p x / 2**shift`` rounded down, and the remainder."""
        x = x * self.sign
        # in two parts of 31 bits, whose products fit
        low = self.p * (x & (2**_MOST_SHIFT - 1))
        high = self.p * (x >> _MOST_SHIFT) + (low >> _MOST_SHIFT)
        low &= 2**_MOST_SHIFT - 1
        w = (high << (_MOST_SHIFT - self.shift)) + (low >> self.shift)
        return w, low & ((1 << self.shift) - 1)

    def over(self, w: Tensor, c: Tensor) -> Tensor:
        """``ceil(2**shift w / p) + c``, with the sign."""
        whole = w // self.p
        part = (w - whole * self.p) << self.shift
        return ((whole << self.shift) - (-part // self.p) + c) * self.sign


def _chunks(words: Tensor) -> Iterator[slice]:
    """Parts of the batch, so that the temporary tensors stay small."""
    chunk = _CHUNK.get(words.device.type, _CHUNK_OF_DEVICES)
    rows = max(1, chunk // max(1, words[:1].numel()))
    return (slice(at, at + rows) for at in range(0, len(words), rows))


def _planes(counts: list[int] | None) -> list[Tensor]:
    """For each bit of c, the channels that need it; none listed for all of them."""
    if counts is None:
        return [torch.empty(0, dtype=torch.int64)] * _PLANES
    needed = range((max(counts) - 1).bit_length())
    channels = [[i for i, n in enumerate(counts) if n > 2**bit] for bit in needed]
    return [torch.tensor(c * (len(c) < len(counts)), dtype=torch.int64) for c in channels]


def _of(channels: Tensor, t: Tensor) -> Tensor:
    """The ``channels`` of ``t``; all if none is listed."""
    return t[:, channels] if len(channels) else t
