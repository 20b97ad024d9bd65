"""Sizes that fake tensors lack: the workspaces of fused kernels.

An LSTM on the CPU is one kernel, which keeps a workspace for its backward pass. Only oneDNN (on a
GPU, cuDNN) knows its size, so the kernel's fake version returns an empty tensor of bytes. We run
such an operator once on zeros, free the results, and give the fake outputs storages of the real
size.

Known limit: if the operator cannot run (for lack of a GPU, say), the workspace stays empty, and the
report says so.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._pytree import TreeSpec, tree_flatten, tree_iter, tree_map_only, tree_unflatten

# on the CPU, the result keeps the storage of the columns, which is larger
_LARGER = (torch.ops.aten.col2im.default,)


class _Stored(NamedTuple):
    """A tensor's shape, strides, type and device, and the bytes of its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stored: int = 0


def is_unsized(func: Any, outputs: Any) -> bool:
    """Whether the real outputs of operator ``func`` may have larger storages than its fake ones."""
    several = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
    fakes = [t for t in several if isinstance(t, FakeTensor)]
    # an operator that returns an empty tensor of bytes means a workspace
    empty = any(t.dtype is torch.uint8 and not t.untyped_storage().nbytes() for t in fakes)
    if not fakes or not (empty or func in _LARGER):
        return False
    # views and in-place operators return their arguments
    return all(result.alias_info is None for result in func._schema.returns)


def sized(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
    """The fake ``outputs`` of operator ``func``, with storages of the real size.

    Raises:
        RuntimeError: the operator cannot run on this machine, or not on zeros.
    """
    layouts = tree_map_only(Tensor, _layout, (args, kwargs))
    leaves, spec = tree_flatten(layouts, is_leaf=lambda leaf: isinstance(leaf, _Stored))
    real = iter(_real_outputs(func, tuple(leaves), spec))

    def with_real_storage(t: Tensor) -> Tensor:
        layout = next(real)
        if t.untyped_storage().nbytes() == layout.stored:
            return t
        values = t.new_empty(layout.stored // t.element_size())
        return values.as_strided(layout.shape, layout.stride)

    return tree_map_only(Tensor, with_real_storage, outputs)


def _layout(t: Tensor) -> _Stored:
    return _Stored(t.shape, t.stride(), t.dtype, t.device)


# equal layers, and steps in different memory modes, run one operator on tensors of one layout
@functools.lru_cache(maxsize=512)
def _real_outputs(func: Any, leaves: tuple[Any, ...], spec: TreeSpec) -> tuple[_Stored, ...]:
    with unset_fake_temporarily():
        args, kwargs = tree_unflatten([_zeros(x) for x in leaves], spec)
        outputs = [t for t in tree_iter(func(*args, **kwargs)) if isinstance(t, Tensor)]
        return tuple(_layout(t)._replace(stored=t.untyped_storage().nbytes()) for t in outputs)


def _zeros(leaf: Any) -> Any:
    if not isinstance(leaf, _Stored):
        return leaf
    extent = sum(s * (n - 1) for n, s in zip(leaf.shape, leaf.stride, strict=True)) + 1
    values = torch.zeros(max(0, extent), dtype=leaf.dtype, device=leaf.device)
    return values.as_strided(leaf.shape, leaf.stride)
