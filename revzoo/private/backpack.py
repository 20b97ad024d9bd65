"""BackPACK 1.7 on reversible networks: per-sample gradients at the memory of one branch.

BackPACK's ``extend`` keeps the input and output of every module until the backward pass. This one
leaves the inputs to the memory modes (:mod:`revzoo.private.capture`). Extensions, their context and
their options are BackPACK's; the gradients of single layers are ours
(:mod:`revzoo.private.gradients`), as BackPACK has no rules for GroupNorm, LayerNorm, convolutions
with nonzero padding, other layers with parameters, and parameters that are used several times. The
extension :class:`BatchDotGrad` is new.

Source: F. Dangel, F. Kunstner, P. Hennig, "BackPACK: Packing more into Backprop", ICLR 2020, arXiv
1912.10985.

Known limit: first-order extensions only. Second-order extensions pass quantities from module to
module, so every operation must be a module that BackPACK knows. Sums of streams are not.
"""

from __future__ import annotations

from collections.abc import Callable

from backpack import hook_store_io
from backpack.context import CTX
from backpack.extensions import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from backpack.extensions.firstorder.base import FirstOrderBackpropExtension
from torch import Tensor, nn

from revzoo.private.capture import Call, Captures, Hook
from revzoo.private.gradients import (
    as_rows,
    layers,
    own_parameters,
    per_sample_gradients,
    squared_norms,
)


class BatchDotGrad(FirstOrderBackpropExtension):  # type: ignore[misc]
    """Dot products of the gradients of all pairs of samples, ``(B, B)``, in ``batch_dot``.

    Each parameter has its own matrix; their sum is the Gram matrix of the whole gradients. Scaled
    as BackPACK's ``BatchGrad``: with a loss that is a mean over B samples, by ``1 / B**2``.
    """

    def __init__(self) -> None:
        super().__init__(savefield="batch_dot", module_exts={})


def _dot(gradients: Tensor) -> Tensor:
    rows = as_rows(gradients)
    return rows @ rows.T


# each extension's quantity, from per-sample gradients (B, ...)
_QUANTITIES: dict[type, Callable[[Tensor], Tensor]] = {
    BatchGrad: lambda g: g,
    BatchL2Grad: lambda g: as_rows(g).square().sum(1),
    BatchDotGrad: _dot,
    SumGradSquared: lambda g: g.square().sum(0),
    Variance: lambda g: g.var(0, correction=0),
}


def extend(model: nn.Module) -> nn.Module:
    """Prepare every layer of ``model`` for BackPACK's extensions; returns the model.

    A second call changes nothing, unless the model has new layers. Layers whose parameters are
    frozen cost nothing. Modules that share parameters must be extended as parts of one model.

    Raises:
        ValueError: the model was extended by BackPACK's own ``extend``, which keeps every input and
            output.

    Example:
        >>> from backpack import backpack
        >>> from backpack.extensions import BatchGrad
        >>> from revzoo.integrations.backpack import extend
        >>> model = extend(revzoo.create_model("revnet38", norm="group"))
        >>> with backpack(BatchGrad()):
        ...     model(torch.randn(2, 3, 32, 32)).logsumexp(1).sum().backward()
        >>> model.fc.weight.grad_batch.shape
        torch.Size([2, 10, 112])
    """
    named = layers(model)
    for name, module in named.items():
        if hook_store_io in module._forward_hooks.values():
            raise ValueError(
                f"{name!r} was extended by backpack.extend, which keeps its input and output: "
                "extend the model with revzoo.integrations.backpack.extend instead"
            )
    if all(map(_hooks, named.values())):
        return model
    remove(model)  # gradients of shared parameters add up only if their layers are hooked together
    for handle in _Extended(model).handles:
        CTX.add_hook_handle(handle)  # CTX.remove_hooks() removes the hooks that BackPACK knows
    return model


def remove(model: nn.Module) -> None:
    """Undo :func:`extend`."""
    for module in model.modules():
        for key in _hooks(module):
            del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]


def _hooks(module: nn.Module) -> list[int]:
    """Keys of this file's hooks on ``module``."""
    # by class, not by handle: a deepcopy of a model copies its hooks, but no handles
    hooks = module._forward_hooks.items()
    return [k for k, h in hooks if isinstance(h, Hook) and isinstance(h.captures, _Extended)]


class _Extended(Captures):
    def is_collecting(self) -> bool:
        return bool(CTX.get_active_exts())

    def add(self, call: Call, gradient: Tensor) -> None:
        """Compute the quantities of the active extensions, for the parameters of this call."""
        module, exts = call.module, CTX.get_active_exts()
        for ext in exts:
            if type(ext) not in _QUANTITIES:
                known = ", ".join(kind.__name__ for kind in _QUANTITIES)
                raise NotImplementedError(
                    f"{type(ext).__name__} on a model of revzoo.integrations.backpack.extend: "
                    f"expected one of {known}. Use backpack.extend on a plain sequence of modules "
                    "for the others"
                )
        inputs, parameters, gradients = call.inputs(), own_parameters(module), None
        # squares and norms of several uses do not add up: add the gradients first. The fields are
        # written again after every use; the last one has the whole sum
        if self.several(module):
            gradients = self.sum_up(module, inputs, gradient)
        for ext in exts:
            if type(ext) is BatchL2Grad and gradients is None:
                # needs no per-sample gradient in memory
                found = squared_norms(module, inputs, gradient)
            else:
                gradients = gradients or per_sample_gradients(module, inputs, gradient)
                rows = ext.get_subsampling()  # None for all samples
                found = {
                    name: _QUANTITIES[type(ext)](g if rows is None else g[rows])
                    for name, g in gradients.items()
                }
            for name, quantity in found.items():
                setattr(parameters[name], ext.savefield, quantity)
        CTX.get_extension_hook()(module)
