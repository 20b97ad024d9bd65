"""Stochastic gradient descent as RevNet and its peers are trained with it.

SGD with Nesterov momentum and weight decay on the weights of convolutions and linear layers only:
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

from revzoo.training.schedules import make_schedule
from revzoo.training.spec import build_dataclass, check_range

DECAYED = (_ConvNd, nn.Linear)


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """How a model is optimised: the rate, the decay, the loss's smoothing and the schedule.

    Attributes:
        lr: the peak learning rate.
        momentum: in [0, 1).
        nesterov: look ahead; needs momentum above 0.
        weight_decay: of convolution and linear weights.
        label_smoothing: in [0, 1), of the training loss.
        schedule: ``{"name": "step" | "onecycle" | "cosine" | "constant", **options}``.
    """

    lr: float = 0.1
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 2e-4
    label_smoothing: float = 0.0
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "step"})

    def __post_init__(self) -> None:
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


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in two groups: weights that are decayed, and the others.

    A parameter shared by several modules is decayed if one of them is a convolution or linear.
    """
    decayed = {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, DECAYED) and module.weight.requires_grad
    }
    trainable = [p for p in model.parameters() if p.requires_grad]
    weights = [p for p in trainable if id(p) in decayed]
    others = [p for p in trainable if id(p) not in decayed]
    groups = [
        {"params": weights, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, spec: OptimSpec) -> Optimizer:
    """SGD over :func:`parameter_groups`.

    Raises:
        ValueError: if no parameter of the model is trainable.
    """
    groups = parameter_groups(model, weight_decay=spec.weight_decay)
    if not groups:
        raise ValueError("no parameter of the model requires a gradient: nothing to train")
    return SGD(groups, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov)


def build_schedule(optimizer: Optimizer, spec: OptimSpec, *, total_steps: int) -> LRScheduler:
    """The spec's schedule for a run of ``total_steps`` optimiser steps."""
    return make_schedule(spec.schedule).build(optimizer, total_steps)
