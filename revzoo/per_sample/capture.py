"""Pairs a layer's input with the gradient of its output, for per-sample gradients and norms.

Libraries for these quantities keep the input of each layer from a forward hook to a backward hook.
So all inputs stay alive, and a reversible network saves no memory. If a step is evaluated again,
the forward hooks also run twice. Here a layer's input belongs to the graph of its call, like any
tensor that the graph saves.

NOTE [ Captured inputs ]
    1. Modes ``invert`` and ``exact``: the graph of the forward pass is dropped at once, with the
       inputs. The replay calls the layer again, and the hook on this output runs when the replay
       differentiates it. So only the inputs of one step are alive.
    2. Mode ``recompute``: the input is one more tensor that torch's checkpoint recomputes. The hook
       on a recomputed output never runs: gradients flow through the first graph.
    3. Each call has its own hook on the output. A layer that is called twice has two hooks, each
       with the inputs of one call.
    4. The hook sees the inputs after the user's input hooks, and the output before the user's
       output hooks. So both belong to the layer itself.
    5. A replay differentiates in a backward pass of its own, nested in the caller's. Both are one
       :class:`BackwardPass`, which the replay's forward hooks begin.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from revzoo.core.ambient import runs_eagerly
from revzoo.core.saved import graph_is_kept, save_for_backward

OnGradient = Callable[["Call", Tensor], None]


def capture(module: nn.Module, on_gradient: OnGradient) -> RemovableHandle:
    """Call ``on_gradient(call, gradient)`` in the backward pass of each call of ``module``.

    ``gradient`` has the shape of the output; ``call.inputs()`` returns the module's inputs.

    Args:
        module: any layer that returns one tensor, or the same tensor several times; a
            ``nn.MultiheadAttention`` may return its weights, too.
        on_gradient: runs before the layer's own backward, once for each call and backward pass.

    Returns:
        A handle whose ``remove()`` ends it, even for graphs that already exist. But a graph of mode
        ``recompute`` then raises a :class:`~revzoo.ReplayMismatchError`: a recomputation has other
        tensors.

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
    # prepend: rule 4
    return module.register_forward_hook(_Capture(on_gradient), prepend=True, with_kwargs=True)


def calls(module: nn.Module, on_gradient: OnGradient) -> int:
    """At least how often one backward pass can reach ``module``.

    Counts the calls in forward passes since the last backward pass that reached it.
    """
    return sum(hook.calls for hook in captures_of(module, on_gradient))


def captures_of(module: nn.Module, on_gradient: OnGradient) -> list[_Capture]:
    """The hooks of :func:`capture` on ``module``."""
    hooks = [hook for hook in module._forward_hooks.values() if isinstance(hook, _Capture)]
    return [hook for hook in hooks if hook.on_gradient == on_gradient]


class BackwardPass:
    """A running backward pass, with those nested in it.

    Attributes:
        at_end: called after it, unless it fails.
        sums: per-sample gradients of parameters that it reaches several times.
        single: parameters for which it needs no sum.
    """

    def __init__(self) -> None:
        self.at_end: list[Callable[[], None]] = []
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.single: set[nn.Parameter] = set()

    @staticmethod
    def of(on_gradient: OnGradient) -> BackwardPass:
        """The running one of all layers with this ``on_gradient``."""
        running = _running.get(on_gradient)
        if running is None:
            running = _running[on_gradient] = BackwardPass()
            # only autograd holds it, so it is gone if the pass fails
            Variable._execution_engine.queue_callback(functools.partial(running._end, on_gradient))
        return running

    def _end(self, on_gradient: OnGradient) -> None:
        del _running[on_gradient]
        for fn in self.at_end:
            fn()


_running: weakref.WeakValueDictionary[OnGradient, BackwardPass] = weakref.WeakValueDictionary()


class Call:
    """One call of a module: the hook on its output."""

    def __init__(self, hook: _Capture, module: nn.Module, inputs: list[Callable[[], Any]]) -> None:
        self.module = module
        self._hook = hook
        self._inputs = inputs

    def inputs(self) -> tuple[Any, ...]:
        """The positional arguments, detached; recomputed in mode ``recompute``.

        Tensors only. A ``nn.MultiheadAttention`` gives all arguments, in the order of ``forward``.
        """
        values = (take() for take in self._inputs)
        return tuple(v.detach() if isinstance(v, Tensor) else v for v in values)

    @property
    def backward_pass(self) -> BackwardPass:
        """The running one."""
        return BackwardPass.of(self._hook.on_gradient)

    def __call__(self, gradient: Tensor) -> None:
        self._hook.reached = True
        try:
            if self._hook in self.module._forward_hooks.values():
                self._hook.on_gradient(self, gradient.detach())
        finally:
            if not graph_is_kept():
                self._inputs = []


class _Capture:
    """The forward hook.

    Attributes:
        calls: see :func:`calls`.
        reached: whether a backward pass has reached the module since its last forward pass.
    """

    def __init__(self, on_gradient: OnGradient) -> None:
        self.on_gradient = on_gradient
        self.calls = 0
        self.reached = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or not runs_eagerly():
            return
        leaves = tree_leaves(output)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.grad_fn is not None]
        if not tensors:
            return
        # private in torch 2.15; public functions do not say whether a backward pass runs
        if torch._C._current_graph_task_id() == -1:
            self.calls = 1 if self.reached else self.calls + 1
            self.reached = False
        else:
            BackwardPass.of(self.on_gradient)  # rule 5
        if isinstance(module, nn.MultiheadAttention):
            self._attention(module, args, kwargs, tensors)
            return
        while args and args[-1] is None:
            args = args[:-1]
        if any(p.requires_grad for p in module.parameters(recurse=False)):
            _check_arguments(module, args, kwargs)
            _check_outputs(module, tensors)
        inputs = [save_for_backward(t) for t in args if isinstance(t, Tensor)]
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
    if hook in module._forward_hooks.values() and any(p.requires_grad for p in module.parameters()):
        raise TypeError(
            "the loss uses the attention weights that a nn.MultiheadAttention returns, so its "
            "gradient is not determined by its output's: detach these weights"
        )
