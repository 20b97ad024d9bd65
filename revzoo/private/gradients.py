"""Per-sample gradients of a layer's parameters, and their norms without the gradients.

If a layer treats each sample of a batch separately, the input and the output gradient of sample n
determine the gradient of the parameters for this sample. :mod:`torch.func` computes it as
``vmap(vjp(...))``, for any layer. Linear layers, convolutions and norms have rules here, of one
product each.

NOTE [ Norms without gradients ]
    For a linear layer on T places, the gradient of the weight for one sample is ``g^T a``, with
    ``g (T, O)`` and ``a (T, I)``. Its squared norm equals the sum of the entries of ``g g^T`` times
    the entries of ``a a^T``, both ``(T, T)`` (X. Li, F. Tramer, P. Liang, T. Hashimoto, "Large
    Language Models Can Be Strong Differentially Private Learners", ICLR 2022, arXiv 2110.05679).
    This is cheaper if ``2 T^2 <= O I`` (Z. Bu, J. Mao, S. Xu, "Scalable and Efficient Training of
    Large Convolutional Neural Networks with Differential Privacy", NeurIPS 2022, arXiv 2205.10683,
    section 4). A convolution is a linear layer on the unfolded image: T is the number of pixels, I
    the channels times the size of the kernel. On many places, the gradient of the weight itself is
    cheaper: a convolution of all samples side by side.

Shapes: N samples, I and O input and output features, T places.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from revzoo.layers.norm_act import ActNorm, InvertibleBatchNorm

Gradients = dict[str, Tensor]

# Samples are independent, so we compute norms for a part of the batch at a time. The temporary
# tensors are as large as the input of the layer, or have this many values: 1 MiB in float32.
LARGEST = 2**18


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a call of ``module`` uses, without parameters of layers that it calls."""
    uncalled = isinstance(module, nn.MultiheadAttention)  # reads the weights of its out_proj
    return dict(module.named_parameters(recurse=uncalled))


def trainable(module: nn.Module) -> bool:
    """Whether one of :func:`own_parameters` requires gradient."""
    return bool(_needed(module))


def _needed(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in own_parameters(module).items() if p.requires_grad}


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` with parameters, by name."""
    found = dict(model.named_modules())
    attentions = [m for m in found.values() if isinstance(m, nn.MultiheadAttention)]
    uncalled = {inner for m in attentions for inner in m.modules() if inner is not m}
    return {n: m for n, m in found.items() if own_parameters(m) and m not in uncalled}


def returned_tensors(output: Any) -> list[Tensor]:
    """The tensors that a layer returned, without indices and masks."""
    leaves = [t for t in tree_leaves(output) if isinstance(t, Tensor)]
    return [t for t in leaves if t.is_floating_point() or t.is_complex()]


def as_rows(gradients: Tensor) -> Tensor:
    """Per-sample gradients ``(N, ...)`` as ``(N, values)``, also of a parameter without shape."""
    return gradients.unsqueeze(-1).flatten(1)


def refuse_infinite(norms: Tensor) -> None:
    """Raise a FloatingPointError if a norm ``(N,)`` is not finite: it would spoil the whole sum."""
    if not norms.isfinite().all():
        which = (~norms.isfinite()).nonzero().flatten().tolist()
        raise FloatingPointError(
            f"the gradients of samples {which} of the batch are not finite, so neither is the "
            "clipped sum: look for NaN in the images, lower the learning rate, or raise the "
            "precision"
        )


def mixes_samples(module: nn.Module) -> bool:
    """Whether ``module`` is a batch normalisation that uses the statistics of the batch."""
    if isinstance(module, InvertibleBatchNorm):
        return module.training
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def refuse_unsupported(model: nn.Module) -> None:
    """Raise a ValueError if a layer mixes samples, or the rules cannot see its parameters' use."""
    for name, module in model.named_modules():
        if why := _why_unsupported(module):
            raise ValueError(f"{(name or type(model).__name__)!r} {why}")


def _why_unsupported(module: nn.Module) -> str | None:
    if module._compiled_call_impl is not None:
        return (
            "is compiled, so the layers inside are not called one by one: use it without "
            "compile(), or without callbacks.compiled_branches"
        )
    if mixes_samples(module):
        return (
            "is a batch normalisation in training: each output depends on all samples of the "
            "batch, so there are no per-sample gradients. Create the model with "
            'norm="group" (model.norm=group), or call eval() on such layers'
        )
    if isinstance(module, ActNorm) and module.training and not module._was_initialised():
        return (
            "would take its scale and shift from the first batch, which no clipping bounds: run a "
            "public batch through the model before, or set the parameters and initialised"
        )
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return (
            "keeps running statistics of all samples, which no clipping bounds: set "
            "track_running_stats=False"
        )
    if getattr(module, "scale_grad_by_freq", False):
        return "divides gradients by counts over the batch: set scale_grad_by_freq=False"
    if not trainable(module):
        return None
    if isinstance(module, nn.RNNBase):
        return (
            "is a recurrent layer, whose kernel torch cannot run for each sample: write the cell "
            "with linear layers"
        )
    if getattr(module, "max_norm", None) is not None:
        return "changes its weight in the forward pass: set max_norm=None"
    if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
        return "has samples along dimension 1: create it with batch_first=True"
    own, tensors = module._parameters, [n for n, t in vars(module).items() if isinstance(t, Tensor)]
    computed = any(f"{n}_g" in own or f"{n}_orig" in own for n in tensors)  # torch.nn.utils' names
    if computed or isinstance(module, ParametrizationList):
        return (
            "computes a weight from its parameters outside its forward (weight or spectral "
            "normalisation, pruning, a parametrization): remove that first, for example with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    return None


def per_sample_gradients(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """The gradient of each sample for :func:`own_parameters` of ``module``.

    Args:
        module: any layer that treats the samples along dimension 0 separately.
        inputs: the arguments of its ``forward``; tensors are ``(N, ...)``, except the masks of a
            ``nn.MultiheadAttention``.
        gradient: of its output, ``(N, ...)``.

    Returns:
        By the parameter's name, ``(N, *parameter.shape)``.

    Raises:
        ValueError: ``module`` mixes samples, or computes its weight outside its forward.

    Example:
        >>> from revzoo.private.gradients import per_sample_gradients
        >>> linear = nn.Linear(3, 2)
        >>> g = per_sample_gradients(linear, [torch.ones(5, 3)], torch.ones(5, 2))
        >>> g["weight"].shape, g["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """
    refuse_unsupported(module)
    return _gradients(module, _of_samples(module, inputs, gradient), gradient)


def squared_norms(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """The squared norm of each gradient that :func:`per_sample_gradients` returns, ``(N,)``."""
    refuse_unsupported(module)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # squares overflow
    inputs = _of_samples(module, inputs, gradient)
    found: dict[str, list[Tensor]] = {name: [] for name in _needed(module)}
    for part, g in _parts(module, inputs, gradient):
        if _has_few_places(module, gradient):
            norms = _norms_from_places(module, part[0].to(g.dtype), g)
        else:
            gradients = _gradients(module, part, g)
            norms = {name: as_rows(each).square().sum(1) for name, each in gradients.items()}
        for name in found:
            found[name].append(norms[name])
    return {name: torch.cat(norms) for name, norms in found.items()}


def _of_samples(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Sequence[Any]:
    """The inputs, with the samples along dimension 0 of each tensor."""
    count = len(gradient)
    if type(module).forward is nn.MultiheadAttention.forward:
        q, k, v, padding, _, mask = [*inputs, None, None, None][:6]
        if mask is not None:  # one mask, or one for each sample and head
            mask = mask.expand(count * module.num_heads, *mask.shape[-2:])  # type: ignore[operator]
            mask = mask.unflatten(0, (count, module.num_heads))
        inputs = q, k, v, padding, True, mask  # weights: the kernels without have no rule for vmap
    tensors = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    if not tensors:
        raise ValueError(
            f"{type(module).__name__} was called without a tensor, so its output has no samples: "
            "freeze its parameters, or pass it the input of the layer that uses its output"
        )
    for t in tensors:
        if t.shape[:1] != gradient.shape[:1]:
            raise ValueError(
                f"{type(module).__name__} was called with a tensor of shape {tuple(t.shape)} for "
                f"{count} samples: expected them along dimension 0 of each input of a layer with "
                "parameters"
            )
    return inputs


def _parts(
    module: nn.Module, inputs: Sequence[Any], gradient: Tensor
) -> Iterator[tuple[Sequence[Any], Tensor]]:
    """Parts of the batch whose temporary tensors are no larger than :data:`LARGEST`."""
    given = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
    size = sum(p.numel() for p in _needed(module).values())
    if _has_few_places(module, gradient):
        places, width = _count_places(module, gradient), module.weight[0].numel()  # type: ignore
        size = _groups(module) * places * max(width, places)
    # _of_any sees only on two samples whether a layer mixes them
    least = 1 if _rule(module) in _RULES or module in _checked[module.training] else 2
    step = max(least, max([LARGEST, *(t.numel() for t in given)]) // max(1, size))
    for i in range(0, len(gradient) or 1, step):
        rows = slice(i, i + step)
        yield tree_map_only(Tensor, operator.itemgetter(rows), tuple(inputs)), gradient[rows]


def _gradients(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """See :func:`per_sample_gradients`."""
    needed = _needed(module)
    if not len(gradient):
        return {name: gradient.new_empty(0, *p.shape) for name, p in needed.items()}
    if _rule(module) in _PRODUCTS:
        x = inputs[0].to(gradient.dtype)  # autocast
        return {
            name: _weight_gradients(module, x, gradient)
            if name == "weight"
            else _places(module, gradient).sum(2).flatten(1)
            for name in needed
        }
    if _rule(module) in _NORMS:
        return {name: g for name, g in _of_norm(module, inputs[0], gradient) if name in needed}
    return _of_any(module, inputs, gradient)


_CONV_WEIGHT: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: conv1d_weight,
    nn.Conv2d: conv2d_weight,
    nn.Conv3d: conv3d_weight,
}
# the weight's gradient is a product of the input and the output's gradient
_PRODUCTS = (nn.Linear, *_CONV_WEIGHT)
_NORMS = (nn.GroupNorm, nn.LayerNorm)
_RULES = (*_PRODUCTS, *_NORMS)


def _rule(module: nn.Module) -> type | None:
    """The class of ``module``, if it may have a rule: it has no ``forward`` of its own."""
    return None if "forward" in vars(module) else type(module)


def _weight_gradients(module: Any, x: Tensor, gradient: Tensor) -> Tensor:
    """``(N, *weight.shape)``."""
    n = len(x)
    if isinstance(module, nn.Linear) or _has_few_places(module, gradient):
        a, g = _inputs_by_place(module, x), _places(module, gradient)
        return (g.mT @ a).view(n, *module.weight.shape)
    # samples side by side as groups of channels (G. Rochette, A. Manoel, E. W. Tramel, "Efficient
    # Per-Example Gradient Computations in Convolutional Neural Networks", 2019, arXiv 1912.06015)
    x = _padded(module, x)
    weights = _CONV_WEIGHT[type(module)](
        x.reshape(1, -1, *x.shape[2:]),
        (n * module.out_channels, *module.weight.shape[1:]),
        gradient.reshape(1, -1, *gradient.shape[2:]),
        stride=module.stride,
        dilation=module.dilation,
        groups=n * module.groups,
    )
    return weights.view(n, *module.weight.shape)


def _norms_from_places(module: Any, x: Tensor, gradient: Tensor) -> Gradients:
    """The squared norms of weight and bias (NOTE [ Norms without gradients ])."""
    a, g = _inputs_by_place(module, x), _places(module, gradient)
    return {
        "weight": ((g @ g.mT) * (a @ a.mT)).sum((1, 2, 3)).clamp(min=0),
        "bias": g.sum(2).flatten(1).square().sum(1),
    }


def _has_few_places(module: Any, gradient: Tensor) -> bool:
    """Whether products of places are cheaper; torch unfolds images only."""
    if _rule(module) not in (nn.Linear, nn.Conv1d, nn.Conv2d) or not len(gradient):
        return False
    return 2 * _count_places(module, gradient) ** 2 <= module.weight.numel() // _groups(module)


def _count_places(module: Any, gradient: Tensor) -> int:
    return gradient.shape[1:].numel() // len(module.weight)


def _groups(module: Any) -> int:
    return getattr(module, "groups", 1)


def _places(module: Any, gradient: Tensor) -> Tensor:
    """The gradient of the output as ``(N, G, T, O / G)``."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(len(gradient), 1, -1, module.out_features)
    return _grouped(module, gradient.flatten(2))


def _inputs_by_place(module: Any, x: Tensor) -> Tensor:
    """The input that the weight multiplies at each place, ``(N, G, T, I / G)``."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), 1, -1, module.in_features)
    x = _padded(module, x)
    sizes: Any = (module.kernel_size, module.dilation, module.stride)
    if isinstance(module, nn.Conv1d):  # an image of one row
        x, sizes = x.unsqueeze(2), tuple((1, *t) for t in sizes)
    kernel, dilation, stride = sizes
    return _grouped(module, functional.unfold(x, kernel, dilation=dilation, stride=stride))


def _grouped(conv: Any, t: Tensor) -> Tensor:
    """``(N, G * C, T)`` as ``(N, G, T, C)``."""
    return t.reshape(len(t), conv.groups, -1, t.shape[-1]).mT


def _padded(conv: Any, x: Tensor) -> Tensor:
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    return functional.pad(x, conv._reversed_padding_repeated_twice, mode=mode)


def _of_norm(module: Any, x: Tensor, gradient: Tensor) -> Iterator[tuple[str, Tensor]]:
    """GroupNorm and LayerNorm."""
    if isinstance(module, nn.GroupNorm):
        normal = functional.group_norm(x, module.num_groups, eps=module.eps)
        shape, dim = (len(x), module.num_channels, -1), 2
    else:
        normal = functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        shape, dim = (len(x), -1, *module.normalized_shape), 1
    yield "weight", (normal * gradient).reshape(shape).sum(dim)
    yield "bias", gradient.reshape(shape).sum(dim)


class _Bare(nn.Module):
    """A layer without its hooks, which run outside of the captured inputs and output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Any) -> Tensor:
        if type(self.layer).forward is nn.MultiheadAttention.forward and inputs[-1] is not None:
            inputs = (*inputs[:-1], inputs[-1].flatten(0, 1))  # the mask, see _of_samples
        output = self.layer.forward(*inputs)
        return returned_tensors(output)[0]


def _of_any(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """Any layer: a vectorised evaluation of the layer per sample."""
    kind, parameters = type(module).__name__, own_parameters(module)
    dtype = gradient.dtype  # under autocast, it may have fewer bits than the parameters
    for p in parameters.values():
        dtype = torch.promote_types(dtype, p.dtype)
    needed = {name: p.detach().to(dtype) for name, p in _needed(module).items()}
    leaves, structure = tree_flatten(tuple(inputs))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    tensors = [t.to(dtype) if t.is_floating_point() else t for t in tensors]
    gradient, bare = gradient.to(dtype), _Bare(module)

    def run(needed: Gradients, tensors: Sequence[Tensor]) -> Tensor:
        values, rest = {f"layer.{name}": p for name, p in needed.items()}, iter(tensors)
        given = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        # a parameter tied to an inner layer belongs to that layer
        output: Tensor = functional_call(
            bare, values, tree_unflatten(given, structure), tie_weights=False
        )
        return output

    def gradients(tensors: Sequence[Tensor], g: Tensor) -> Gradients:
        found: Gradients = vjp(lambda needed: run(needed, tensors), needed)[1](g)[0]
        return found

    def of_sample(tensors: Sequence[Tensor], g: Tensor) -> Gradients:
        return gradients([t.unsqueeze(0) for t in tensors], g.unsqueeze(0))

    try:
        found: Gradients = vmap(of_sample)(tensors, gradient)
    except RuntimeError as error:
        for words, why in _NOT_AGAIN.items():
            if words in str(error):
                raise ValueError(
                    f"{kind} has parameters and {why}, or put the parameters into layers inside it"
                ) from error
        raise
    if module not in _checked[module.training] and gradient.any():
        of_batch = gradients(tensors, gradient)
        for name, g in found.items():
            difference, eps = (of_batch[name] - g.sum(0)).norm(), torch.finfo(dtype).eps
            # the second term: rounding, for example of a bias that a norm removes
            if difference > eps**0.25 * g.norm() + eps**0.75 * gradient.norm():
                raise ValueError(
                    f"the per-sample gradients of {kind}.{name} do not add up to the gradient of "
                    "the batch: the layer mixes samples, or one of its inputs has no samples"
                )
            other = needed[name] + torch.linspace(1, 2, g[0].numel()).to(g).view_as(g[0])
            if not g.any() and torch.equal(
                run({**needed, name: other}, tensors), run(needed, tensors)
            ):
                raise ValueError(
                    f"the output of {kind} does not depend on its attribute {name!r}: freeze this "
                    "parameter, or read the attribute in forward, not a copy of it"
                )
        if len(gradient) > 1:  # one sample mixes with no other
            _checked[module.training].add(module)
    return found


# by words of torch's error: why a layer cannot be evaluated again for each sample
_NOT_AGAIN = {
    "random operation": "draws random numbers, so its per-sample gradients cannot be computed "
    "again: set its dropout to 0, for example by the attribute dropout of nn.MultiheadAttention",
    "in-place operation": "changes its input or a buffer in place, so its per-sample gradients "
    "cannot be computed again: use an operation that makes a new tensor",
}

# layers that _of_any has checked once, in evaluation mode and in training mode
_checked: tuple[weakref.WeakSet[nn.Module], ...] = (weakref.WeakSet(), weakref.WeakSet())
