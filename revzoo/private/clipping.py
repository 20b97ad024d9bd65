"""Per-sample gradient norms, and gradients clipped by them, at the memory of one branch.

When the backward pass reaches a layer, we compute the norms of its parameters' per-sample gradients
(:mod:`revzoo.private.gradients`). The per-sample gradients themselves are never kept.

NOTE [ Clipping inside the backward pass ]
    If no layer mixes samples, weighting sample n's row of the logits' gradient by w_n gives the
    parameters the same gradients as weighting sample n's loss. So clipping needs no per-sample
    losses and works with any training loop. When a backward pass reaches the logits, a first pass
    below them measures the norms. Then we weight the gradient, and the backward pass continues. The
    first pass only asks for the gradient of the images, so it computes no gradients of weights.
    This is ghost clipping (arXiv 2110.05679) inside one call of ``backward``.

Shapes: B samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from revzoo._checks import check_number
from revzoo.private.capture import Call, Captures
from revzoo.private.gradients import (
    as_rows,
    layers,
    refuse_infinite,
    refuse_unsupported,
    squared_norms,
    trainable,
)


class SampleNorms(Captures):
    """Sums up the squared norms of each sample's gradient over all layers of ``model``.

    Attributes:
        collecting: whether backward passes count; False at first.

    Raises:
        ValueError: in a backward pass, if a layer mixes samples or their number differs.

    Example:
        >>> from revzoo.private.clipping import SampleNorms
        >>> model = revzoo.create_model("revnet38", norm="group")
        >>> norms = SampleNorms(model)
        >>> norms.start()
        >>> model(torch.randn(2, 3, 32, 32)).logsumexp(1).sum().backward()
        >>> norms.take().shape
        torch.Size([2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.collecting = False

    def start(self, samples: int | None = None) -> None:
        """Collect from the next forward pass on, for a batch of ``samples``."""
        self.restart()
        self.collect(samples)

    def collect(self, samples: int | None) -> None:
        """Collect from the next backward pass on."""
        self.forget()  # the rest of an interrupted backward pass
        self.collecting, self.samples = True, samples

    def take(self) -> Tensor:
        """The squared norms ``(B,)`` since the last call, in the gradients' own precision.

        Raises:
            RuntimeError: a trainable layer was not reached.
        """
        total, sums, seen = self._total, self.sums, self._seen
        self.forget()
        for name, module in layers(self.model).items():
            if trainable(module) and module not in seen:
                raise RuntimeError(
                    f"{name!r} got no gradient, so the norms lack its part: freeze its parameters, "
                    "or use it in the forward pass, as a layer that is called"
                )
        assert total is not None, "the model has trainable layers"
        return total + sum(as_rows(g).square().sum(1) for g in sums.values())

    def is_collecting(self) -> bool:
        return self.collecting

    def begin(self) -> None:
        """Go on with the sums: :meth:`take` ends them, not a backward pass."""

    def forget(self) -> None:
        super().forget()
        self._total: Tensor | None = None
        self._seen: Counter[nn.Module] = Counter()

    def add(self, call: Call, gradient: Tensor) -> None:
        module = call.module
        if self._total is None:
            # on the gradient's device and in its precision
            self._total = gradient.new_zeros(len(gradient))
        # the norm of a sum is not a sum of norms: add the gradients of shared parameters first
        if self.several(module):
            self.sum_up(module, call.inputs(), gradient)
        else:
            for square in squared_norms(module, call.inputs(), gradient).values():
                self._total = self._total + square
        self._seen[module] += 1

    def check_all_seen(self) -> None:
        """Raise a RuntimeError if the backward pass left out a call since :meth:`restart`."""
        for name, module in layers(self.model).items():
            calls, seen = self.hooks[module].calls, self._seen[module]
            if trainable(module) and seen < calls:
                raise RuntimeError(
                    f"{name!r} was called {calls} times, but {calls - seen} of its outputs do not "
                    "depend on the images, or are not used, so the norms lack their part: freeze "
                    "its parameters, or move them to the layer that adds its output to the images"
                )


class ClippedGradients:
    """Clips each sample's gradient to a norm in every backward pass through ``model``.

    After ``loss.backward()`` of a mean over the batch, gradients are ``1 / size`` times the sum
    over the samples of ``g_n * min(1, max_norm / |g_n|)``; ``g_n`` is the gradient of one sample's
    loss.

    Args:
        model: ``(B, ...) -> (B, ...)``, called with one floating-point tensor.
        max_norm: largest norm of a sample's gradient.
        size: returns the divisor for a batch of B samples; by default B.

    Raises:
        ValueError: ``max_norm`` is not positive, or the model's gradients are already clipped; in a
            forward pass, if a layer mixes samples.
        TypeError: in a forward pass, if the input is not floating-point or the output is not a
            tensor.
        FloatingPointError: in a backward pass, if the gradient of a sample is not finite.
        RuntimeError: a backward pass reaches two forward passes, and clipping each would not bound
            their sum; or it got ``create_graph=True``.

    Example:
        >>> from revzoo.private.clipping import ClippedGradients
        >>> model = revzoo.create_model("revnet38", norm="group")
        >>> clipped = ClippedGradients(model, max_norm=0.1)
        >>> images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
        >>> nn.functional.cross_entropy(model(images), labels).backward()
        >>> sum(p.grad.square().sum() for p in model.parameters()).sqrt() <= 0.1
        tensor(True)
        >>> clipped.remove()
    """

    def __init__(
        self, model: nn.Module, max_norm: float, *, size: Callable[[int], float] = float
    ) -> None:
        check_number("max_norm", max_norm, open_low=True, open_high=True)
        hooks = model._forward_pre_hooks.values()
        if any(isinstance(getattr(h, "__self__", None), ClippedGradients) for h in hooks):
            raise ValueError("gradients of this model are already clipped: call remove() first")
        self.max_norm = max_norm
        self.size = size
        self.norms: Tensor | None = None
        self._sums = SampleNorms(model)
        self._images: Tensor | None = None
        self._task = -1
        self._hooks = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after),
        ]

    def remove(self) -> None:
        """Remove the hooks."""
        self._sums.remove()
        for hook in self._hooks:
            hook.remove()

    def _before(self, model: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not (model.training and torch.is_grad_enabled()):
            return None
        refuse_unsupported(model)
        images = args[0] if args else None
        if not isinstance(images, Tensor) or not images.is_floating_point():
            got = images.dtype if isinstance(images, Tensor) else type(images).__name__
            raise TypeError(
                f"{type(model).__name__} got {got} as its first positional argument, expected "
                "floating-point images: the norms come from a backward pass to them"
            )
        self._images = images.detach().requires_grad_()  # for the first pass
        self._sums.restart()  # a backward pass reaches one forward pass
        return (self._images, *args[1:])

    def _after(self, model: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor | None:
        # take the images away: the next forward pass must not see them
        images, self._images = self._images, None
        if images is None:
            return None
        if not isinstance(logits, Tensor):
            raise TypeError(
                f"{type(model).__name__} returned {type(logits).__name__}, expected one tensor, "
                "whose rows are the samples"
            )
        # every parameter is frozen
        if not logits.requires_grad:
            return None
        # a view: hooks of the logits themselves would run in the first pass, too
        clipped = logits.view_as(logits)
        weight = partial(self._weighted, get_gradient_edge(logits), images)
        clipped.register_hook(weight)  # type: ignore[no-untyped-call]
        return clipped

    def _weighted(self, below: GradientEdge, images: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the logits ``(B, ...)``, times each sample's weight."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "clipped gradients got create_graph=True, but the derivative of the weights would "
                "be missing: call remove() for second derivatives"
            )
        count = len(gradient)
        # private in torch 2.15; public hooks do not say which backward pass calls them
        task, self._task = self._task, torch._C._current_graph_task_id()
        if task == self._task:
            raise RuntimeError(
                "the loss uses two forward passes of the model, so a sample's gradient could have "
                "twice the norm: call backward() after each, or use a model that takes both inputs "
                "and returns both outputs as one sample"
            )
        if not count:
            self.norms = gradient.new_zeros(0)
            return gradient
        self._sums.collect(count)
        try:
            # a first pass only to the images, which accumulates no gradients of parameters
            torch.autograd.grad([below], [images], [gradient], retain_graph=True)
            self._sums.check_all_seen()
            # the loss is a mean over the batch: a sample contributes 1 / count of its gradient
            norms = self._sums.take().clamp(min=0).sqrt() * count
        finally:
            self._sums.collecting = False
        self.norms = norms
        refuse_infinite(norms)
        # 1e-6 is Opacus' constant; it matters only for gradients near zero
        weights = (self.max_norm / (norms + 1e-6)).clamp(max=1)
        weights = weights * (count / self.size(count))  # replaces the divisor B of the mean
        weighted = gradient * weights.view(-1, *[1] * (gradient.dim() - 1))
        return weighted.to(gradient.dtype)  # norms have at least 32 bits
