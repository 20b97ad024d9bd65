"""Parameter groups: which parameters an optimiser treats alike.

Weight decay acts on the weights of convolutions and linear layers only. Norms and biases are scales
and offsets; decaying them changes the function instead of regularising it. Torch decays every
parameter of a group, so we divide the parameters into two groups, by the type of their module, not
by name or shape. ``decay_all`` decays all parameters.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from revzoo.models.parts import parts

if TYPE_CHECKING:
    from revzoo.training.optim.optimizers import OptimSpec

Group = dict[str, Any]  # a parameter group of torch
# _ConvNd is private in torch 2.15, but the one base of all convolutions
DECAYED = (_ConvNd, nn.Linear, nn.MultiheadAttention)
WEIGHTS = ("weight", "in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")


def plain_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """Two groups with rate and weight decay; the second one decays only with ``decay_all``."""
    weights, others = split_weights(model)
    return [
        {"params": weights, "lr": spec.lr, "weight_decay": spec.weight_decay},
        # True counts as 1
        {"params": others, "lr": spec.lr, "weight_decay": spec.weight_decay * spec.decay_all},
    ]


def sgd_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """The groups of :func:`plain_groups`, with momentum."""
    shared = {"momentum": spec.momentum, "nesterov": spec.nesterov}
    return [{**group, **shared} for group in plain_groups(model, spec)]


def muon_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """One group of hidden weights, orthogonalised, at ``spec.lr``; the rest at ``spec.sgd_lr``.

    A model without ``classifiers``, which is not from the zoo, ends with its classifier.
    """
    weights, others = split_weights(model)
    layers = [m for m in model.modules() if isinstance(m, DECAYED)]
    paths = getattr(model, "classifiers", None)
    heads = layers[-1:] if paths is None else [model.get_submodule(path) for path in paths]
    ids = {id(p) for head in heads for p in head.parameters()}
    hidden = [p for p in weights if id(p) not in ids]
    classifier = [p for p in weights if id(p) in ids]
    orthogonal = {"orthogonal": True, "weight_decay": spec.weight_decay}
    return [
        {"params": hidden, "lr": spec.lr, "momentum": spec.momentum, **orthogonal},
        {"params": [*others, *classifier], "lr": spec.sgd_lr, "momentum": spec.momentum},
    ]


def split_weights(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters: weights of :data:`DECAYED` layers, and the others.

    A parameter shared by several modules is a weight if one of them is such a layer.
    """
    layers = [module for module in model.modules() if isinstance(module, DECAYED)]
    # by identity: `==` of tensors compares values
    decayed = {id(getattr(layer, name, None)) for layer in layers for name in WEIGHTS}
    trainable = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trainable if id(p) in decayed]
    return weights, [p for p in trainable if id(p) not in decayed]


def split_by_depth(model: nn.Module, groups: list[Group], decay: float) -> list[Group]:
    """Divide each of ``groups`` by the model's parts, and multiply rates by ``decay ** depth``.

    The classifier has depth 0, the last stage depth 1.
    """
    split = []
    for depth, part in enumerate(reversed(parts(model))):
        ids = {id(p) for p in part.parameters()}
        for i, group in enumerate(groups, start=1):
            params = [p for p in group["params"] if id(p) in ids]
            # the name appears in the log of learning rates
            changed = {"lr": group["lr"] * decay**depth, "name": f"{part.name}/pg{i}"}
            split.append({**group, "params": params, **changed})
    return split
