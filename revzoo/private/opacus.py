"""Opacus 1.6 on reversible networks: private training at the memory of one branch.

Opacus keeps the input of every layer in a forward hook. A backward pass evaluates each branch once
more and runs that hook a second time, so Opacus expects too many uses of each parameter and never
finishes: ``grad_sample`` stays None. Here the memory modes hold the inputs
(:mod:`revzoo.private.capture`), and gradients and norms of single layers are ours
(:mod:`revzoo.private.gradients`). Opacus provides samplers, optimisers, accountants and loaders.
With ``grad_sample_mode="ghost"``, per-sample gradients exist for one layer at a time, also for
parameters that are used several times, which Opacus' ghost clipping refuses.

Source: A. Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library in PyTorch", 2021,
arXiv 2109.12298.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import opacus
import torch
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.grad_sample_module import promote_current_grad_sample
from torch import Tensor, nn

from revzoo.private.capture import Call, Captures
from revzoo.private.gradients import (
    as_rows,
    layers,
    own_parameters,
    refuse_infinite,
    refuse_unsupported,
    squared_norms,
    trainable,
)


class _OnReplays(Captures):
    """Overrides for Opacus' classes that hook into layers."""

    _module: nn.Module
    hooks_enabled: bool
    loss_reduction: str
    batch_first: bool

    def __init__(self, *args: Any, **options: Any) -> None:
        super(Captures, self).__init__(*args, **options)  # Opacus' class, which calls add_hooks()

    def add_hooks(self, **options: Any) -> None:
        """Capture each layer whose own parameters are trained."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("this model already has Opacus' hooks: call remove_hooks() first")
        Captures.__init__(self, filter(trainable, layers(self._module).values()))
        # Opacus' remove_hooks() expects both attributes
        self.autograd_grad_sample_hooks = self.handles
        self._module.autograd_grad_sample_hooks = self.handles  # type: ignore[assignment]
        self.hooks_enabled = True

    def begin(self) -> None:
        """Refuse a batch normalisation that ``train()`` has switched on after make_private."""
        super().begin()
        if self.hooks_enabled:
            refuse_unsupported(self._module)

    def add(self, call: Call, gradient: Tensor) -> None:
        module = call.module
        if not self.hooks_enabled or not module.training or not trainable(module):
            return
        inputs = call.inputs()
        if not self.batch_first and gradient.dim() > 2:
            gradient = gradient.transpose(0, 1)
            inputs = tuple(x.transpose(0, 1) if isinstance(x, Tensor) else x for x in inputs)
        self.check_samples(self._module, module, gradient)
        if self.loss_reduction == "mean":  # a sample's gradient is the whole of its part
            gradient = gradient * len(gradient)
        self.measure(module, inputs, gradient)

    @abstractmethod
    def measure(self, module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> None:
        """Add the gradients of a call, or their norms."""


class _Samples(_OnReplays):
    """Per-sample gradients of all parameters, in ``grad_sample``."""

    grad_accumulation_allowed: bool

    def measure(self, module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> None:
        self.sum_up(module, inputs, gradient)

    def end(self) -> None:
        """Refuse gradients that are not finite, as the norms do in ghost clipping."""
        sums = self.sums
        self.forget()
        for p, g in sums.items():
            p._current_grad_sample = g  # type: ignore[attr-defined]
            promote_current_grad_sample(p)
            if not self.grad_accumulation_allowed and isinstance(p.grad_sample, list):  # type: ignore[attr-defined]
                raise ValueError(
                    "Poisson sampling got several backward passes for one step: call "
                    "optimizer.step() after each, or use Opacus' BatchMemoryManager"
                )
        # the summed gradient tells cheaply whether any sample is bad; only then look for it
        summed = [p.grad for p in sums if p.grad is not None]
        if summed and not torch.stack([g.isfinite().all() for g in summed]).all():
            norms = [as_rows(g).norm(dim=1) for g in sums.values()]
            refuse_infinite(torch.stack(norms).norm(dim=0))


class _Ghost(_OnReplays):
    """Norms of per-sample gradients, in ``_norm_sample``; gradients for one layer at a time."""

    trainable_parameters: list[nn.Parameter]

    def begin(self) -> None:
        """Drop the norms of an earlier pass, which would stand for a layer that is not used."""
        super().begin()
        if self.hooks_enabled:  # not in the second pass, which weights the gradients
            for p in self._module.parameters():
                p.__dict__.pop("_norm_sample", None)

    def measure(self, module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> None:
        # norms of several uses do not add up: add the gradients first, then take norms
        if self.several(module):
            self.sum_up(module, inputs, gradient)
            return
        parameters = own_parameters(module)
        for name, square in squared_norms(module, inputs, gradient).items():
            parameters[name]._norm_sample = square.sqrt()  # type: ignore[attr-defined]

    def end(self) -> None:
        for p, g in self.sums.items():
            p._norm_sample = as_rows(g).norm(dim=1)  # type: ignore[attr-defined]
        self.forget()

    def get_norm_sample(self) -> Tensor:
        """Refuse norms that lack a parameter."""
        trained = {p for p in self._module.parameters() if p.requires_grad}
        if trained != {*self.trainable_parameters}:  # Opacus takes the list in its constructor
            raise ValueError(
                "parameters were frozen or unfrozen after make_private, so the norms would lack "
                "some: call cleanup() and make_private again"
            )
        named = self._module.named_parameters()
        if unused := [n for n, p in named if p.requires_grad and not hasattr(p, "_norm_sample")]:
            raise RuntimeError(
                f"{unused[0]!r} got no gradient, so the norms lack its part: freeze it before "
                "make_private, or use it in the forward pass, in a layer that is called and in "
                "training mode"
            )
        norms: Tensor = super().get_norm_sample()  # type: ignore[misc]
        refuse_infinite(norms)
        return norms


class _Hooks(_Samples, GradSampleHooks):  # type: ignore[misc]
    pass


class _Module(_Samples, GradSampleModule):  # type: ignore[misc]
    pass


class _GhostHooks(_Ghost, GradSampleHooksFastGradientClipping):  # type: ignore[misc]
    pass


class _GhostModule(_Ghost, GradSampleModuleFastGradientClipping):  # type: ignore[misc]
    pass


# by Opacus' grad_sample_mode and wrap_model
_CLASSES: dict[tuple[str, bool], type[Any]] = {
    ("hooks", False): _Hooks,
    ("hooks", True): _Module,
    ("ghost", False): _GhostHooks,
    ("ghost", True): _GhostModule,
}


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]
    """``opacus.PrivacyEngine``, for networks in any memory mode.

    Modes ``"hooks"`` and ``"ghost"`` of ``make_private`` work on replays; ``"functorch"`` and
    the others are Opacus' own.

    Raises:
        ValueError: from ``make_private``, if the model has a batch normalisation or is in
            evaluation mode.

    Example:
        >>> import warnings
        >>> from revzoo.integrations.opacus import PrivacyEngine
        >>> model = revzoo.create_model("revnet38", norm="group")
        >>> images = torch.utils.data.TensorDataset(torch.randn(8, 3, 32, 32), torch.arange(8))
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # Opacus' advice to use secure random numbers
        ...     model, optimizer, criterion, loader = PrivacyEngine().make_private(
        ...         module=model,
        ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...         data_loader=torch.utils.data.DataLoader(images, batch_size=4),
        ...         noise_multiplier=1.0,
        ...         max_grad_norm=1.0,
        ...         grad_sample_mode="ghost",
        ...     )
        >>> criterion(model(images.tensors[0]), images.tensors[1]).backward()
        >>> optimizer.step()
    """

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        max_grad_norm: float | list[float] = 1.0,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        **options: Any,
    ) -> Any:
        refuse_unsupported(module)  # as Opacus' validators, but nn.MultiheadAttention may stay
        kind = _CLASSES.get((grad_sample_mode, wrap_model))
        # for other modes, or a model that the caller has wrapped: Opacus' own code
        if kind is None or isinstance(module, AbstractGradSampleModule):
            return super()._prepare_model(
                module,
                max_grad_norm=max_grad_norm,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                **options,
            )
        if not module.training:
            raise ValueError("the model is in evaluation mode: call train() before make_private")
        if grad_sample_mode == "ghost":
            options["max_grad_norm"] = max_grad_norm
        return kind(module, **options)
