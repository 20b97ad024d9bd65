"""Copies of a model with other tensors (fake, on the meta device, or clones), and their input.

``module.to("meta")`` would change the module itself and forget tensors in plain attributes.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

M = TypeVar("M", bound=nn.Module)
_data: Any = Tensor.data  # the descriptor


class _TensorCopies(TorchFunctionMode):
    """Lets ``copy.deepcopy`` put ``copy_of(t)`` in place of every tensor, in any attribute."""

    def __init__(self, copy_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._copy_of = copy_of

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == _data.__get__:  # the deepcopy of a parameter clones its data
            return args[0]
        if func is torch._C.TensorBase.clone:
            return self._copy_of(args[0])
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        t, memo = args
        if id(t) not in memo:
            memo[id(t)] = self._copy_of(t).requires_grad_(t.requires_grad)
        return memo[id(t)]


def copied(module: M, copy_of: Callable[[Tensor], Tensor] = torch.clone) -> M:
    """A deep copy in which ``copy_of(t)`` replaces each tensor, also one that is not a leaf."""
    held = tree_iter([vars(m) for m in module.modules()])
    # not by deepcopy, which would also replace the tensor of their state
    generators = {id(g): g.clone_state() for g in held if isinstance(g, torch.Generator)}
    with torch.no_grad(), _TensorCopies(copy_of):
        return copy.deepcopy(module, generators)


class Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """Fake tensors whose operators a count can watch.

    A second mode around this one would take as much time again: autograd asks each fake tensor for
    its device many times.
    """

    watcher: Callable[..., Any] | None = None
    """Runs each operator, if set: ``watcher(call, func, args, kwargs)``."""

    @functools.cached_property
    def _known(self) -> dict[Any, tuple[bool, list[Any]]]:
        """Whether an operator returns a tuple, and the layouts of its outputs, by its arguments."""
        return {}

    @functools.cached_property
    def avoid_device_init(self) -> bool:
        """Whether this machine lacks a GPU; the parent asks the driver for each operator."""
        return super().avoid_device_init

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch wraps the method below, which is called for each operator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> Any:
        """Run the operator, or let the watcher run it."""
        watcher = self.watcher
        if func is torch.ops.prim.device.default:  # two of three calls; the parent takes longer
            return torch.device("meta") if self.in_kernel_invocation else args[0].fake_device
        if watcher is None or func.namespace == "prim":
            return self._run(func, types, args, kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.watcher = None  # an operator may run others inside
            try:
                return self._run(func, types, args, kwargs)
            finally:
                self.watcher = watcher

        return watcher(call, func, args, dict(kwargs))

    def _run(self, func: Any, types: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Like the parent, which takes several times as long.

        The parent remembers results, too, but describes arguments more slowly.
        """
        if func in _VIEWS and _plain(args[0]):
            with in_kernel_invocation_manager(self):
                view = func(*args, **kwargs)
            return FakeTensor(self, view, args[0].fake_device)
        if func in _IN_PLACE and _plain(args[0]):
            first = args[0]
            others = [t for t in args[1:] if isinstance(t, Tensor)]
            if all(t.shape == first.shape and t.dtype == first.dtype for t in others):
                return first
        key = None if returns_arguments(func) else _key(func, args, kwargs)
        if key not in self._known:
            result: Any = self.dispatch(func, types, args, kwargs)
            several = isinstance(result, tuple)
            outputs = [*result] if several else [result]
            if key is None or not all(t is None or _dense(t) for t in outputs):
                return result
            self._known[key] = several, [t if t is None else _layout_of(t) for t in outputs]
        # also the first time: some fake operators return an argument, or one tensor twice, where
        # the real ones return new tensors, as their schemas say
        several, layouts = self._known[key]
        outputs = [layout and self._made(*layout) for layout in layouts]
        return tuple(outputs) if several else outputs[0]

    def _made(self, shape: Any, stride: Any, dtype: torch.dtype, device: Any) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return FakeTensor(self, empty, device)


_aten = torch.ops.aten
_VIEWS = {
    _aten._unsafe_view.default,  # also a view, though its schema does not say so
    _aten.alias.default,
    _aten.detach.default,
    _aten.slice.Tensor,
    _aten.view.default,
}
_IN_PLACE = {
    _aten.add_.Tensor,
    _aten.copy_.default,
    _aten.mul_.Tensor,
    _aten.relu_.default,
    _aten.round_.default,
}


@functools.cache
def returns_arguments(func: Any) -> bool:
    """Whether the operator returns storages of its arguments, as views and in-place ones do."""
    return any(result.alias_info is not None for result in func._schema.returns)


def _plain(t: Any) -> bool:
    """Whether it is a fake tensor without a value, conjugation or negation."""
    return isinstance(t, FakeTensor) and not (t.constant is not None or t.is_conj() or t.is_neg())


def _key(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Equal for calls whose outputs have equal layouts; None if values of tensors may matter."""
    try:
        default = torch.get_default_dtype()  # of integers times 2.0
        return func, default, _layout_of(args), _layout_of([*kwargs.items()])
    except (TypeError, RuntimeError):  # a sparse tensor has no strides
        return None


def _layout_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        if not _plain(value):
            raise TypeError
        device = value.fake_device  # type: ignore[attr-defined]
        return value.shape, value.stride(), value.dtype, device
    if isinstance(value, (tuple, list)):
        return tuple(map(_layout_of, value))
    return type(value), value  # 1 is equal to 1.0


def _dense(t: Any) -> bool:
    """Whether it is a fake tensor that fills its storage."""
    if not _plain(t) or t.layout is not torch.strided:
        return False
    return t.nbytes == t.untyped_storage().nbytes()


def fake_twin(model: nn.Module, device: torch.device | None = None) -> nn.Module:
    """A copy of ``model`` in training mode with fake tensors, which take no memory.

    Its nominal device is ``device``; by default the model's, or the CPU for the meta device.
    """

    def fake(t: Tensor) -> Tensor:
        on = device or (t.device if t.device.type != "meta" else torch.device("cpu"))
        # strides count, too: they decide whether operators copy
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=on)

    # allow_non_fake_inputs: a forward pass may use constants that are not attributes
    with Fakes(allow_non_fake_inputs=True):
        return in_training(copied(model, fake))


def in_training(model: nn.Module) -> nn.Module:
    """``model`` in training mode; if it already trains, its submodules keep their modes."""
    return model if model.training else model.train()


def images_for(twin: nn.Module, shape: Sequence[int]) -> Tensor:
    """Random input of the ``shape`` for a twin, fake if the twin is."""
    like = next((p for p in twin.parameters() if p.is_floating_point()), torch.empty(0))
    mode = like.fake_mode if isinstance(like, FakeTensor) else contextlib.nullcontext()
    with mode:
        return torch.randn(*shape, dtype=like.dtype, device=like.device)
