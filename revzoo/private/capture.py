"""Pairs a layer's input with the gradient of its output, for per-sample gradients and norms.

Libraries for these quantities keep the input of each layer from a forward hook to a backward hook.
So all inputs stay alive, and a reversible network saves no memory. Here a layer's input belongs to
the graph of its call, like any tensor that the graph saves.

NOTE [ Captured inputs ]
    1. Modes ``invert`` and ``exact`` drop the graph of the forward pass at once, with the inputs.
       The backward pass evaluates each branch once more and records it: there each call has a graph
       like any other. So only the inputs of one step are alive.
    2. Mode ``recompute``: the input is one more tensor that torch's checkpoint recomputes.
       Gradients flow through the first graph, so only hooks on its outputs run.
    3. The hook sees the inputs after the user's input hooks, and the output before the user's
       output hooks. So both belong to the layer itself.
    4. A step differentiates its recorded branch in a backward pass of its own, nested in the
       caller's. Both count as one pass: the forward hooks of the branch begin it.
    5. Norms of several uses of a parameter do not add up, so we must know of them before the first.
       Forward hooks count the calls since the last backward pass that reached the layer. If the
       count is too large, it costs memory only; if it is too small, the second use raises.
"""

from __future__ import annotations

import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from revzoo.core.saved import graph_is_kept, save_for_backward
from revzoo.core.tensors import runs_eagerly
from revzoo.private.gradients import (
    layers,
    own_parameters,
    per_sample_gradients,
    refuse_unsupported,
    returned_tensors,
    trainable,
)


class Captures(ABC):
    """Calls :meth:`add` in the backward pass of each call of a layer of ``model``.

    Attributes:
        handles: of the hooks; :meth:`add` is not called after ``remove()``, even for graphs that
            already exist. But a graph of mode ``recompute`` then raises a
            :class:`~revzoo.ReplayMismatchError`: a recomputation has other tensors.
        sums: per-sample gradients ``(N, ...)`` of the parameters that :meth:`sum_up` was called
            for.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.handles: list[RemovableHandle] = []
        self.hooks = {layer: Hook(self) for layer in layers(model).values()}
        self._hooks: dict[nn.Parameter, list[Hook]] = {}
        for layer, hook in self.hooks.items():
            # prepend: rule 3
            handle = layer.register_forward_hook(hook, prepend=True, with_kwargs=True)
            self.handles.append(handle)
            for p in own_parameters(layer).values():
                self._hooks.setdefault(p, []).append(hook)
        self.forget()

    @abstractmethod
    def add(self, call: Call, gradient: Tensor) -> None:
        """Called once for each call and backward pass, before the layer's own backward.

        Args:
            call: its ``inputs()`` are the layer's.
            gradient: of the output, in its shape.
        """

    def is_collecting(self) -> bool:
        """Whether backward passes count."""
        return True

    def begin(self) -> None:
        """Called when a backward pass begins; the one before may have failed."""
        self.forget()
        if self.is_collecting():  # train() may have switched on a batch normalisation
            refuse_unsupported(self.model)

    def end(self) -> None:  # noqa: B027
        """Called at the end of a backward pass that did not fail."""

    def forget(self) -> None:
        """Drop the sums, the number of samples, and which parameters were used."""
        self.sums: dict[nn.Parameter, Tensor] = {}
        self.samples: int | None = None
        self._single: set[nn.Parameter] = set()

    def restart(self) -> None:
        """Forget calls whose graph will not be used."""
        for hook in self.hooks.values():
            hook.calls = 0

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def check_samples(self, module: nn.Module, gradient: Tensor) -> None:
        """Raise a ValueError if a layer has another number of rows than the first."""
        samples = self.samples = len(gradient) if self.samples is None else self.samples
        if len(gradient) != samples:
            name = next(n for n, m in self.model.named_modules() if m is module)
            raise ValueError(
                f"{(name or type(module).__name__)!r} returned {len(gradient)} rows for {samples} "
                "samples: keep the samples along dimension 0 of each layer with parameters"
            )

    def several(self, module: nn.Module) -> bool:
        """Whether one backward pass may use a parameter of ``module`` several times (rule 5).

        If not, this use is noted.

        Raises:
            RuntimeError: the only use of a parameter was noted before.
        """
        parameters = own_parameters(module).values()
        if any(sum(hook.calls for hook in self._hooks.get(p, ())) > 1 for p in parameters):
            return True
        if not self._single.isdisjoint(parameters):
            raise RuntimeError(
                f"the parameters of a {type(module).__name__} got gradients a second time, but "
                "norms of several uses do not add up: run one backward pass for all losses, before "
                "the next forward pass. If parameters were tied or replaced after the hooks were "
                "set, remove the hooks (remove(), cleanup()) and set them again"
            )
        self._single.update(parameters)
        return False

    def sum_up(self, module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> dict[str, Any]:
        """Add the per-sample gradients of a call to :attr:`sums`; the sums, by parameter's name."""
        parameters = own_parameters(module)
        found = per_sample_gradients(module, inputs, gradient)
        for name, g in found.items():
            p = parameters[name]
            self.sums[p] = self.sums[p] + g if p in self.sums else g
        return {name: self.sums[parameters[name]] for name in found}


class Call:
    """One call of a layer: the hook on its output."""

    def __init__(self, hook: Hook, module: nn.Module, inputs: Sequence[Any]) -> None:
        self.module = module
        self._hook = hook
        leaves, self._structure = tree_flatten(inputs)
        self._leaves: list[Callable[[], Any]] = [
            save_for_backward(v) if isinstance(v, Tensor) else partial(_same, v) for v in leaves
        ]

    def inputs(self) -> tuple[Any, ...]:
        """The arguments in the order of ``forward``; tensors are detached."""
        values = [take() for take in self._leaves]
        detached = [v.detach() if isinstance(v, Tensor) else v for v in values]
        return tuple(tree_unflatten(detached, self._structure))

    def __call__(self, gradient: Tensor) -> None:
        hook = self._hook
        hook.reached = True
        try:
            if hook.is_on(self.module):
                hook.enter()
                if hook.captures.is_collecting():
                    hook.captures.check_samples(self.module, gradient)
                    hook.captures.add(self, gradient.detach())
        finally:
            if not graph_is_kept():
                self._leaves = []


def _same(value: Any) -> Any:
    return value


class Hook:
    """The forward hook.

    Attributes:
        calls: in forward passes since the last backward pass that reached the layer (rule 5).
        reached: whether a backward pass has reached it since its last forward pass.
    """

    def __init__(self, captures: Captures) -> None:
        self.captures = captures
        self.calls = 0
        self.reached = False

    def is_on(self, module: nn.Module) -> bool:
        """Whether the hook was not removed."""
        return self in module._forward_hooks.values()

    def enter(self) -> None:
        """Begin a backward pass, unless it runs already."""
        if self.captures not in _running:
            running = _running[self.captures] = _Pass(self.captures)
            # only autograd holds it, so it is gone if the pass fails
            Variable._execution_engine.queue_callback(running.end)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if not torch.is_grad_enabled() or not runs_eagerly():
            return
        if not trainable(module):  # a frozen layer keeps no input
            return
        tensors = returned_tensors(output)
        if not any(t.grad_fn is not None for t in tensors):
            return
        # private in torch 2.15; public functions do not say whether a backward pass runs
        if torch._C._current_graph_task_id() == -1:
            self.calls = 1 if self.reached else self.calls + 1
            self.reached = False
        else:
            self.enter()  # rule 4
        if kwargs or isinstance(module, nn.MultiheadAttention):
            args = _by_position(module, args, kwargs)
        first, *others = dict.fromkeys(tensors)
        if first.grad_fn is not None:
            first.register_hook(Call(self, module, args))  # type: ignore[no-untyped-call]

        def refuse(gradient: Tensor) -> None:
            if self.is_on(module):
                raise TypeError(
                    f"the loss uses not only the first tensor that {type(module).__name__} "
                    "returned, but the gradients of its parameters are computed from the gradient "
                    "of the first: detach the others (the weights of an attention), or put the "
                    "parameters into layers that return one tensor"
                )

        for t in others:
            if t.grad_fn is not None:
                t.register_hook(refuse)  # type: ignore[no-untyped-call]


class _Pass:
    """A running backward pass, with those nested in it (rule 4)."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures
        captures.begin()

    def end(self) -> None:
        del _running[self._captures]
        self._captures.end()


_running: weakref.WeakValueDictionary[Captures, _Pass] = weakref.WeakValueDictionary()


def _by_position(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]:
    """The arguments of ``forward`` in its order."""
    bound = inspect.signature(module.forward).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.kwargs:
        raise TypeError(
            f"{type(module).__name__} got {', '.join(bound.kwargs)} as keyword-only arguments, "
            "expected arguments that may be given by position: its gradients are computed from "
            "these. Put its parameters into layers that take such arguments"
        )
    return bound.args
