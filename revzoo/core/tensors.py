"""Properties of single tensors, and of torch's state around them.

Strides decide what kernels save, in which order they sum, and which element gets which random
number. So the inputs of a replay need the strides of the forward pass. With others, saved tensors
differ, masks are permuted, and compiled backward graphs refuse their inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        return -id(t)  # no storage has a negative storage_id


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


def autocast_dtype(t: Tensor) -> torch.dtype | None:
    """The dtype of autocast on the device of ``t``; None if it is off."""
    kind = t.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


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
    fills_it = storage.nbytes() == t.nbytes and _has_no_gaps(t)
    # a wrapper subclass keeps its values in other tensors
    return alone and fills_it and not is_traceable_wrapper_subclass(t)


_use_count = getattr(torch._C, "_storage_Use_Count", None)  # private: do without if it is gone


def with_strides(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    """``t`` with the given strides: itself if it has them, else a copy.

    The copy has the same gaps between elements, since kernels depend on them; it needs as many
    bytes as the tensor from which the original was sliced. An expanded tensor is expanded again.
    """
    if t.stride() == stride:
        return t
    with torch.no_grad():
        expanded = [d for d, (n, s) in enumerate(zip(t.shape, stride, strict=True)) if n > 1 > s]
        one = t
        for d in expanded:  # its elements had one value, so we keep any of its reconstructions
            one = one.narrow(d, 0, 1)
        copy = one.new_empty_strided(one.shape, stride).copy_(one)
        return copy.expand_as(t) if expanded else copy


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


def _has_no_gaps(t: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in any order."""
    if t.is_contiguous():
        return True
    count = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size != 1:
            if stride != count:
                return False
            count *= size
    return True


def has_values(t: Tensor) -> bool:
    """Whether ``t`` has values that can be read: not if it is empty, fake or on the meta device."""
    return t.numel() > 0 and t.device.type != "meta" and not isinstance(t, FakeTensor)


def runs_eagerly() -> bool:
    """Whether code runs as written, outside of torch.func transforms and captured graphs."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )


def capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured. The host can then read no value or random state."""
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return initialized and torch.cuda.is_current_stream_capturing()


def is_faked(inputs: Iterable[Tensor]) -> bool:
    """Whether the step computes only shapes; random states are then fake or missing."""
    # real inputs become fake inside the mode
    if torch._C._len_torch_dispatch_stack() and torch._guards.detect_fake_mode() is not None:
        return True
    return any(type(t) is not Tensor and isinstance(t, FakeTensor) for t in inputs)
