"""The arithmetic on words: rounding to the grid, sums, and second differences.

A kernel fills tensors that its caller made. Floating-point values are rounded in float32, or in
float64 for words of 64 bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from revzoo.core.tensors import has_values, in_memory_order

_CHUNK = 2**16  # values; the operations of one sum stay in a CPU core's cache
_CHUNK_OF_DEVICES = 2**22  # values; a temporary tensor then has 16 MB, not the size of a stream

backend: str | None = None
"""The backend of ``torch.compile`` that fuses the operations of a sum; None runs them eagerly."""


def _computed_in(words: Tensor) -> torch.dtype:
    return torch.float64 if words.dtype == torch.int64 else torch.float32


def quantise(x: Tensor, words: Tensor, up: Tensor) -> None:
    """The words of ``x``: its values in units, rounded half to even."""
    words.copy_((x.to(_computed_in(words)) * up).round_())


def read(words: Tensor, floats: Tensor, down: Tensor) -> None:
    """The floats of ``words``."""
    if floats.dtype == _computed_in(words):
        floats.copy_(words).mul_(down)
    else:
        floats.copy_(words.to(_computed_in(words)).mul_(down))


def renew(floats: Tensor, words: Tensor, up: Tensor, down: Tensor) -> None:
    """The words of ``floats`` that changed since they were read."""
    new = torch.empty_like(words)
    quantise(floats, new, up)
    # only changed values: a float32 holds 24 bits of a word, so the others would lose bits (rule 3
    # of NOTE [ Words and floats ] in words.py)
    known = torch.empty_like(floats)
    read(words, known, down)
    # 1 where the float changed: on a CPU, booleans and torch.where are seven times as slow
    changed = known.ne_(floats).to(words.dtype)
    words += new.sub_(words).mul_(changed)


def subtract(words: Tensor, value: Tensor, out: Tensor, up: Tensor) -> None:
    """``out = words - value``, in units; ``value`` is rounded first."""
    quantise(value, out, up)
    torch.sub(words, out, out=out)


def add_and_read(
    x: Tensor, value: Tensor, words: Tensor, total: Tensor, up: Tensor, down: Tensor
) -> None:
    """``words = x + value``, in units, and its floats ``total``."""
    quantise(value, words, up)
    torch.add(x, words, out=words)
    read(words, total, down)


def subtract_and_read(
    x: Tensor, value: Tensor, words: Tensor, total: Tensor, up: Tensor, down: Tensor
) -> None:
    """``words = x - value``, in units, and its floats ``total``."""
    subtract(x, value, words, up)
    read(words, total, down)


def _difference(x: Tensor, value: Tensor, words: Tensor, of_value: Tensor, of_x: Tensor) -> None:
    """``of_value * value + of_x * x``, rounded; only the product with value and the sum round."""
    total = value.to(_computed_in(words)) * of_value
    words.copy_(total.addcmul_(x, of_x).round_())


def _factors(up: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The factors of the value and of x in the second difference, in units."""
    b = 2.0**-bits
    return up * (1 + b), up * (-2 * b)


def shift_in(
    before: Tensor,
    x: Tensor,
    value: Tensor,
    words: Tensor,
    total: Tensor,
    up: Tensor,
    down: Tensor,
    n: int,
) -> None:
    """``words = (1 + b) value - 2 b x + b before`` with ``b = 2**-n``, and its floats ``total``."""
    _difference(x, value, words, *_factors(up, n))
    # an arithmetic shift: it rounds down, also below zero, and shift_out adds the rest
    words += before >> n
    read(words, total, down)


def shift_out(total: Tensor, x: Tensor, value: Tensor, before: Tensor, up: Tensor, n: int) -> None:
    """The opposite of :func:`shift_in`: ``before`` from ``total``, its low ``n`` bits zero."""
    _difference(x, value, before, *_factors(up, n))
    torch.sub(total, before, out=before)
    before <<= n


# Their results do not depend on how a compiler orders or fuses the operations: each one is exact,
# or is a rounding.
_COMPILABLE = (quantise, read, subtract, add_and_read, subtract_and_read)


@functools.cache
def _compiled(fn: Callable[..., None], backend: str) -> Callable[..., None]:
    compiled: Callable[..., None] = torch.compile(fn, backend=backend, dynamic=True)
    return compiled


def in_chunks(fn: Callable[..., None], tensors: tuple[Tensor, ...], *options: Any) -> None:
    """``fn(*tensors, *options)``, piece by piece, so that its temporary tensors are small."""
    if backend is None and tensors[0].numel() <= _CHUNK:
        fn(*tensors, *options)
        return
    words = next(t for t in tensors if not t.is_floating_point())
    if backend is not None and fn in _COMPILABLE and has_values(words):
        _compiled(fn, backend)(*(_flat(tensors) or tensors), *options)
        return
    chunk = _CHUNK if words.device.type == "cpu" else _CHUNK_OF_DEVICES
    flat = _flat(tensors) if words.numel() > chunk else None
    if flat is None:
        fn(*tensors, *options)
    elif not has_values(words):
        fn(*[t[:chunk] for t in flat], *options)  # one piece takes the memory of all
    else:
        count = -(-words.numel() // chunk)
        for pieces in zip(*[t.chunk(count) for t in flat], strict=True):
            fn(*pieces, *options)


def _flat(tensors: tuple[Tensor, ...]) -> list[Tensor] | None:
    """The tensors as rows, if the same places in memory hold corresponding elements."""
    if any(t.stride() != tensors[0].stride() for t in tensors):
        return None
    flat = [t for t in map(in_memory_order, tensors) if t is not None]
    return flat if len(flat) == len(tensors) else None
