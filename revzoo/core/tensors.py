"""Properties of single tensors: their memory, version and layout.

Strides decide what kernels save, in which order they sum, and which element gets which random
number. So the inputs of a replay need the strides of the forward pass. With others, saved tensors
differ, masks are permuted, and compiled backward graphs refuse their inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter


def storage_id(t: Tensor) -> int:
    """Identifies the storage of ``t`` while it lives, even an empty one."""
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
        return _address_without_storage(t)


def _address_without_storage(t: Tensor) -> int:
    if t.layout == torch.sparse_coo:
        return storage_id(t._values())
    if t.layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        return storage_id(t.values())
    return -id(t)  # no storage has a negative storage_id


def bytes_of(t: Tensor) -> int:
    """The bytes of a tensor's storage; 0 if it has none."""
    try:
        return t.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # sparse, or opaque to torch
        return 0


def version_of(t: Tensor) -> int:
    """The number of in-place changes of ``t``; 0 for inference tensors."""
    try:
        return t._version
    except RuntimeError:
        return 0


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """:func:`version_of` each tensor."""
    try:
        return [t._version for t in tensors]
    except RuntimeError:
        return [version_of(t) for t in tensors]


def values_of(t: Tensor) -> Tensor:
    """The plain tensor with the values of ``t``: for a DTensor, the part on this device."""
    while is_traceable_wrapper_subclass(t):
        inner, _ = t.__tensor_flatten__()
        t = getattr(t, inner[0])
    return t


def detached(t: Tensor) -> Tensor:
    """A detached alias; integers themselves: a nested tensor knows its sizes by their identity."""
    return t.detach() if t.is_floating_point() or t.is_complex() else t


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    return [t for t in tree_iter(tree) if isinstance(t, Tensor)]


def unshared(t: Tensor) -> bool:
    """Whether no other tensor uses the storage of ``t``, so that it may be overwritten."""
    if _use_count is None:
        return False
    storage = t.untyped_storage()
    alone = _use_count(storage._cdata) == 2  # t's own and this handle's
    # a wrapper subclass keeps its values in other tensors
    return alone and fills_its_memory(t) and not is_traceable_wrapper_subclass(t)


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private: do without if it is gone


def with_strides(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``t`` with the given strides: itself if it has them, else a copy.

    The copy has the same gaps between elements, since kernels depend on them; it needs as many
    bytes as the tensor from which the original was sliced. Elements that shared memory share it
    again: they had one value, and its reconstructions differ only by rounding, so we keep any one.
    """
    if t.stride() == stride:
        return t
    with torch.no_grad():
        expanded = [d for d, (n, s) in enumerate(zip(t.shape, stride, strict=True)) if n > 1 > s]
        one = t
        for d in expanded:
            one = one.narrow(d, 0, 1)
        # copy_() refuses memory that overlaps
        if _overlaps(tuple(one.shape), stride):
            return _overlapping(one, stride).expand_as(t)
        copy = one.new_empty_strided(one.shape, stride).copy_(one)
        return copy.expand_as(t) if expanded else copy


@functools.lru_cache(maxsize=256)
def _overlaps(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements may share memory: a stride lies within the extent of smaller strides."""
    extent = 0
    for s, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if s <= extent:
            return True
        extent += s * (n - 1)
    return False


def _overlapping(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    places = torch.zeros((), dtype=torch.int64, device=t.device)
    for d, (n, s) in enumerate(zip(t.shape, stride, strict=True)):
        steps = torch.arange(n, device=t.device) * s
        places = places + steps.view(-1, *[1] * (t.dim() - d - 1))
    extent = sum(s * (n - 1) for n, s in zip(t.shape, stride, strict=True))
    # one flat buffer, filled by index, is then read with the overlapping strides
    flat = t.new_zeros(extent + 1)
    flat[places] = t
    return flat.as_strided(t.shape, stride)


def in_memory_order(t: Tensor) -> Tensor | None:
    """The elements of ``t`` as a view of one dimension; None if memory has gaps between them.

    Kernels that reduce to one value are up to five times faster on it than on channels-last images.
    """
    # a subclass, such as a DTensor, may not allow the view
    if type(t) not in (Tensor, FakeTensor):
        return None
    if t.is_contiguous():
        return t.view(-1)
    if t.dim() in (4, 5):
        last = torch.channels_last if t.dim() == 4 else torch.channels_last_3d
        if t.is_contiguous(memory_format=last):
            return t.as_strided((t.numel(),), (1,))
    return None


def as_dense(t: Tensor, like: Tensor) -> Tensor:
    """``t`` without gaps, since gaps change torch's order of sums; channels last if ``like`` is."""
    last = torch.channels_last
    # the layout of the input stream: convolutions run faster in channels last, if the user chose it
    lasts = t.dim() == like.dim() == 4 and like.is_contiguous(memory_format=last)
    if lasts and not like.is_contiguous():
        return t.contiguous(memory_format=last)
    if _has_no_gaps(t):
        return t
    return t.clone(memory_format=torch.preserve_format)


def _extent(t: Tensor) -> int:
    """The offset of the last element from the first one in memory."""
    return sum(s * (n - 1) for n, s in zip(t.shape, t.stride(), strict=True))


def _has_no_gaps(t: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order."""
    # in an expanded tensor, gaps and repeats may cancel in the extent
    return t.is_contiguous() or (
        _extent(t) + 1 == t.numel() and not _overlaps(tuple(t.shape), t.stride())
    )


def fills_its_memory(t: Tensor) -> bool:
    """Whether each byte of its storage belongs to exactly one element of ``t``."""
    return t.untyped_storage().nbytes() == t.nbytes and _has_no_gaps(t)


def has_values(t: Tensor) -> bool:
    """Whether ``t`` has values that can be read: not if it is empty, fake or on the meta device."""
    return t.numel() > 0 and t.device.type != "meta" and not isinstance(t, FakeTensor)
