"""Small integers, packed into bytes."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def pack_bits(words: Tensor, bits: int) -> Tensor:
    """The low ``bits`` of each word; a byte holds as many words as fit."""
    slot = _slot_bits(bits)
    # a narrowing cast keeps the low bits, even of negative words (two's complement)
    low = words.to(torch.uint8).flatten()  # the low byte
    if rest := -len(low) % (8 // slot):
        low = nn.functional.pad(low, (0, rest))
    low &= 2**bits - 1
    # words far apart share a byte, so both packing and unpacking are whole-row operations
    packed, *parts = low.view(8 // slot, -1)
    for k, part in enumerate(parts, 1):
        packed |= part.bitwise_left_shift_(slot * k)
    # a copy, since a view would keep all rows in memory
    return packed.clone() if parts else packed


def unpack_bits(packed: Tensor, words: Tensor, bits: int) -> Tensor:
    """The result of :func:`pack_bits` as one byte for each of the ``words``, in their shape."""
    slot = _slot_bits(bits)
    parts = packed.new_empty(8 // slot, len(packed))
    for k, part in enumerate(parts):
        torch.bitwise_right_shift(packed, slot * k, out=part)
    parts &= 2**bits - 1
    return parts.flatten()[: words.numel()].view(words.shape)


def _slot_bits(bits: int) -> int:
    return next(slot for slot in (1, 2, 4, 8) if slot >= bits)
