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
from revzoo.private.clipping import SampleNorms
from revzoo.private.gradients import (
    as_rows,
    refuse_infinite,
    refuse_unsupported,
)


class _Gradients(Captures):
    """Per-sample gradients of all parameters, in ``grad_sample``."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner._module)
        self.owner = owner  # Opacus' class

    def is_collecting(self) -> bool:
        return bool(self.owner.hooks_enabled)

    def add(self, call: Call, gradient: Tensor) -> None:
        if not call.module.training:
            return
        if self.owner.loss_reduction == "mean":  # a sample's gradient is the whole of its part
            gradient = gradient * len(gradient)
        self.sum_up(call.module, call.inputs(), gradient)

    def end(self) -> None:
        """Refuse gradients that are not finite, as the norms do in ghost clipping."""
        sums = self.sums
        self.forget()
        for p, g in sums.items():
            p._current_grad_sample = g  # type: ignore[attr-defined]
            promote_current_grad_sample(p)
            if not self.owner.grad_accumulation_allowed and isinstance(p.grad_sample, list):  # type: ignore[attr-defined]
                raise ValueError(
                    "Poisson sampling got several backward passes for one step: call "
                    "optimizer.step() after each, or use Opacus' BatchMemoryManager"
                )
        # the summed gradient tells cheaply whether any sample is bad; only then look for it
        summed = [p.grad for p in sums if p.grad is not None]
        if summed and not torch.stack([g.isfinite().all() for g in summed]).all():
            norms = [as_rows(g).norm(dim=1) for g in sums.values()]
            refuse_infinite(torch.stack(norms).norm(dim=0))


class _Norms(SampleNorms):
    """Norms of per-sample gradients; the second pass, which weights the loss, has none."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner._module)
        self.owner = owner

    def is_collecting(self) -> bool:
        return bool(self.owner.hooks_enabled)

    def begin(self) -> None:
        """Drop the norms of a backward pass that failed."""
        Captures.begin(self)


class _OnReplays:
    """Overrides for Opacus' classes that hook into layers."""

    _module: nn.Module
    _captures: Captures
    loss_reduction: str

    def add_hooks(self, **options: Any) -> None:
        """Capture each layer with parameters."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("this model already has Opacus' hooks: call remove_hooks() first")
        self._captures = _Norms(self) if isinstance(self, _Ghost) else _Gradients(self)
        # Opacus' remove_hooks() expects both attributes
        self.autograd_grad_sample_hooks = self._captures.handles
        self._module.autograd_grad_sample_hooks = self._captures.handles  # type: ignore[assignment]
        self.hooks_enabled = True


class _Ghost(_OnReplays):
    _captures: _Norms

    def get_norm_sample(self) -> Tensor:
        """The norms ``(B,)`` of the first pass."""
        norms = self._captures.take().clamp(min=0).sqrt()
        if self.loss_reduction == "mean":  # a sample's gradient is the whole of its part
            norms = norms * len(norms)
        refuse_infinite(norms)
        self.per_sample_gradient_norms = norms
        return norms


class _Hooks(_OnReplays, GradSampleHooks):  # type: ignore[misc]
    pass


class _Module(_OnReplays, GradSampleModule):  # type: ignore[misc]
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
        # other modes, samples along dimension 1, a model that the caller has wrapped: Opacus' own
        wrapped = isinstance(module, AbstractGradSampleModule)
        if kind is None or wrapped or not options.get("batch_first", True):
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
