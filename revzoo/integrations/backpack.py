"""BackPACK 1.7 on reversible networks: per-sample gradients at the memory of one branch.

BackPACK's ``extend`` keeps the input and output of every module until the backward pass. This one
leaves the inputs to the memory modes (:mod:`revzoo.per_sample.capture`). Extensions, their context
and their options are BackPACK's.

BackPACK has no rules for GroupNorm, LayerNorm, convolutions with nonzero padding, other layers with
parameters, and parameters that are used several times. This module adds them, and the extension
:class:`BatchDotGrad`.

Source: F. Dangel, F. Kunstner, P. Hennig, "BackPACK: Packing more into Backprop", ICLR 2020, arXiv
1912.10985.

Known limit: first-order extensions only. Second-order extensions pass quantities from module to
module, so every operation must be a module that BackPACK knows. Sums of streams are not.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from backpack import hook_run_extensions, hook_store_io, memory_cleanup
from backpack.context import CTX
from backpack.extensions import BatchGrad, BatchL2Grad, SumGradSquared, Variance
from backpack.extensions.backprop_extension import BackpropExtension as Extension
from backpack.extensions.firstorder.base import (
    FirstOrderBackpropExtension,
    FirstOrderModuleExtension,
)
from torch import Tensor, nn

from revzoo.per_sample.capture import Call, calls, capture
from revzoo.per_sample.gradients import (
    layers,
    mixes_samples,
    note_single_use,
    own_parameters,
    per_sample_gradients,
    refuse_unsupported,
    squared_norms,
    trainable,
)


class BatchDotGrad(FirstOrderBackpropExtension):  # type: ignore[misc]
    """Dot products of the gradients of all pairs of samples, ``(B, B)``, in ``batch_dot``.

    Each parameter has its own matrix; their sum is the Gram matrix of the whole gradients. Scaled
    as BackPACK's ``BatchGrad``: with a loss that is a mean over B samples, by ``1 / B**2``.
    """

    def __init__(self) -> None:
        super().__init__(savefield="batch_dot", module_exts={})


def _dot(gradients: Tensor) -> Tensor:
    rows = gradients.flatten(1)
    return rows @ rows.T


# each extension's quantity, from per-sample gradients (B, ...)
_QUANTITIES: dict[type, Callable[[Tensor], Tensor]] = {
    BatchGrad: lambda g: g,
    BatchL2Grad: lambda g: g.flatten(1).square().sum(1),
    BatchDotGrad: _dot,
    SumGradSquared: lambda g: g.square().sum(0),
    Variance: lambda g: g.var(0, correction=0),
}


class _Rule(FirstOrderModuleExtension):  # type: ignore[misc]
    """An extension's rule for a layer with these parameters that BackPACK has no rule for."""

    def __init__(self, names: Iterable[str]) -> None:
        names = list(names)
        # BackPACK looks up a method by each parameter's name, and checks in __init__ that it exists
        for name in names:
            setattr(self, name, functools.partial(self._quantity, name))
        super().__init__(names)

    @staticmethod
    def _quantity(
        name: str, ext: Extension, module: Any, g_inp: Any, g_out: Any, quantities: None
    ) -> Tensor:
        if type(ext) is BatchL2Grad:  # norms that need no per-sample gradient in memory
            return squared_norms(module, [module.input0], g_out[0])[name]
        return _quantity(ext, per_sample_gradients(module, [module.input0], g_out[0])[name])


def _quantity(ext: Extension, gradients: Tensor) -> Tensor:
    rows = ext.get_subsampling()  # None for all samples
    return _QUANTITIES[type(ext)](gradients if rows is None else gradients[rows])


def extend(model: nn.Module) -> nn.Module:
    """Prepare every layer of ``model`` for BackPACK's extensions; returns the model.

    A second call changes nothing. Layers whose parameters are frozen cost nothing.

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
    # batch normalisation without parameters is not a layer, but must raise when an extension runs
    named = layers(model) | {n: m for n, m in model.named_modules() if mixes_samples(m)}
    owners = Counter(p for module in named.values() for p in own_parameters(module).values())
    for name, module in named.items():
        if _hooks(module):
            continue
        if hook_store_io in module._forward_hooks.values():
            raise ValueError(
                f"{name!r} was extended by backpack.extend, which keeps its input and output: "
                "extend the model with revzoo.integrations.backpack.extend instead"
            )
        tied = any(owners[p] > 1 for p in own_parameters(module).values())
        # CTX.remove_hooks() removes the hooks that BackPACK knows
        CTX.add_hook_handle(capture(module, _run_tied if tied else _run))
    return model


def remove(model: nn.Module) -> None:
    """Undo :func:`extend`, as the handles of :func:`~revzoo.per_sample.capture.capture` do."""
    for module in model.modules():
        for key in _hooks(module):
            del module._forward_hooks[key], module._forward_hooks_with_kwargs[key]


def _hooks(module: nn.Module) -> list[int]:
    """Keys of this file's hooks on ``module``."""
    # by function, not by handle: a deepcopy of a model copies its hooks, but no handles
    hooks = module._forward_hooks.items()
    return [key for key, hook in hooks if getattr(hook, "on_gradient", None) in (_run, _run_tied)]


def _run(call: Call, gradient: Tensor, *, tied: bool = False) -> None:
    """Run the extensions as BackPACK's backward hook does, on the inputs of this call."""
    module, exts = call.module, CTX.get_active_exts()
    if not exts or not (trainable(module) or mixes_samples(module)):
        return
    refuse_unsupported(module)
    for ext in exts:
        if type(ext) not in _QUANTITIES:
            known = ", ".join(kind.__name__ for kind in _QUANTITIES)
            raise NotImplementedError(
                f"{type(ext).__name__} on a model of revzoo.integrations.backpack.extend: expected "
                f"one of {known}. Use backpack.extend on a plain sequence of modules for the others"
            )
    inputs = call.inputs()
    # BackPACK's rules know one input, and zero padding given as a number
    has_rule = (
        len(inputs) == 1
        and getattr(module, "padding_mode", "zeros") == "zeros"
        and not isinstance(getattr(module, "padding", 0), str)
    )
    # squares and norms of several uses do not add up: add the gradients first
    if tied or not has_rule or calls(module, _run) > 1:
        _add(call, inputs, gradient, exts)
        return
    note_single_use(module, call.backward_pass.single)
    for ext in exts:
        ours = vars(ext).setdefault("revzoo_rules", set())
        # BackPACK's rule for BatchL2Grad multiplies all pairs of positions of a convolution; and
        # another instance of a class may have other parameters
        overwrite = type(ext) is BatchL2Grad or type(module) in ours
        with contextlib.suppress(ValueError):  # BackPACK has a rule for this layer: keep it
            ext.set_module_extension(type(module), _Rule(module._parameters), overwrite=overwrite)
            ours.add(type(module))
    # what BackPACK's own forward hook would have stored
    module.input0 = inputs[0]
    module.output = gradient  # first-order rules only read its shape
    try:
        hook_run_extensions(module, (), (gradient,))
    finally:
        memory_cleanup(module)


def _run_tied(call: Call, gradient: Tensor) -> None:
    _run(call, gradient, tied=True)


def _add(call: Call, inputs: Sequence[Tensor], gradient: Tensor, exts: Iterable[Extension]) -> None:
    parameters, sums = own_parameters(call.module), call.backward_pass.sums
    for name, gradients in per_sample_gradients(call.module, inputs, gradient).items():
        p = parameters[name]
        sums[p] = sums[p] + gradients if p in sums else gradients
        for ext in exts:
            # written again after every use; the last one has the whole sum
            setattr(p, ext.savefield, _quantity(ext, sums[p]))
    CTX.get_extension_hook()(call.module)
