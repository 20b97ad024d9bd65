"""Optimisers and learning-rate schedules.

SGD is for RevNets and i-RevNets, AdamW for transformers, Muon for short runs, LAMB for steps of
thousands of images (Y. You et al. 2020, arXiv 1904.00962; timm's). For fine-tuning,
``layer_decay`` lowers the learning rate from the classifier to the stem, by a factor for each part
of the network (Howard and Ruder 2018, arXiv 1801.06146, section 3.2).

Weight decay acts on the weights of convolutions and linear layers only, by the type of their
module; ``decay_all`` decays norms and biases, too. A weight that torch computes from parameters
(``weight_norm``, pruning) decays by these parameters.

Defaults: momentum 0.9 and weight decay 2e-4 from Gomez et al. 2017 (arXiv 1707.04585).

Torch's schedules count in steps, a recipe in fractions of a run. They advance after every optimiser
step, so a recipe does not depend on the size of the data set.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, LRScheduler, MultiStepLR, OneCycleLR

from revzoo._checks import (
    build_dataclass,
    check_choice,
    check_number,
    check_registered,
    did_you_mean,
    is_number,
    package_needed,
)
from revzoo.models.network import parts
from revzoo.training.optim.muon import Muon

Group = dict[str, Any]  # a parameter group of torch
# _ConvNd is private in torch 2.15, but the one base of all convolutions
DECAYED = (_ConvNd, nn.Linear, nn.MultiheadAttention)
BALANCED = "balanced"  # of class_weights


@dataclass(frozen=True, kw_only=True)
class OptimSpec:
    """The optimiser of a run: rate, decay, schedule, and the options of the training loss.

    Attributes:
        name: ``sgd``, ``adamw`` (for transformers), ``muon`` (see
            :mod:`revzoo.training.optim.muon`), ``lamb`` (needs timm; clips all gradients together
            to a norm of 1) or a registered optimiser.
        lr: the peak learning rate; with Muon, for the hidden weights.
        sgd_lr: with Muon, the peak rate of all other parameters.
        momentum: in [0, 1); AdamW, LAMB and registered optimisers ignore it.
        nesterov: use Nesterov momentum; needs momentum above 0. Muon always uses it.
        weight_decay: for the weights of convolutions, linear layers and attention; with Muon, for
            the hidden weights only, and decoupled (``lr * weight_decay`` per step).
        decay_all: decay norms and biases too, as ``SGD(model.parameters())`` does; not with Muon.
        loss: of the task's losses, see :mod:`revzoo.training.tasks.losses`; None for its default:
            ``cross_entropy``, ``bce`` (several labels), ``huber`` (regression) or ``dice_ce``
            (segmentation).
        label_smoothing: in [0, 1), of the training loss; regression has none.
        label_threshold: in [0, 1), with ``loss="bce"``: in training, classes with a larger share of
            a label that Mixup or CutMix has mixed count as 1, the others as 0, before smoothing
            (timm's ``--bce-target-thresh``, arXiv 2110.00476). None for the shares.
        class_weights: of the training loss: one number > 0 per class, ``"balanced"`` (see
            :mod:`revzoo.training.classifier`) or None for equal weights.
        layer_decay: in (0, 1]; multiplies the rate of the last stage once, of the stage before
            it twice, and so on to the stem.
        schedule: ``{"name": "step" | "onecycle" | "cosine" | "constant", **options}``.
    """

    name: str = "sgd"
    lr: float = 0.1
    sgd_lr: float | None = None
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 2e-4
    decay_all: bool = False
    loss: str | None = None
    label_smoothing: float = 0.0
    label_threshold: float | None = None
    class_weights: str | Sequence[float] | None = None
    layer_decay: float = 1.0
    schedule: Mapping[str, Any] = field(default_factory=lambda: {"name": "step"})

    def __post_init__(self) -> None:
        check_choice("optim.name", self.name, OPTIMIZERS)
        if (self.sgd_lr is not None) != (self.name == "muon"):
            raise ValueError(
                f"optim.sgd_lr={self.sgd_lr} with optim.name={self.name}: expected a rate with "
                "muon, for all parameters but the hidden weights, and null with other optimisers"
            )
        if self.decay_all and self.name == "muon":
            raise ValueError(
                "optim.decay_all=True with optim.name=muon: expected false, since muon decays "
                "hidden weights only"
            )
        if self.sgd_lr is not None:
            check_number("optim.sgd_lr", self.sgd_lr, open_low=True, open_high=True)
        check_number("optim.lr", self.lr, open_low=True, open_high=True)
        check_number("optim.momentum", self.momentum, high=1, open_high=True)
        check_number("optim.weight_decay", self.weight_decay, open_high=True)
        check_number("optim.label_smoothing", self.label_smoothing, high=1, open_high=True)
        if self.label_threshold is not None:
            check_number("optim.label_threshold", self.label_threshold, high=1, open_high=True)
            if self.loss != "bce":
                raise ValueError(
                    f"optim.label_threshold={self.label_threshold} with optim.loss={self.loss}: "
                    "the labels would no longer sum to 1; set optim.loss=bce or leave it out"
                )
        if self.class_weights is not None:
            # plain numbers, which a checkpoint can hold
            object.__setattr__(self, "class_weights", _checked_weights(self.class_weights))
        check_number("optim.layer_decay", self.layer_decay, high=1, open_low=True)
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise ValueError("optim.nesterov=True needs optim.momentum > 0; got 0")
        make_schedule(self.schedule)  # only for its errors

    @classmethod
    def of(cls, spec: OptimSpec | Mapping[str, Any] | None) -> OptimSpec:
        """``spec``, or one from a mapping, with errors for its keys; None for the defaults."""
        return (
            spec if isinstance(spec, OptimSpec) else build_dataclass(cls, spec or {}, where="optim")
        )

    def plain(self) -> dict[str, Any]:
        """This spec as plain containers, not Hydra's, which a checkpoint can hold."""
        return {**asdict(self), "schedule": dict(self.schedule)}


def _checked_weights(weights: str | Sequence[float]) -> str | tuple[float, ...]:
    if isinstance(weights, str):
        if weights != BALANCED:
            raise ValueError(
                f"optim.class_weights={weights}: expected null, {BALANCED} or a list of numbers"
                + did_you_mean(weights, [BALANCED])
            )
        return weights
    if not all(is_number(w) and 0 < w < math.inf for w in weights):
        raise ValueError(
            f"optim.class_weights={list(weights)}: expected numbers > 0, one for each class"
        )
    return tuple(map(float, weights))


def build_optimizer(model: nn.Module, spec: OptimSpec) -> Optimizer:
    """The optimiser ``spec.name`` over the trainable parameters.

    Raises:
        ValueError: no parameter of the model is trainable, or ``spec.layer_decay`` is below 1 and
            the model is not from the zoo.
    """
    divide, build = OPTIMIZERS[spec.name]
    groups = divide(model, spec)
    if spec.layer_decay < 1:
        groups = split_by_depth(model, groups, spec.layer_decay)
    groups = [group for group in groups if group["params"]]  # frozen parts leave some empty
    if not groups:
        raise ValueError("no parameter of the model requires a gradient: unfreeze some of them")
    return build(groups)


def plain_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """Two groups with rate and weight decay; the second one decays only with ``decay_all``."""
    weights, others = split_weights(model)
    decay = {"weights": spec.weight_decay, "norms_biases": spec.weight_decay * spec.decay_all}
    # the names appear in the log of learning rates
    return [
        {"name": name, "params": params, "lr": spec.lr, "weight_decay": decay[name]}
        for name, params in zip(decay, (weights, others), strict=True)
    ]


def sgd_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """The groups of :func:`plain_groups`, with momentum."""
    shared = {"momentum": spec.momentum, "nesterov": spec.nesterov}
    return [{**group, **shared} for group in plain_groups(model, spec)]


def muon_groups(model: nn.Module, spec: OptimSpec) -> list[Group]:
    """One group of hidden weights, orthogonalised, at ``spec.lr``; the rest at ``spec.sgd_lr``.

    A model without ``classifiers``, which is not from the zoo, ends with its classifier.
    """
    for path, layer in model.named_modules():
        names = dict(layer.named_parameters()) if isinstance(layer, DECAYED) else {}
        # of weight_norm, and of its older form
        if {"parametrizations.weight.original1", "weight_g"} & names.keys():
            raise ValueError(
                f"optim.name=muon with {path}.weight computed from 2 parameters, as by "
                "weight_norm: Muon orthogonalises weights themselves; use sgd or adamw, or remove "
                "the parametrization"
            )
    weights, others = split_weights(model)
    paths = getattr(model, "classifiers", None)
    layers = [m for m in model.modules() if isinstance(m, DECAYED)]
    heads = layers[-1:] if paths is None else [model.get_submodule(path) for path in paths]
    ids = {id(p) for head in heads for p in head.parameters()}
    hidden = [p for p in weights if id(p) not in ids]
    classifier = [p for p in weights if id(p) in ids]
    orthogonal = {"orthogonal": True, "weight_decay": spec.weight_decay}
    momentum = {"momentum": spec.momentum}
    return [
        {"name": "hidden_weights", "params": hidden, "lr": spec.lr, **momentum, **orthogonal},
        {"name": "others", "params": [*others, *classifier], "lr": spec.sgd_lr, **momentum},
    ]


def split_weights(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters: weights of :data:`DECAYED` layers, and the others.

    A parameter shared by several modules is a weight if one of them is such a layer.
    """
    layers = [module for module in model.modules() if isinstance(module, DECAYED)]
    named = itertools.chain.from_iterable(layer.named_parameters() for layer in layers)
    decayed = {id(p) for name, p in named if "bias" not in name}
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
            name = f"{part.name}/{group.get('name', f'pg{i}')}"
            changed = {"lr": group["lr"] * decay**depth, "name": name}
            split.append({**group, "params": params, **changed})
    return split


def lamb(groups: list[Group]) -> Optimizer:
    """LAMB as timm has it.

    Raises:
        ValueError: timm is not installed.
    """
    try:
        from timm.optim.lamb import Lamb  # an extra, which takes seconds to import
    except ImportError:
        raise ValueError(package_needed("optim.name=lamb needs the package", "timm")) from None
    return Lamb(groups)


Divide = Callable[[nn.Module, OptimSpec], list[Group]]
Build = Callable[[list[Group]], Optimizer]

# name: the function that divides parameters into groups, and the optimiser of the groups
OPTIMIZERS: dict[str, tuple[Divide, Build]] = {
    "sgd": (sgd_groups, SGD),
    "adamw": (plain_groups, AdamW),
    "muon": (muon_groups, Muon),
    "lamb": (plain_groups, lamb),
}


def register_optimizer(name: str, builder: Build, *, groups: Divide = plain_groups) -> None:
    """Add an optimiser, which ``optim.name=NAME`` selects.

    Args:
        name: a new name.
        builder: takes the parameter groups, returns the optimiser.
        groups: ``groups(model, spec)``: the parameter groups of the trainable parameters. The
            default gives all of them ``optim.lr``, and decay to the weights of layers.

    Raises:
        TypeError: ``name`` is not a string, or ``builder`` is not callable.
        ValueError: the name is taken.

    Example:
        >>> revzoo.register_optimizer("nadam", torch.optim.NAdam)  # then: optim.name=nadam
    """
    check_registered("optimiser", name, builder, OPTIMIZERS)
    OPTIMIZERS[name] = (groups, builder)


def build_schedule(optimizer: Optimizer, spec: OptimSpec, *, total_steps: int) -> LRScheduler:
    """The spec's schedule for a run of ``total_steps`` optimiser steps."""
    return make_schedule(spec.schedule).build(optimizer, total_steps)


class Schedule(ABC):
    """A recipe's learning rate, independent of the length of the run."""

    @abstractmethod
    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        """Torch's scheduler for a run of ``total_steps`` optimiser steps."""


@dataclass(frozen=True, kw_only=True)
class StepSchedule(Schedule):
    """Multiply the rate by ``gamma`` at each of ``milestones`` (fractions of the run).

    RevNet (Gomez et al. 2017) divides by 10 at 40k and 60k of 80k steps, that is at 1/2 and 3/4.
    """

    milestones: Sequence[float] = (0.5, 0.75)
    gamma: float = 0.1

    def __post_init__(self) -> None:
        for milestone in self.milestones:
            check_number("optim.schedule.milestones", milestone, high=1, open_low=True)
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ValueError(
                f"optim.schedule.milestones={list(self.milestones)}: expected fractions of the "
                "run in rising order, such as [0.5, 0.75]"
            )
        check_number("optim.schedule.gamma", self.gamma, high=1, open_low=True)

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # at least 1: a milestone at step 0 would lower the first rate
        steps = [max(1, round(milestone * total_steps)) for milestone in self.milestones]
        return MultiStepLR(optimizer, milestones=steps, gamma=self.gamma)


@dataclass(frozen=True, kw_only=True)
class OneCycleSchedule(Schedule):
    """Rise from ``lr * start`` to ``lr`` in the fraction ``warmup`` of the run, then anneal.

    Smith and Topin 2017, arXiv 1708.07120.
    """

    warmup: float = 0.25
    start: float = 0.04
    end: float = 1e-5
    anneal: str = "cos"

    def __post_init__(self) -> None:
        check_number("optim.schedule.warmup", self.warmup, high=1, open_low=True, open_high=True)
        check_number("optim.schedule.start", self.start, high=1, open_low=True)
        check_number("optim.schedule.end", self.end, high=1, open_low=True)
        check_choice("optim.schedule.anneal", self.anneal, ("cos", "linear"))

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # torch divides by warmup * total_steps - 1, so a warm-up of one step is impossible
        rises = self.warmup * total_steps > 1
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=total_steps,
            pct_start=self.warmup if rises else 0.0,
            # torch's factors divide; ours multiply
            div_factor=1 / self.start,
            final_div_factor=self.start / self.end,
            anneal_strategy=self.anneal,  # type: ignore[arg-type]  # checked in __post_init__
            cycle_momentum=False,  # keep the recipe's momentum
        )


@dataclass(frozen=True, kw_only=True)
class CosineSchedule(Schedule):
    """Linear rise in the fraction ``warmup`` of the run, then half a cosine to ``lr * end``.

    Loshchilov and Hutter 2017, arXiv 1608.03983.
    """

    warmup: float = 0.05
    end: float = 0.0

    def __post_init__(self) -> None:
        check_number("optim.schedule.warmup", self.warmup, high=1, open_high=True)
        check_number("optim.schedule.end", self.end, high=1)

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        rise = round(self.warmup * total_steps)
        # at least 1: the scheduler also computes the rate after the last step
        fall = max(1, total_steps - rise)

        def factor(step: int) -> float:
            if step < rise:
                # above 0 at the first step, which would otherwise change nothing
                return (step + 1) / (rise + 1)
            cosine = math.cos(math.pi * min(1.0, (step - rise) / fall))
            return self.end + (1 - self.end) * (1 + cosine) / 2

        # not CosineAnnealingLR, whose floor is one rate for all groups
        return LambdaLR(optimizer, factor)


@dataclass(frozen=True, kw_only=True)
class ConstantSchedule(Schedule):
    """Keep the learning rate."""

    def build(self, optimizer: Optimizer, total_steps: int) -> LRScheduler:
        # a scheduler without effect, so that all recipes log and save one
        return ConstantLR(optimizer, factor=1.0, total_iters=0)


SCHEDULES: dict[str, type[Schedule]] = {
    "step": StepSchedule,
    "onecycle": OneCycleSchedule,
    "cosine": CosineSchedule,
    "constant": ConstantSchedule,
}


def make_schedule(spec: Mapping[str, Any]) -> Schedule:
    """The schedule that ``{"name": ..., **options}`` describes.

    Raises:
        ValueError: for an unknown name or option, naming the nearest valid one.
    """
    if not isinstance(spec, Mapping):
        raise ValueError(f'optim.schedule={spec!r}: expected a mapping, {{"name": "onecycle"}}')
    options = dict(spec)
    name = options.pop("name", None)
    check_choice("optim.schedule.name", name, sorted(SCHEDULES))
    return build_dataclass(SCHEDULES[str(name)], options, where="optim.schedule")
