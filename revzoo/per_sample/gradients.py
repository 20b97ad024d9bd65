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
    the channels times the size of the kernel. On many places, the gradient of the weight itself is
    cheaper: a convolution of all samples side by side.

Shapes: N samples, I and O input and output features, T places.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from revzoo.layers.batchnorm import InvertibleBatchNorm
from revzoo.per_sample.capture import OnGradient, calls, capture, captures_of

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
    return any(p.requires_grad for p in own_parameters(module).values())


def layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of ``model`` with parameters, by name."""
    found = dict(model.named_modules())
    attentions = [m for m in found.values() if isinstance(m, nn.MultiheadAttention)]
    uncalled = {inner for m in attentions for inner in m.modules() if inner is not m}
    return {n: m for n, m in found.items() if own_parameters(m) and m not in uncalled}


def refuse_infinite(norms: Tensor) -> None:
    """Raise a FloatingPointError if a norm ``(N,)`` is not finite: it would spoil the whole sum."""
    if not norms.isfinite().all():
        which = (~norms.isfinite()).nonzero().flatten().tolist()
        raise FloatingPointError(
            f"the gradients of samples {which} of the batch are not finite, so neither is the "
            "clipped sum: look for NaN in the images, lower the learning rate, or raise the "
            "precision"
        )


def note_single_use(module: nn.Module, known: set[nn.Parameter]) -> None:
    """Add the parameters to ``known``; raise a RuntimeError if the norm of one is already known."""
    parameters = own_parameters(module).values()
    if not known.isdisjoint(parameters):
        raise RuntimeError(
            f"the parameters of a {type(module).__name__} got gradients a second time, but norms "
            "of several uses do not add up: run one backward pass for all losses, before the next "
            "forward pass"
        )
    known.update(parameters)


class Captures:
    """Registers ``on_gradient`` on each layer, and counts the uses of each parameter."""

    def __init__(self, layers: Iterable[nn.Module], on_gradient: OnGradient) -> None:
        self._on_gradient = on_gradient
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        self.handles: list[RemovableHandle] = []
        for layer in layers:
            for p in own_parameters(layer).values():
                self._owners.setdefault(p, []).append(layer)
            self.handles.append(capture(layer, on_gradient))

    def several(self, parameters: Iterable[nn.Parameter]) -> bool:
        """Whether one backward pass may reach a parameter several times."""
        return any(
            sum(calls(owner, self._on_gradient) for owner in self._owners.get(p, ())) > 1
            for p in parameters
        )

    def restart(self) -> None:
        """Forget calls whose graph will not be used."""
        for owner in {owner for owners in self._owners.values() for owner in owners}:
            for hook in captures_of(owner, self._on_gradient):
                hook.calls = 0


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
    if isinstance(module, _InstanceNorm) and module.training and module.track_running_stats:
        return (
            "keeps running statistics of all samples, which no clipping bounds: set "
            "track_running_stats=False"
        )
    if isinstance(module, nn.RNNBase) and trainable(module):
        return (
            "is a recurrent layer, whose kernel torch cannot run for each sample: write the cell "
            "with linear layers"
        )
    if getattr(module, "max_norm", None) is not None and trainable(module):
        return "changes its weight in the forward pass: set max_norm=None"
    if getattr(module, "scale_grad_by_freq", False):
        return "divides gradients by counts over the batch: set scale_grad_by_freq=False"
    if isinstance(module, nn.MultiheadAttention) and trainable(module):
        return _why_unsupported_attention(module)
    own, tensors = module._parameters, [n for n, t in vars(module).items() if isinstance(t, Tensor)]
    computed = any(f"{n}_g" in own or f"{n}_orig" in own for n in tensors)  # torch.nn.utils' names
    if computed or (isinstance(module, ParametrizationList) and trainable(module)):
        return (
            "computes a weight from its parameters outside its forward (weight or spectral "
            "normalisation, pruning, a parametrization): remove that first, for example with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    return None


def _why_unsupported_attention(module: nn.MultiheadAttention) -> str | None:
    if not module.batch_first:
        return (
            "is a nn.MultiheadAttention with samples along dimension 1: create it with "
            "batch_first=True"
        )
    if module.dropout and module.training:
        return (
            "is a nn.MultiheadAttention with dropout, so per-sample gradients would have to draw "
            "the same random numbers again: set its attribute dropout to 0.0, and use nn.Dropout "
            "on its output"
        )
    if type(module).forward is not nn.MultiheadAttention.forward:
        return (
            "overrides forward of nn.MultiheadAttention: use linear layers and "
            "torch.nn.functional.scaled_dot_product_attention"
        )
    return None


def per_sample_gradients(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """The gradient of each sample for :func:`own_parameters` of ``module``.

    Args:
        module: any layer that treats the samples along dimension 0 separately.
        inputs: its inputs, each ``(N, ...)``; positional arguments of a ``nn.MultiheadAttention``.
        gradient: of its output, ``(N, ...)``.

    Returns:
        By the parameter's name, ``(N, *parameter.shape)``.

    Raises:
        ValueError: ``module`` mixes samples, or computes its weight outside its forward.

    Example:
        >>> from revzoo.per_sample.gradients import per_sample_gradients
        >>> linear = nn.Linear(3, 2)
        >>> g = per_sample_gradients(linear, [torch.ones(5, 3)], torch.ones(5, 2))
        >>> g["weight"].shape, g["bias"].shape
        (torch.Size([5, 2, 3]), torch.Size([5, 2]))
    """
    refuse_unsupported(module)
    needed = {name: p for name, p in own_parameters(module).items() if p.requires_grad}
    if not len(gradient):
        return {name: gradient.new_empty(0, *p.shape) for name, p in needed.items()}
    if (products := _products(module, inputs, gradient)) is None:
        return _RULES.get(type(module), _any)(module, inputs, gradient)
    found: dict[str, list[Tensor]] = {name: [] for name in needed}
    for layer, weight, bias, x, g in products:
        if weight in needed:
            found[weight].append(_weight_gradients(layer, x, g))
        if bias in needed:
            found[bias].append(_bias_gradients(layer, g))
    return {
        name: (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).view(-1, *needed[name].shape)
        for name, parts in found.items()
    }


def squared_norms(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> Gradients:
    """The squared norm of each gradient that :func:`per_sample_gradients` returns, ``(N,)``."""
    refuse_unsupported(module)
    gradient = gradient.to(torch.promote_types(gradient.dtype, torch.float32))  # squares overflow
    if not len(gradient) or (products := _products(module, inputs, gradient)) is None:
        gradients = per_sample_gradients(module, inputs, gradient)
        return {name: g.flatten(1).square().sum(1) for name, g in gradients.items()}
    found: dict[str, list[Tensor]] = {
        name: [] for name, p in own_parameters(module).items() if p.requires_grad
    }
    for layer, weight, bias, x, g in products:
        if weight in found:
            found[weight].append(torch.cat([*_squared_norms_of_weight(layer, x, g)]))
        if bias in found:
            found[bias].append(_bias_gradients(layer, g).square().sum(1))
    return {name: torch.stack(parts).sum(0) for name, parts in found.items()}


class _Product(NamedTuple):
    """A linear map or convolution: its weight's gradient is a product of ``x`` and ``gradient``."""

    layer: Any  # nn.Linear or convolution of these sizes
    weight: str
    bias: str
    x: Tensor
    gradient: Tensor


def _products(module: nn.Module, inputs: Sequence[Any], gradient: Tensor) -> list[_Product] | None:
    """The products that ``module`` consists of; None if there are others."""
    if type(module) in (nn.Linear, *_CONV_WEIGHT):
        x = inputs[0].to(gradient.dtype)  # autocast
        return [_Product(module, "weight", "bias", x, gradient)]
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module, inputs, gradient)
    return None


_CONV_WEIGHT: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: conv1d_weight,
    nn.Conv2d: conv2d_weight,
    nn.Conv3d: conv3d_weight,
}


def _attention(
    module: nn.MultiheadAttention, inputs: Sequence[Any], gradient: Tensor
) -> list[_Product]:
    """The projections of queries, keys, values and output, with ``(N, T, C)`` each."""
    if gradient.dim() != 3:
        raise ValueError(
            f"nn.MultiheadAttention returned a tensor of shape {tuple(gradient.shape)}, expected "
            "(samples, tokens, channels)"
        )
    dtype = torch.promote_types(gradient.dtype, module.out_proj.weight.dtype)  # autocast
    own = {name: p.detach().to(dtype) for name, p in own_parameters(module).items()}
    names = ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    weights = [own[name] for name in names if name in own]
    if not weights:
        names, weights = ["in_proj_weight"] * 3, [*own["in_proj_weight"].chunk(3)]
    biases = own["in_proj_bias"].chunk(3) if "in_proj_bias" in own else [None] * 3
    gradient, streams = gradient.to(dtype), [x.to(dtype) for x in inputs[:3]]
    added = [name for name in ("bias_k", "bias_v") if name in own]  # one more key and value
    with torch.enable_grad():
        projected = [*map(functional.linear, streams, weights, biases)]
        projected += [own[name].expand(len(gradient), 1, -1).clone() for name in added]
        q, k, v, *more = (t.requires_grad_() for t in projected)
        if more:
            k, v = torch.cat((k, more[0]), 1), torch.cat((v, more[1]), 1)
        context = _attended(module, q, k, v, inputs[3:])
    gradients = torch.autograd.grad(context, projected, gradient @ own["out_proj.weight"])
    # bias_k and bias_v are biases of layers without a weight: "" names no parameter, so nothing
    # reads the input, and any tensor will do
    names, biased = names + [""] * len(added), ["in_proj_bias"] * 3 + added
    pairs = zip(names, biased, [*streams, *gradients[3:]], gradients, strict=True)
    products = [
        _Product(nn.Linear(x.shape[-1], g.shape[-1], device="meta"), weight, bias, x, g)
        for weight, bias, x, g in pairs
    ]
    out = context.detach()
    return [*products, _Product(module.out_proj, "out_proj.weight", "out_proj.bias", out, gradient)]


def _attended(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, others: Sequence[Any]
) -> Tensor:
    """Attention of projected ``(N, T, C)``, with the masks of ``others``."""
    padding, _, mask = [*others, None, None, None][:3]
    bias = None
    if padding is not None:
        bias = _added(padding, q)[:, None, None]
    if mask is not None:
        mask = _added(mask, q)
        mask = mask.view(-1, module.num_heads, *mask.shape[1:]) if mask.dim() == 3 else mask
        bias = mask if bias is None else bias + mask
    if module.add_zero_attn:
        k, v = functional.pad(k, (0, 0, 0, 1)), functional.pad(v, (0, 0, 0, 1))
    if bias is not None:
        bias = functional.pad(bias, (0, k.shape[1] - bias.shape[-1]))
    q, k, v = (t.view(*t.shape[:2], module.num_heads, -1).transpose(1, 2) for t in (q, k, v))
    attended = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return attended.transpose(1, 2).flatten(2)


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """``mask`` as numbers to be added to the logits; True hides."""
    if mask.dtype != torch.bool:
        return mask.to(like.dtype)
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf)


def _bias_gradients(module: Any, gradient: Tensor) -> Tensor:
    return _places(module, gradient).sum(2).flatten(1)


def _weight_gradients(module: Any, x: Tensor, gradient: Tensor) -> Tensor:
    """``(N, *weight.shape)``."""
    n = len(x)
    if isinstance(module, nn.Linear) or _few_places(module, gradient):
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


def _squared_norms_of_weight(module: Any, x: Tensor, gradient: Tensor) -> Iterator[Tensor]:
    """The squared norms ``(N,)``, of a part of the batch at a time."""
    weight, groups = module.weight, getattr(module, "groups", 1)
    width, places = weight[0].numel(), gradient[0].numel() // len(weight)
    few_places = _few_places(module, gradient)
    size = groups * places * max(width, places) if few_places else weight.numel()
    step = max(1, max(LARGEST, x.numel()) // size)
    for i in range(0, len(x), step):
        a, g = x[i : i + step], gradient[i : i + step]
        if few_places:
            a, g = _inputs_by_place(module, a), _places(module, g)
            yield ((g @ g.mT) * (a @ a.mT)).sum((1, 2, 3)).clamp(min=0)
        else:
            yield _weight_gradients(module, a, g).flatten(1).square().sum(1)


def _few_places(module: Any, gradient: Tensor) -> bool:
    """Whether products of places are cheaper; torch unfolds images only."""
    weight, groups = module.weight, getattr(module, "groups", 1)
    places = gradient[0].numel() // len(weight)
    return 2 * places**2 <= weight.numel() // groups and not isinstance(module, nn.Conv3d)


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


class _Bare(nn.Module):
    """A layer without its hooks, which run outside of the captured inputs and output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer.forward(*inputs)


def _any(module: nn.Module, inputs: Sequence[Tensor], gradient: Tensor) -> Gradients:
    """Any layer: a vectorised evaluation of the layer per sample."""
    kind, parameters = type(module).__name__, own_parameters(module)
    if wrong := [tuple(t.shape) for t in inputs if t.shape[:1] != gradient.shape[:1]]:
        raise ValueError(
            f"{kind} was called with a tensor of shape {wrong[0]} for {len(gradient)} samples: "
            "expected them along dimension 0 of each input of a layer with parameters"
        )
    dtype = gradient.dtype  # under autocast, it may have fewer bits than the parameters
    for p in parameters.values():
        dtype = torch.promote_types(dtype, p.dtype)
    inputs = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
    needed = {name: p.detach().to(dtype) for name, p in parameters.items() if p.requires_grad}
    bare = _Bare(module)

    def run(needed: Gradients, batch: Sequence[Tensor]) -> Tensor:
        values = {f"layer.{name}": p for name, p in needed.items()}
        # a parameter tied to an inner layer belongs to that layer
        output = functional_call(bare, values, tuple(batch), tie_weights=False)
        return output if isinstance(output, Tensor) else output[0]

    def gradients(batch: Sequence[Tensor], g: Tensor) -> Gradients:
        return vjp(lambda needed: run(needed, batch), needed)[1](g)[0]

    def of_sample(sample: Sequence[Tensor], g: Tensor) -> Gradients:
        return gradients([t.unsqueeze(0) for t in sample], g.unsqueeze(0))

    gradient = gradient.to(dtype)
    try:
        found = vmap(of_sample)(inputs, gradient)
    except RuntimeError as error:
        if "random operation" not in str(error):
            raise
        raise ValueError(
            f"{kind} has parameters and draws random numbers, so its per-sample gradients cannot "
            "be computed again: set its dropout to 0, or put the parameters into layers inside it"
        ) from error
    if module not in _checked and gradient.any():
        _check_sums(kind, found, gradients(inputs, gradient))
        _check_reads(kind, found, needed, lambda parameters: run(parameters, inputs))
        _checked.add(module)
    return found


def _check_sums(kind: str, found: Gradients, of_batch: Gradients) -> None:
    """Raise a ValueError unless the gradients of the samples add up to the batch's."""
    for name, g in found.items():
        if (of_batch[name] - g.sum(0)).norm() > torch.finfo(g.dtype).eps ** 0.25 * g.norm():
            raise ValueError(
                f"the per-sample gradients of {kind}.{name} do not add up to the gradient of the "
                "batch: the layer mixes samples, or one of its inputs has no samples"
            )


def _check_reads(
    kind: str, found: Gradients, parameters: Gradients, run: Callable[[Gradients], Tensor]
) -> None:
    """Raise a ValueError if the output does not depend on a parameter without gradients."""
    for name, g in found.items():
        other = parameters[name] + torch.linspace(1, 2, g[0].numel()).to(g).view_as(g[0])
        if not g.any() and torch.equal(run({**parameters, name: other}), run(parameters)):
            raise ValueError(
                f"the output of {kind} does not depend on its attribute {name!r}: freeze this "
                "parameter, or read the attribute in forward, not a copy of it"
            )


_checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # layers that _any has checked once
