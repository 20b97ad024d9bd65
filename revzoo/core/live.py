"""Peak bytes of tensors alive: the memory of a training step, counted instead of sampled.

The resident size of a process depends on the allocator and on earlier work, and CUDA's counters
exist only on CUDA. We count the storages that operators create, for as long as they are referenced.
The number is the same on every run and machine. It excludes memory that a kernel frees before it
returns, and the allocator's rounding.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from revzoo.core.twins import returns_arguments


class LiveMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that were created inside the context.

    ``now`` is the current number of bytes, ``peak`` the largest so far. Slow: every operator calls
    Python.

    Raises:
        ValueError: an operator makes a sparse tensor.

    Example:
        >>> from revzoo.core.live import LiveMemory
        >>> with LiveMemory() as memory:
        ...     y = torch.ones(1024).exp()
        >>> memory.peak
        8192
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[Any]] = {}  # the storages, by address

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator, then count the new storages among its outputs."""
        return self.run(func, func, args, kwargs or {})

    def run(self, call: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator by ``call``; this can be the watcher of :class:`revzoo.core.twins.Fakes`.

        It counts fake tensors in less time than this mode around theirs.
        """
        outputs = call(*args, **kwargs)
        if not returns_arguments(func):
            for t in dense_in(outputs):
                self._count(t)
        return outputs

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        address = storage._cdata
        if address in self._watched:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        # watch the storage, not the tensor: a view may outlive the tensor
        freed = functools.partial(self._forget, address, size)
        self._watched[address] = weakref.ref(storage, freed)

    def _forget(self, address: int, size: int, _: object) -> None:
        self.now -= size
        del self._watched[address]


def dense_in(tree: Any) -> Iterator[Tensor]:
    """The tensors among the arguments or outputs of an operator; the parts of a nested one.

    Like :func:`~revzoo.core.tensors.tensors_of`, but five times as fast.

    Raises:
        ValueError: a tensor is sparse.
    """
    if isinstance(tree, Tensor):
        # first, since most tensors are dense, and each operator comes here
        if tree.layout is torch.strided and not hasattr(type(tree), "__tensor_flatten__"):
            yield tree
        elif is_traceable_wrapper_subclass(tree):  # such as a nested tensor
            names, _ = tree.__tensor_flatten__()
            yield from dense_in([getattr(tree, name) for name in names])
        else:
            raise ValueError(
                f"got a tensor {tuple(tree.shape)} of the layout {tree.layout}: only dense "
                "tensors, torch.strided, are counted. Make it dense, as with "
                "nn.Embedding(..., sparse=False) or to_dense()"
            )
    elif isinstance(tree, (dict, tuple, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(part, (Tensor, dict, tuple, list)):  # a generator for each number is slow
                yield from dense_in(part)
