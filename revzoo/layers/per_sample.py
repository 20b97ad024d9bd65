"""Per-sample gradients of a layer's parameters, and their norms without the gradients.

If a layer treats each sample of a batch separately, the input and the output gradient of sample n
determine the gradient of the parameters for this sample. :mod:`torch.func` computes it as
``vmap(grad(...))``. The rules here need one product, and compute norms without the gradients.

NOTE [ Norms without gradients ]
    For a linear layer on T places, the gradient of the weight for one sample is ``g^T a``, with
    ``g (T, O)`` and ``a (T, I)``. Its squared norm equals the sum of the entries of ``g g^T`` times
    the entries of ``a a^T``, both ``(T, T)`` (X. Li, F. Tramer, P. Liang, T. Hashimoto, "Large
    Language Models Can Be Strong Differentially Private Learners", ICLR 2022, arXiv 2110.05679).
    This is cheaper if ``2 T^2 <= O I`` (Z. Bu, J. Mao, S. Xu, "Scalable and Efficient Training of
    Large Convolutional Neural Networks with Differential Privacy", NeurIPS 2022, arXiv 2205.10683,
    section 4). A convolution is a linear layer on the unfolded image: T is the number of pixels, I
    the channels times the size of the kernel.

Shapes: N samples, I and O input and output features, T places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

Gradients = dict[str, Tensor]

# Most values of an unfolded input at a time: 4 MiB in float32. Samples are independent, so larger
# batches are processed in parts; parts of 16 MiB took as long.
UNFOLDED = 2**20


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of ``module``, without its submodules."""
    return dict(module.named_parameters(recurse=False))


def trainable(module: nn.Module) -> bool:
    """Whether a parameter of ``module`` itself requires gradient."""
    return any(p.requires_grad for p in own_parameters(module).values())


def mixing_layers(model: nn.Module) -> list[str]:
    """Names of the layers whose output for a sample depends on other samples."""
    return [name for name, m in model.named_modules() if mixes_samples(m)]


def mixes_samples(module: nn.Module) -> bool:
    """Whether ``module`` is a batch normalisation that uses the statistics of the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def refuse_mixing(model: nn.Module) -> None:
    """Raise a ValueError if a layer mixes the samples of a batch."""
    if names := mixing_layers(model):
        raise ValueError(
            f"{names[0]!r} is a batch normalisation in training, one of {len(names)}: each output "
            "depends on all samples of the batch, so there are no per-sample gradients. Create the "
            'model with norm="group" (model.norm=group), or call eval() on these layers'
        )


def per_sample_gradients(
    module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor
) -> Gradients:
    """The gradient of each sample for the parameters of ``module``, without its submodules.

    Args:
        module: any layer that treats the samples along dimension 0 separately.
        inputs: its inputs, each ``(N, ...)``.
        gradient: of its output, ``(N, ...)``.

    Returns:
        By the parameter's name, ``(N, *parameter.shape)``.

    Raises:
        ValueError: ``module`` is a batch normalisation in training.

    Example:
        >>> from revzoo.layers.per_sample import per_sample_gradients
        >>> linear = nn.Linear(3, 2)
        >>> g = per_sample_gradients(linear, [torch.ones(5, 3)], torch.ones(5, 2))
        >>> g["weight"].shape, g["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """
    refuse_mixing(module)
    if not len(gradient):
        needed = own_parameters(module).items()
        return {name: gradient.new_empty(0, *p.shape) for name, p in needed if p.requires_grad}
    if not _is_product(module):
        return _RULES.get(type(module), _any)(module, inputs, gradient)
    found = {}
    if module.weight.requires_grad:
        parts = [
            torch.einsum("ngto,ngti->ngoi", g, a) for a, g in _factors(module, inputs[0], gradient)
        ]
        found["weight"] = torch.cat(parts).view(-1, *module.weight.shape)
    if _needs(module.bias):
        found["bias"] = _places(module, gradient).sum(2).flatten(1)
    return found


def squared_norms(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> Gradients:
    """The squared norm of each gradient that :func:`per_sample_gradients` returns, ``(N,)``."""
    refuse_mixing(module)
    if not _is_product(module) or not len(gradient):
        gradients = per_sample_gradients(module, inputs, gradient)
        return {name: g.flatten(1).square().sum(1) for name, g in gradients.items()}
    found = {}
    if module.weight.requires_grad:
        found["weight"] = torch.cat(
            [_squared_norm(a, g) for a, g in _factors(module, inputs[0], gradient)]
        )
    if _needs(module.bias):
        found["bias"] = _places(module, gradient).sum(2).flatten(1).square().sum(1)
    return found


def _needs(p: Tensor | None) -> bool:
    return p is not None and p.requires_grad


def _is_product(module: Any) -> TypeGuard[Any]:
    """Whether the weight's gradient is a product of two factors (G groups of channels)."""
    if type(module) is nn.Linear:
        return True
    return type(module) in (nn.Conv1d, nn.Conv2d) and module.padding_mode == "zeros"


def _factors(module: Any, x: Tensor, gradient: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """``a (N, G, T, I / G)`` and ``g (N, G, T, O / G)``, of a part of the batch at a time."""
    x = x.to(gradient.dtype)  # autocast
    a, g = module.weight[0].numel(), gradient[0].numel() // len(module.weight)  # inputs, places
    unfolded = a * g * getattr(module, "groups", 1)
    step = max(1, UNFOLDED // unfolded)
    for i in range(0, len(x), step):
        part = x[i : i + step]
        if isinstance(module, nn.Linear):
            a = part.reshape(len(part), 1, -1, module.in_features)
        else:
            a = _grouped(module, _unfold(module, part))
        yield a, _places(module, gradient[i : i + step])


def _places(module: Any, gradient: Tensor) -> Tensor:
    """The gradient of the output as ``(N, G, T, O / G)``."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(len(gradient), 1, -1, module.out_features)
    return _grouped(module, gradient.flatten(2))


def _grouped(conv: nn.Conv1d | nn.Conv2d, t: Tensor) -> Tensor:
    """``(N, G * C, T)`` as ``(N, G, T, C)``."""
    return t.reshape(len(t), conv.groups, -1, t.shape[-1]).mT


def _unfold(conv: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """The pixels under the kernel at each place, ``(N, I * kernel, T)``."""
    x = functional.pad(x, conv._reversed_padding_repeated_twice)
    if isinstance(conv, nn.Conv1d):  # an image of one row
        sizes: Any = ((1, *t) for t in (conv.kernel_size, conv.dilation, conv.stride))
        x = x.unsqueeze(2)
    else:
        sizes = (conv.kernel_size, conv.dilation, conv.stride)
    kernel, dilation, stride = sizes
    return functional.unfold(x, kernel, dilation=dilation, stride=stride)


def _squared_norm(a: Tensor, g: Tensor) -> Tensor:
    places, width = a.shape[2:]
    if 2 * places**2 <= width * g.shape[3]:  # NOTE [ Norms without gradients ]
        return ((g @ g.mT) * (a @ a.mT)).sum((1, 2, 3)).clamp(min=0)
    return (g.mT @ a).square().sum((1, 2, 3))


def _group_norm(module: nn.GroupNorm, inputs: Sequence[Tensor], gradient: Tensor) -> Gradients:
    normal = functional.group_norm(inputs[0], module.num_groups, eps=module.eps)
    products = {"weight": normal * gradient, "bias": gradient}
    return {
        name: products[name].flatten(2).sum(2) if gradient.dim() > 2 else products[name]
        for name, p in own_parameters(module).items()
        if p.requires_grad
    }


def _layer_norm(module: nn.LayerNorm, inputs: Sequence[Tensor], gradient: Tensor) -> Gradients:
    normal = functional.layer_norm(inputs[0], module.normalized_shape, eps=module.eps)
    products = {"weight": normal * gradient, "bias": gradient}
    return {
        name: products[name].reshape(len(gradient), -1, *p.shape).sum(1)
        for name, p in own_parameters(module).items()
        if p.requires_grad
    }


_RULES: dict[type[nn.Module], Callable[[Any, Sequence[Tensor], Tensor], Gradients]] = {
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}


def _any(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> Gradients:
    """Any layer: a vectorised evaluation of the layer per sample."""
    needed = {name: p.detach() for name, p in own_parameters(module).items() if p.requires_grad}

    def of_sample(sample: Sequence[Tensor], g: Tensor) -> Gradients:
        def run(parameters: Gradients) -> Tensor:
            batch = tuple(t.unsqueeze(0) for t in sample)
            output = functional_call(module, parameters, batch)
            return output if isinstance(output, Tensor) else output[0]

        return vjp(run, needed)[1](g.unsqueeze(0))[0]

    return vmap(of_sample)(list(inputs), gradient)
