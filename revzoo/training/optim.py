"""Optimisers: SGD as RevNet and its peers are trained with it, and Muon for short runs.

Weight decay acts on the weights of convolutions and linear layers only:
norms and biases are scale and offset, and decaying them changes the function instead of
regularising it. Torch decays every parameter of a group, so the parameters are divided into two
groups here, by the type of the module that owns them, not by their name or shape.

Defaults: momentum 0.9 and weight decay 2e-4 of Gomez et al. 2017 (arXiv 1707.04585).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from revzoo.training.muon import Muon
from revzoo.training.schedules import make_schedule
from revzoo.training.spec import build_dataclass, check_range, nearest

DECAYED = (_ConvNd, nn.Linear)


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """How a model is optimised: the rate, the decay, the loss's smoothing and the schedule.

    Attributes:
        name: ``sgd`` or ``muon`` (see :mod:`revzoo.training.muon`).
        lr: the peak learning rate; with Muon, of the weights that it makes orthogonal.
        sgd_lr: with Muon, the peak rate of all other parameters.
        momentum: in [0, 1).
        nesterov: look ahead; needs momentum above 0. Muon always does.
        weight_decay: of convolution and linear weights; with Muon decoupled (``lr * weight_decay``
            a step) and of the weights that it makes orthogonal alone.
        label_smoothing: in [0, 1), of the training loss.
        schedule: ``{"name": "step" | "onecycle" | "cosine" | "constant", **options}``.
    """

    name: str = "sgd"
    lr: float = 0.1
    sgd_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 2e-4
    label_smoothing: float = 0.0
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "step"})

    def __post_init__(self) -> None:
        if self.name not in BUILDERS:
            raise ValueError(
                f"optim.name={self.name!r}: expected one of {', '.join(BUILDERS)}"
                + nearest(str(self.name), BUILDERS)
            )
        if (self.sgd_lr is not None) != (self.name == "muon"):
            raise ValueError(
                f"optim.sgd_lr={self.sgd_lr} with optim.name={self.name}: expected a rate with "
                "muon, for the parameters that are no hidden weights, and null with sgd"
            )
        if self.sgd_lr is not None:
            check_range("optim.sgd_lr", self.sgd_lr, open_low=True, open_high=True)
        check_range("optim.lr", self.lr, open_low=True, open_high=True)
        check_range("optim.momentum", self.momentum, high=1, open_high=True)
        check_range("optim.weight_decay", self.weight_decay, open_high=True)
        check_range("optim.label_smoothing", self.label_smoothing, high=1, open_high=True)
        if self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=True needs optim.momentum > 0; got 0")
        make_schedule(self.schedule)

    @classmethod
    def of(cls, spec: OptimSpec | Mapping[str, Any] | None) -> OptimSpec:
        """The spec itself, or one built from a plain mapping (None: the defaults).

        Raises:
            ValueError: for an unknown key or a value out of range.
        """
        if isinstance(spec, OptimSpec):
            return spec
        return build_dataclass(cls, spec or {}, where="optim")

    def plain(self) -> dict[str, Any]:
        """As plain containers, which a checkpoint can hold and ``weights_only`` can load."""
        return {**asdict(self), "schedule": dict(self.schedule)}


def divided(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters: weights of convolutions and linear layers, and the others.

    A parameter shared by several modules is a weight if one of them is a convolution or linear.
    """
    decayed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, DECAYED) and module.weight.requires_grad
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trainable if id(p) in decayed]
    return weights, [p for p in trainable if id(p) not in decayed]


def build_optimizer(model: nn.Module, spec: OptimSpec) -> Optimizer:
    """The optimiser that ``spec.name`` names, over the trainable parameters.

    Raises:
        ValueError: if no parameter of the model is trainable.
    """
    weights, others = divided(model)
    if not weights and not others:
        raise ValueError("no parameter of the model requires a gradient: nothing to train")
    return BUILDERS[spec.name](weights, others, spec)


def _sgd(weights: list[nn.Parameter], others: list[nn.Parameter], spec: OptimSpec) -> Optimizer:
    groups = [
        {"params": weights, "weight_decay": spec.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)


def _muon(weights: list[nn.Parameter], others: list[nn.Parameter], spec: OptimSpec) -> Optimizer:
    hidden, classifier = weights[:-1], weights[-1:]  # the head is the last part of a network
    orthogonal = {"orthogonal": True, "weight_decay": spec.weight_decay}
    groups: list[dict[str, Any]] = [
        {"params": hidden, "lr": spec.lr, "momentum": spec.momentum, **orthogonal},
        {"params": [*others, *classifier], "lr": spec.sgd_lr, "momentum": spec.momentum},
    ]
    return Muon([group for group in groups if group["params"]])


BUILDERS = {"sgd": _sgd, "muon": _muon}


def build_schedule(optimizer: Optimizer, spec: OptimSpec, *, total_steps: int) -> LRScheduler:
    """The spec's schedule for a run of ``total_steps`` optimiser steps."""
    return make_schedule(spec.schedule).build(optimizer, total_steps)
