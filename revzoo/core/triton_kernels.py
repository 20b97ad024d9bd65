"""The kernels of :mod:`revzoo.core.kernels`, each as one Triton kernel.

torch runs a sum on words as ten kernels, and each reads and writes the whole stream. On a GPU that
takes longer than the arithmetic. Here a stream is read once and written once. Triton comes with
torch on Linux; without it, on a CPU and for words of 64 bits, torch's kernels run.

Results are equal bit for bit: each operation is exact, or rounds once. Only a sample with a value
beyond the range differs: here just that value reads as NaN, and the whole sample from the next sum
on.

Tensors of a sum are rows ``(B, n)`` of equal strides, with one scale each: a program handles
``_BLOCK`` values of one row. Bits are packed in the order of elements, whatever the layout in
memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024

# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"


@triton.jit
def _places(n, BLOCK: tl.constexpr):
    """Row, places in memory and mask of this program's values."""
    blocks = tl.cdiv(n, BLOCK)
    row = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    return row, row.to(tl.int64) * n + at, at < n


@triton.jit
def _rounded(units):
    """``units`` rounded, half to even, as int32."""
    # adding 2**23 leaves no bits for fractions; larger numbers have none
    size = tl.abs(units)
    whole = tl.where(size < 8388608.0, (size + 8388608.0) - 8388608.0, size)
    return tl.where(units < 0, -whole, whole).to(tl.int32)


@triton.jit
def _note_peak(peak, x, mask):
    """Raise a figure to the largest magnitude in ``x``; to NaN if there is one."""
    # the bits of floats that are not negative have the order of the floats, and NaN is the largest
    bits = tl.abs(x).to(tl.int32, bitcast=True)
    tl.atomic_max(peak, tl.max(tl.where(mask, bits, 0), 0), sem="relaxed")


@triton.jit
def _judge(figures, row, count, blocks, value, total, mask, up, down):
    """Write what a row reached, and its ``down``, NaN beyond the range, to ``figures (3, count)``.

    Until the row's last program ends, they are the peaks of value and total, and a count of
    programs.
    """
    _note_peak(figures + row, value, mask)
    _note_peak(figures + count + row, total, mask)
    # acquires and releases: the last program sees the peaks of all
    if tl.atomic_add(figures + 2 * count + row, 1) == blocks - 1:
        added = tl.load(figures + row).to(tl.float32, bitcast=True)
        after = tl.load(figures + count + row).to(tl.float32, bitcast=True)
        inside = added * up < 1073741824.0  # 2**30 units
        stays = inside & (after * up < 1073741824.0)
        # after a summand beyond the range, the sum means nothing
        larger = tl.maximum(added, after, propagate_nan=tl.PropagateNan.ALL)
        reached = tl.where(inside, larger, added)
        ended = tl.where(stays, down, float("nan"))
        tl.store(figures + row, reached.to(tl.int32, bitcast=True))
        tl.store(figures + count + row, ended.to(tl.int32, bitcast=True))


@triton.jit
def _quantise(value, words, up, figures, n, count, BLOCK: tl.constexpr):
    row, at, mask = _places(n, BLOCK)
    v = tl.load(value + at, mask=mask, other=0).to(tl.float32)
    scale = tl.load(up + row)
    tl.store(words + at, _rounded(v * scale), mask=mask)
    unit = tl.div_rn(1.0, scale)  # exact, for a power of two
    _judge(figures, row, count, tl.cdiv(n, BLOCK), v, v, mask, scale, unit)


@triton.jit
def _add_to(checksum, words, at, mask, PAIRS: tl.constexpr):
    """Add words to their sum, as ``kernels.sum_of`` does; a checksum of None needs none."""
    if checksum is not None:
        w = tl.where(mask, words, 0).to(tl.int64)
        if PAIRS:  # every second word is the upper half of 64 bits
            w = tl.where(at % 2 == 0, w & 4294967295, w << 32)
        tl.atomic_add(checksum, tl.sum(w, 0), sem="relaxed")


@triton.jit
def _subtract(words, value, out, up, n, checksum, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    row, at, mask = _places(n, BLOCK)
    v = tl.load(value + at, mask=mask, other=0).to(tl.float32)
    w = tl.load(words + at, mask=mask, other=0) - _rounded(v * tl.load(up + row))
    tl.store(out + at, w, mask=mask)
    _add_to(checksum, w, at, mask, PAIRS)


@triton.jit
def _read(words, floats, down, n, BLOCK: tl.constexpr):
    row, at, mask = _places(n, BLOCK)
    w = tl.load(words + at, mask=mask, other=0).to(tl.float32) * tl.load(down + row)
    tl.store(floats + at, w.to(floats.dtype.element_ty), mask=mask)


@triton.jit
def _add_and_read(
    x,
    value,
    words,
    total,
    up,
    down,
    figures,
    n,
    count,
    checksum,
    PAIRS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, at, mask = _places(n, BLOCK)
    v = tl.load(value + at, mask=mask, other=0).to(tl.float32)
    scale, unit = tl.load(up + row), tl.load(down + row)
    units = v * scale
    before = tl.load(x + at, mask=mask, other=0)
    _add_to(checksum, before, at, mask, PAIRS)
    w = before + _rounded(units)
    tl.store(words + at, w, mask=mask)
    t = w.to(tl.float32) * unit
    t = tl.where(tl.abs(units) < 1073741824.0, t, float("nan")).to(total.dtype.element_ty)
    tl.store(total + at, t, mask=mask)
    t = t.to(tl.float32)
    _judge(figures, row, count, tl.cdiv(n, BLOCK), v, t, mask, scale, unit)


@triton.jit
def _place_of(i, channels, size, MIXED: tl.constexpr):
    """The place in memory of element ``i``; ``MIXED``: ``(B, size, channels)`` there."""
    if not MIXED:
        return i
    sample = i // (channels * size) * (channels * size)
    within = i % (channels * size)
    return sample + within % size * channels + within // size


# One program handles bytes; word ``k * count + i`` has slot ``k`` of byte ``i``.


@triton.jit
def _pack_bits(
    words,
    shifted,
    packed,
    n,
    count,
    channels,
    size,
    BITS: tl.constexpr,
    SLOT: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.zeros((BLOCK,), tl.int32)
    for k in tl.static_range(8 // SLOT):
        mask = (i < count) & (k * count + i < n)
        at = _place_of(k * count + i, channels, size, MIXED)
        w = tl.load(words + at, mask=mask, other=0)
        byte |= (w & (2**BITS - 1)).to(tl.int32) << (SLOT * k)
        tl.store(shifted + at, (w >> BITS).to(shifted.dtype.element_ty), mask=mask)
    tl.store(packed + i, byte.to(tl.uint8), mask=i < count)


@triton.jit
def _unpack_bits(
    packed,
    shifted,
    words,
    n,
    count,
    channels,
    size,
    BITS: tl.constexpr,
    SLOT: tl.constexpr,
    MIXED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    byte = tl.load(packed + i, mask=i < count, other=0).to(tl.int32)
    for k in tl.static_range(8 // SLOT):
        mask = (i < count) & (k * count + i < n)
        at = _place_of(k * count + i, channels, size, MIXED)
        w = tl.load(shifted + at, mask=mask, other=0) << BITS
        low = (byte >> (SLOT * k)) & (2**BITS - 1)
        tl.store(words + at, (w | low).to(words.dtype.element_ty), mask=mask)


def quantise(value: Tensor, words: Tensor, up: Tensor) -> Tensor:
    """The words of ``value``. Returns what each sample reached, and its ``down``: ``(2, B)``.

    ``down`` is NaN beyond the range.
    """
    count, n = words.shape
    figures = words.new_zeros(3, count)
    _quantise[_grid(words)](value, words, up, figures, n, count, BLOCK=_BLOCK)
    return figures[:2].view(torch.float32)


def subtract(
    words: Tensor,
    value: Tensor,
    out: Tensor,
    up: Tensor,
    checksum: Tensor | None = None,
    pairs: bool = False,
) -> None:
    """``out = words - value``; ``out`` may have the memory of ``value``.

    Adds the words of ``out`` to ``checksum ()``, int64; in ``pairs``, two as one of 64 bits.
    """
    n = words.shape[1]
    _subtract[_grid(words)](words, value, out, up, n, checksum, PAIRS=pairs, BLOCK=_BLOCK)


def read(words: Tensor, floats: Tensor, down: Tensor) -> None:
    """The floats of ``words``."""
    _read[_grid(words)](words, floats, down, words.shape[1], BLOCK=_BLOCK)


def add_and_read(
    x: Tensor,
    value: Tensor,
    words: Tensor,
    total: Tensor,
    up: Tensor,
    down: Tensor,
    checksum: Tensor | None = None,
    pairs: bool = False,
) -> Tensor:
    """``words = x + value`` and its floats ``total``; adds the words of ``x`` to ``checksum``.

    Returns what each sample reached, and its ``down`` after it: ``(2, B)``.
    """
    count, n = words.shape
    figures = words.new_zeros(3, count)
    of_row = up, down, figures, n, count, checksum
    _add_and_read[_grid(words)](x, value, words, total, *of_row, PAIRS=pairs, BLOCK=_BLOCK)
    return figures[:2].view(torch.float32)


def pack_bits(words: Tensor, bits: int, slot: int) -> tuple[Tensor, Tensor]:
    """The low ``bits`` of each word, in slots of a byte, and ``words >> bits``."""
    shifted = torch.empty_like(words)
    packed = words.new_empty(triton.cdiv(words.numel(), 8 // slot), dtype=torch.uint8)
    _launch_bits(_pack_bits, (words, shifted, packed), packed, words, bits, slot)
    return packed, shifted


def unpack_bits(packed: Tensor, shifted: Tensor, bits: int, slot: int, words: Tensor) -> None:
    """Write the words that :func:`pack_bits` got to ``words``, which may be ``shifted``."""
    _launch_bits(_unpack_bits, (packed, shifted, words), packed, shifted, bits, slot)


def _launch_bits(kernel, tensors, packed, words, bits, slot) -> None:
    layout = layout_of(words)
    assert layout is not None
    channels, size = layout
    n, count = words.numel(), len(packed)
    options = {"BITS": bits, "SLOT": slot, "MIXED": channels > 1, "BLOCK": _BLOCK}
    kernel[(triton.cdiv(count, _BLOCK),)](*tensors, n, count, channels, size, **options)


def layout_of(words: Tensor) -> tuple[int, int] | None:
    """The channels and size of words in channels-last memory, 1 and 1 of contiguous ones.

    None of others, whose bits these kernels do not pack.
    """
    if words.is_contiguous():
        return 1, 1
    if words.dim() > 2 and words.movedim(1, -1).is_contiguous():
        return words.shape[1], words.shape[2:].numel()
    return None


def _grid(words: Tensor) -> tuple[int]:
    count, n = words.shape
    return (count * triton.cdiv(n, _BLOCK),)
