"""Layouts: how the elements of a tensor lie in memory.

Kernels choose by strides: what they save, in which order they sum, which element gets which random
number. So what a replay computes from must lie in memory as it did in the forward pass, or saved
tensors differ, masks are permuted, and compiled backward graphs refuse their inputs.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def laid_out(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``t`` with the given strides: itself if it has them, else a copy.

    Gaps between elements are reproduced, since kernels look at them; the copy needs the bytes of
    the tensor whose slice the original was. Elements that shared memory share it again: they were
    equal, and the reconstructions of one value differ by rounding only, so any of them will do.
    """
    if t.stride() == stride:
        return t
    with torch.no_grad():
        expanded = [d for d, (n, s) in enumerate(zip(t.shape, stride, strict=True)) if n > 1 > s]
        one = t
        for d in expanded:
            one = one.narrow(d, 0, 1)
        if _overlaps(tuple(one.shape), stride):
            return _overlapping(one, stride).expand_as(t)
        copy = one.new_empty_strided(one.shape, stride).copy_(one)
        return copy.expand_as(t) if expanded else copy


@functools.lru_cache(maxsize=256)
def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements may share memory: some stride is less than what the finer ones reach."""
    reach = 0
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False


def _overlapping(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    places = torch.zeros((), dtype=torch.int64, device=t.device)
    for d, (n, s) in enumerate(zip(t.shape, stride, strict=True)):
        steps = torch.arange(n, device=t.device) * s
        places = places + steps.view(-1, *[1] * (t.dim() - d - 1))
    reach = sum(s * (n - 1) for n, s in zip(t.shape, stride, strict=True))
    flat = t.new_zeros(reach + 1)
    flat[places] = t
    return flat.as_strided(t.shape, stride)


def dense(t: Tensor, like: Tensor) -> Tensor:
    """``t`` without gaps, over which torch sums in another order; channels last as in ``like``."""
    last = torch.channels_last
    lasts = t.dim() == like.dim() == 4 and like.is_contiguous(memory_format=last)
    if lasts and not like.is_contiguous():
        return t.contiguous(memory_format=last)
    if t.is_contiguous() or _reach(t) + 1 == t.numel():
        return t
    return t.clone(memory_format=torch.preserve_format)


def _reach(t: Tensor) -> int:
    """The place in memory of the last element, if the first one's is 0."""
    return sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))


def fills_its_memory(t: Tensor) -> bool:
    """Whether each byte of its storage belongs to exactly one element of ``t``."""
    if t.untyped_storage().nbytes() != t.nbytes:
        return False
    # An expanded row may have a storage of just the size that the tensor seems to have.
    return t.is_contiguous() or (
        not _overlaps(tuple(t.shape), t.stride()) and _reach(t) + 1 == math.prod(t.shape)
    )


def has_values(t: Tensor) -> bool:
    """Whether there is a value to look at: none on the meta device or in a fake tensor mode."""
    return t.numel() > 0 and t.device.type != "meta" and not isinstance(t, FakeTensor)
