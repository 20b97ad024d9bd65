"""Keyword arguments of a step, kept for one more evaluation."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from types import FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from revzoo.core.tensors import detached, version_of

_PLAIN = (int, float, complex, str, bytes, NoneType, torch.dtype, torch.device, nn.Module)


class Kept(NamedTuple):
    """A tensor or an object among the keyword arguments, as it was before the forward pass."""

    value: Any
    needs: bool = False
    version: int = 0
    tensors: Sequence[Any] = ()  # that the pickled ``value`` refers to

    @staticmethod
    def of(value: Any) -> Kept:
        """Keep ``value``, a leaf of the arguments."""
        if isinstance(value, _PLAIN):
            return Kept(value)
        if isinstance(value, Tensor):
            # detached: a context that this chain computed would form a cycle through the graph
            return Kept(detached(value), value.requires_grad, version_of(value))
        # an object that the step may fill, such as a cache of keys: tensors are shared, not copied
        file, tensors = io.BytesIO(), list[Any]()
        pickler = pickle.Pickler(file)
        pickler.persistent_id = lambda v: _shared(v, tensors)  # type: ignore[method-assign]
        try:
            pickler.dump(value)
        except Exception:  # what cannot be copied is passed as it is
            return Kept(value)
        return Kept(file.getvalue(), tensors=(tensors,))

    def changed(self) -> bool:
        """Whether it is a tensor that was changed in place since."""
        return isinstance(self.value, Tensor) and version_of(self.value) != self.version

    def again(self) -> Any:
        """The value for one more evaluation; a new leaf if it requires gradient."""
        if self.tensors:
            unpickler = pickle.Unpickler(io.BytesIO(self.value))
            unpickler.persistent_load = self.tensors[0].__getitem__  # type: ignore[method-assign]
            return unpickler.load()
        return self.value.detach().requires_grad_() if self.needs else self.value


def _shared(v: Any, shared: list[Any]) -> int | None:
    if not isinstance(v, (Tensor, nn.Module, FunctionType, type)):
        return None
    shared.append(v.detach() if isinstance(v, Tensor) and v.grad_fn is not None else v)
    return len(shared) - 1
