"""Pairs a layer's input with the gradient of its output, for per-sample gradients and norms.

Libraries for these quantities keep the input of each layer from a forward hook to a backward hook.
So all inputs stay alive, and a reversible network saves no memory. If activations are recomputed,
the forward hooks also run twice. Here a layer's input is one more tensor that the step saves for
the backward pass, and the memory mode handles it like any activation (NOTE [ Slots and the tape ]
in :mod:`revzoo.core.replay.tape`). A mode that drops activations drops it, too; the replay fills it
in again, and it is freed after the layer's backward. So only the inputs of one step are alive at
once.

NOTE [ Captured inputs ]
    1. The forward hook saves the inputs in the forward pass and in each replay, so both save the
       same tensors in the same order.
    2. The hook on a replay's output never runs: gradients flow through the graph of the forward
       pass, and the graph of a replay is freed with the replay.
    3. Each call has its own hook on the output. A layer that is called twice has two hooks, each
       with the inputs of one call.
    4. The hook sees the inputs after the user's input hooks, and the output before the user's
       output hooks. So both belong to the layer itself.
    5. The backward pass of a call drops the inputs, unless the graph is kept for another backward
       pass; then the tape empties the slots when it moves on.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from revzoo.core.replay.slots import graph_is_kept, save_for_backward
from revzoo.core.restore.global_state import runs_eagerly

OnGradient = Callable[["Call", Tensor], None]


def capture(module: nn.Module, on_gradient: OnGradient) -> RemovableHandle:
    """Call ``on_gradient(call, gradient)`` in the backward pass of each call of ``module``.

    ``gradient`` has the shape of the output; ``call.inputs()`` returns the module's inputs.

    Args:
        module: any layer that returns one tensor, or the same tensor several times; a
            ``nn.MultiheadAttention`` may return its weights, too.
        on_gradient: runs before the layer's own backward, once for each call and backward pass.

    Returns:
        A handle whose ``remove()`` ends it, even for graphs that already exist.

    Raises:
        TypeError: at the call, if the module has trainable parameters and returns several different
            tensors, or got arguments other than positional tensors. In the backward pass, if a
            gradient reaches the weights that a ``nn.MultiheadAttention`` returns.

    Example:
        >>> from revzoo.per_sample.capture import capture
        >>> linear = nn.Linear(3, 2)
        >>> handle = capture(linear, lambda call, gradient: print(call.inputs()[0], gradient))
        >>> linear(torch.ones(1, 3)).sum().backward()
        tensor([[1., 1., 1.]]) tensor([[1., 1.]])
        >>> handle.remove()
    """
    hook = _Capture(on_gradient)
    handle = module.register_forward_hook(hook, prepend=True, with_kwargs=True)  # rule 4
    hook.id = handle.id
    return handle


def pending_calls(module: nn.Module, on_gradient: OnGradient) -> int:
    """Number of captured calls of ``module`` that this backward pass may still reach.

    Counts calls for ``on_gradient`` with a live graph, including the running one.
    """
    task = torch._C._current_graph_task_id()
    hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, _Capture)]
    calls = (call for hook in hooks if hook.on_gradient == on_gradient for call in hook.calls)
    return sum(call.task != task for call in calls)


class Call:
    """One call of a module: the hook on its output."""

    def __init__(self, hook: _Capture, module: nn.Module, inputs: list[Callable[[], Any]]) -> None:
        self.module = module
        self.task = -1  # graph task of the last backward pass that ran it
        self._hook = hook
        self._inputs = inputs
        hook.calls.add(self)

    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, detached; replays the step if it dropped them.

        Tensors only. A ``nn.MultiheadAttention`` gives all arguments, in the order of ``forward``.
        """
        values = (take() for take in self._inputs)
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in values)

    def __call__(self, gradient: Tensor) -> None:
        try:
            if self._hook.id in self.module._forward_hooks:
                self._hook.on_gradient(self, gradient.detach())
        finally:
            self.task = torch._C._current_graph_task_id()
            if not graph_is_kept():  # rule 5
                self._inputs = []
                self._hook.calls.discard(self)


class _Capture:
    """The forward hook. :mod:`revzoo.core.restore.search` ignores objects of this package."""

    def __init__(self, on_gradient: OnGradient) -> None:
        self.on_gradient = on_gradient
        self.id = -1
        self.calls: weakref.WeakSet[Call] = weakref.WeakSet()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Capture, (self.on_gradient,), {"id": self.id}  # a copy has no calls

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or not runs_eagerly():
            return
        leaves = tree_leaves(output)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None]
        if not tensors:
            return
        if isinstance(module, nn.MultiheadAttention):
            self._attention(module, args, kwargs, tensors)
            return
        while args and args[-1] is None:
            args = args[:-1]
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            _check_arguments(module, args, kwargs)
            _check_outputs(module, tensors)
        inputs = [save_for_backward(t) for t in args if isinstance(t, Tensor)]  # rules 1 and 2
        tensors[0].register_hook(Call(self, module, inputs))  # type: ignore[no-untyped-call]

    def _attention(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], found: list[Tensor]
    ) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        inputs = [
            save_for_backward(v) if isinstance(v, Tensor) else lambda v=v: v for v in bound.args
        ]
        found[0].register_hook(Call(self, module, inputs))  # type: ignore[no-untyped-call]
        for weights in found[1:]:
            weights.register_hook(functools.partial(_refuse_weights, self, module))  # type: ignore[no-untyped-call]


def _check_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise a TypeError unless ``module`` got tensors by position only."""
    by_position = all(isinstance(v, Tensor) for v in args)
    if not by_position or any(v is not None for v in kwargs.values()):
        kinds = [type(v).__name__ for v in args] + [f"{k}=..." for k in kwargs]
        raise TypeError(
            f"{type(module).__name__} was called with ({', '.join(kinds)}), expected tensors by "
            "position: its gradient is computed from these. Give it other values when it is "
            "created, or put its parameters into layers that take tensors"
        )


def _check_outputs(module: nn.Module, tensors: list[Tensor]) -> None:
    """Raise a TypeError if ``module`` returned different tensors."""
    if (count := len(set(tensors))) > 1:
        raise TypeError(
            f"{type(module).__name__} returned {count} different tensors, expected one, since the "
            "gradients of its parameters are computed from the gradient of one output. Put its "
            "parameters into layers that return one tensor"
        )


def _refuse_weights(hook: _Capture, module: nn.Module, gradient: Tensor) -> None:
    if hook.id in module._forward_hooks and any(p.requires_grad for p in module.parameters()):
        raise TypeError(
            "the loss uses the attention weights that a nn.MultiheadAttention returns, so its "
            "gradient is not determined by its output's: detach these weights"
        )
