"""Opacus 1.6 on reversible networks: private training at the memory of one branch.

Opacus keeps the input of every layer in a forward hook. A replay runs that hook a second time, so
Opacus expects too many uses of each parameter and never finishes: ``grad_sample`` stays None. Here
the memory modes hold the inputs (:mod:`revzoo.per_sample.capture`), and the end of the backward
pass finishes. Opacus provides samplers, optimisers, accountants and loaders. With
``grad_sample_mode="ghost"``, per-sample gradients exist for one layer at a time.

Importing this module registers the norms of convolutions, GroupNorm and LayerNorm with Opacus, for
its ghost clipping (NOTE [ Norms without gradients ] in :mod:`revzoo.per_sample.gradients`). Opacus'
ghost clipping refuses parameters that are used several times; here their gradients are added up
first.

Source: A. Yousefpour et al., "Opacus: User-Friendly Differential Privacy Library in PyTorch", 2021,
arXiv 2109.12298.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import opacus
import torch
from opacus.accountants import create_accountant as create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import (
    AbstractGradSampleModule,
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
    register_norm_sampler,
)
from opacus.grad_sample.grad_sample_module import promote_current_grad_sample
from opacus.layers.dp_rnn import RNNLinear
from opacus.validators import ModuleValidator
from opacus.validators.errors import UnsupportedModuleError
from torch import Tensor, nn

from revzoo.per_sample.capture import Call
from revzoo.per_sample.gradients import (
    Captures,
    layers,
    note_single_use,
    own_parameters,
    per_sample_gradients,
    refuse_infinite,
    refuse_unsupported,
    squared_norms,
    trainable,
)

_ByParameter = dict[nn.Parameter, Tensor]


def _norms(layer: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> _ByParameter:
    """Norm of each sample's gradient, ``(N,)``."""
    parameters = own_parameters(layer)
    squares = squared_norms(layer, inputs, gradient)
    return {parameters[name]: square.sqrt() for name, square in squares.items()}


register_norm_sampler([nn.Conv1d, nn.Conv2d, nn.GroupNorm, nn.LayerNorm])(_norms)


def _gradients(layer: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> _ByParameter:
    """Gradient of each sample, ``(N, ...)``, for layers that Opacus has no rule for."""
    parameters = own_parameters(layer)
    gradients = per_sample_gradients(layer, inputs, gradient)
    return {parameters[name]: g for name, g in gradients.items()}


def _keeps_rules(layer: nn.Module) -> bool:
    """Whether Opacus' own rules for the layer are right and cheaper than ours."""
    if type(layer) is nn.Embedding:
        return layer.padding_idx is None  # Opacus 1.6 gives the padding row a gradient
    return type(layer).__module__.startswith("opacus.")


class _OnReplays:
    """Overrides for Opacus' classes that hook into layers."""

    _module: nn.Module
    autograd_grad_sample_hooks: list[Any]
    hooks_enabled: bool
    loss_reduction: str
    batch_first: bool
    use_ghost_clipping = False

    def add_hooks(self, **options: Any) -> None:
        """Capture each layer whose own parameters are trained."""
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("this model already has Opacus' hooks: call remove_hooks() first")
        # copies: Opacus keeps its rules in class attributes, shared by all models
        self.GRAD_SAMPLERS = dict(GradSampleHooks.GRAD_SAMPLERS)
        self.NORM_SAMPLERS = dict(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
        trained = [module for module in layers(self._module).values() if trainable(module)]
        for kind in {type(module) for module in trained if not _keeps_rules(module)}:
            self.GRAD_SAMPLERS[kind] = _gradients
            self.NORM_SAMPLERS[kind] = _norms
        self._captures = Captures(trained, self._on_gradient)
        # Opacus' remove_hooks() expects both attributes
        self.autograd_grad_sample_hooks = self._captures.handles
        self._module.autograd_grad_sample_hooks = self._captures.handles  # type: ignore[assignment]
        self.hooks_enabled = True

    def _on_gradient(self, call: Call, gradient: Tensor) -> None:
        module = call.module
        if not self.hooks_enabled or not module.training or not trainable(module):
            return
        backward_pass, parameters = call.backward_pass, own_parameters(module).values()
        if not backward_pass.at_end:
            # a failed pass leaves sums behind
            for p in self._module.parameters():
                p.__dict__.pop("_current_grad_sample", None)
                p.__dict__.pop("_norm_sample", None)
            backward_pass.at_end.append(self._finish)
        for p in parameters:
            # Opacus counts this use down, and finishes at 0; but only the end of the pass is sure
            p._forward_counter = 2  # type: ignore[attr-defined]
        several_uses = self._captures.several(parameters)
        if self.use_ghost_clipping and not several_uses:
            note_single_use(module, backward_pass.single)
        # what Opacus' forward hook would have stored
        module.activations = [list(call.inputs())]  # type: ignore[assignment]
        if not hasattr(module, "max_batch_len"):
            # the dimension that Opacus' rearrange_grad_samples takes for the batch
            batch_dim = 0 if self.batch_first or isinstance(module, RNNLinear) else 1
            module.max_batch_len = gradient.shape[batch_dim]  # type: ignore[assignment]
        ghost = self.use_ghost_clipping
        # norms of several uses do not add up: add the gradients first, then take norms
        self.use_ghost_clipping = ghost and not several_uses
        try:
            self.capture_backprops_hook(  # type: ignore[attr-defined]
                module,
                None,
                (gradient,),
                loss_reduction=self.loss_reduction,
                batch_first=self.batch_first,
            )
        finally:
            self.use_ghost_clipping = ghost
            del module.activations
            module.__dict__.pop("max_batch_len", None)

    def _finish(self) -> None:
        """End a backward pass."""
        for p in self._module.parameters():
            if hasattr(p, "_current_grad_sample"):
                promote_current_grad_sample(p)
                self._promoted(p)

    def _promoted(self, p: Any) -> None:
        """Called for each parameter that :meth:`_finish` gave its per-sample gradients."""


class _Samples(_OnReplays):
    grad_accumulation_allowed: bool

    def _finish(self) -> None:
        """Refuse gradients that are not finite, as the norms do in ghost clipping."""
        super()._finish()
        trained = [p for p in self._module.parameters() if p.requires_grad]
        if not self.grad_accumulation_allowed and any(
            isinstance(getattr(p, "grad_sample", None), list) for p in trained
        ):
            raise ValueError(
                "Poisson sampling got several backward passes for one step: call optimizer.step() "
                "after each, or use Opacus' BatchMemoryManager"
            )
        trained = [p for p in trained if p.grad is not None]
        # the summed gradient tells cheaply whether any sample is bad; only then look for it
        if trained and not torch.stack([p.grad.isfinite().all() for p in trained]).all():  # type: ignore[union-attr]
            samples = [getattr(p, "grad_sample", None) for p in trained]
            # a list holds one entry per backward pass since the last step
            last = [g[-1] if isinstance(g, list) else g for g in samples if g is not None]
            refuse_infinite(torch.stack([g.flatten(1).norm(dim=1) for g in last]).norm(dim=0))


class _Hooks(_Samples, GradSampleHooks):  # type: ignore[misc]
    pass


class _Ghost(_OnReplays):
    trainable_parameters: list[nn.Parameter]

    def _promoted(self, p: Any) -> None:
        p._norm_sample, p.grad_sample = p.grad_sample.flatten(1).norm(dim=1), None

    def get_norm_sample(self) -> Tensor:
        """Refuse norms that lack a parameter."""
        # Opacus takes the list in its constructor
        if {p for p in self._module.parameters() if p.requires_grad} != set(
            self.trainable_parameters
        ):
            raise ValueError(
                "parameters were frozen or unfrozen after make_private, so the norms would lack "
                "some: call cleanup() and make_private again"
            )
        for name, p in self._module.named_parameters():
            if p.requires_grad and not hasattr(p, "_norm_sample"):
                raise RuntimeError(
                    f"{name!r} got no gradient, so the norms lack its part: freeze it before "
                    "make_private, or use it in the forward pass, in a layer that is called"
                )
        norms: Tensor = super().get_norm_sample()  # type: ignore[misc]
        refuse_infinite(norms)
        return norms


class _GhostHooks(_Ghost, GradSampleHooksFastGradientClipping):  # type: ignore[misc]
    pass


class _Module(_Samples, GradSampleModule):  # type: ignore[misc]
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


def noise_for(epsilon: float, delta: float, *, rate: float, steps: int, accountant: str) -> float:
    """The smallest noise multiplier for which ``steps`` batches spend at most ``epsilon``.

    Args:
        epsilon: the budget.
        delta: the probability with which the guarantee may fail.
        rate: the probability with which a batch contains an image.
        steps: optimiser steps of the whole training.
        accountant: ``"prv"``, ``"rdp"`` or ``"gdp"``, as Opacus names them.
    """
    multiplier: float = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=delta,
        sample_rate=rate,
        steps=steps,
        accountant=accountant,
    )
    return multiplier


def _validate(module: nn.Module) -> None:
    """Run Opacus' validators, except the one that refuses nn.MultiheadAttention."""
    if not module.training:
        raise ValueError("the model is in evaluation mode: call train() before make_private")
    # Opacus wants its own attention layer instead; per_sample/gradients.py has rules for torch's
    if errors := [
        error
        for layer in module.modules()
        if trainable(layer) and type(layer) is not nn.MultiheadAttention
        for error in ModuleValidator.VALIDATORS.get(type(layer), lambda layer: [])(layer)
    ]:
        raise UnsupportedModuleError(errors)


class PrivacyEngine(opacus.PrivacyEngine):  # type: ignore[misc]
    """``opacus.PrivacyEngine``, for networks in any memory mode.

    Modes ``"hooks"`` and ``"ghost"`` of ``make_private`` work on the replay; ``"functorch"`` and
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
        refuse_unsupported(module)
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
        _validate(module)
        if grad_sample_mode == "ghost":
            options["max_grad_norm"] = max_grad_norm
        return kind(module, **options)
