"""The learning-rate range test: train at a rising rate, and find where the loss falls fastest.

Leslie Smith 2017, arXiv 1506.01186, section 3.3. Why not Lightning's ``Tuner``: it gives every
group of parameters the same rate, does not end when activations cannot be recomputed
(``DriftError``, ``RangeError``), and suggests the steepest fall per rate, not per *logarithm* of
the rate, so that the smallest rates win.
"""

from __future__ import annotations

import copy
import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch import Tensor
from torch.optim import Optimizer

from revzoo._checks import check_number
from revzoo._files import replacing_table
from revzoo.core.guard import DriftError, RangeError
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import trainer_of
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer

log = logging.getLogger(__name__)

BETA, DIVERGED = 0.98, 4.0  # running mean and its largest rise, as in Lightning's sweep
SKIPPED = 10  # first steps, which are noisy; as in Lightning's suggestion
LEAST_STEPS = SKIPPED + 5
CURVE_FILE, PICTURE_FILE = "lr_finder.csv", "lr_finder.png"
# options of a run's trainer that affect a step or its device
KEPT = (
    "accelerator",
    "precision",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
)


@dataclass(frozen=True)
class LRCurve:
    """The result of a sweep.

    Attributes:
        rates: the rate of each step, rising.
        losses: the running mean of the training loss at each step.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss falls fastest; None if it never falls."""
        # the last loss may come from a diverged step
        rates, losses = self.rates[SKIPPED:-1], self.losses[SKIPPED:-1]
        if len(rates) < 2:  # a slope needs two points
            return None
        logs = torch.tensor(rates, dtype=torch.float64).log()
        (slopes,) = torch.gradient(torch.tensor(losses, dtype=torch.float64), spacing=(logs,))
        steepest = int(slopes.argmin())
        return rates[steepest] if slopes[steepest] < 0 else None

    def write(self, folder: Path) -> list[Path]:
        """Write ``lr_finder.csv`` and ``lr_finder.png``."""
        with replacing_table(folder / CURVE_FILE) as file:
            csv.writer(file).writerows([("lr", "loss"), *zip(self.rates, self.losses, strict=True)])
        from matplotlib.figure import Figure  # not pyplot, which would change the backend

        axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
        axes.semilogx(self.rates, self.losses)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle=":", label=f"suggested: {self.suggestion:.2g}")
            axes.legend()
        axes.set(xlabel="learning rate", ylabel="training loss, running mean")
        figure.savefig(folder / PICTURE_FILE)
        return [folder / CURVE_FILE, folder / PICTURE_FILE]


def find_lr(
    module: Classifier,
    data: pl.LightningDataModule,
    *,
    min_lr: float = 1e-5,
    max_lr: float = 10.0,
    steps: int = 100,
    trainer: Mapping[str, Any] | None = None,
) -> LRCurve:
    """Sweep ``optim.lr`` from ``min_lr`` to ``max_lr``. Changes none of its arguments.

    Args:
        module: with its recipe; we train a copy.
        data: a data module after ``setup``.
        min_lr: rate of the first step.
        max_lr: rate of the last step; the sweep may end earlier.
        steps: optimiser steps, at least 15.
        trainer: options of the run's trainer, such as its precision.

    Raises:
        ValueError: an argument is out of range, or no trained parameter follows ``optim.lr``.
    """
    check_number("min_lr", min_lr, open_low=True, open_high=True)
    check_number("max_lr", max_lr, low=min_lr, open_low=True, open_high=True)
    # fewer steps leave too few points after the skipped ones
    if not isinstance(steps, int) or steps < LEAST_STEPS:
        raise ValueError(f"steps={steps!r}: expected a whole number >= {LEAST_STEPS}")
    spec = module.optim
    # with Muon and frozen layers, all trained parameters may use sgd_lr
    if rates_at(module, replace(spec, lr=min_lr)) == rates_at(module, replace(spec, lr=max_lr)):
        raise ValueError(
            f"no trained parameter uses optim.lr: with optim.name={spec.name} and the "
            f"frozen layers, all use optim.sgd_lr={spec.sgd_lr}. Choose optim.sgd_lr by hand, "
            "search with SGD (optim=onecycle), or unfreeze more at the start "
            "(callbacks.finetuning.unfreeze=[0])"
        )
    rates = [min_lr * (max_lr / min_lr) ** (i / (steps - 1)) for i in range(steps)]
    # the copy has no trainer, which may hold the data and the optimiser of a run
    before, module.trainer = trainer_of(module), None
    try:
        trained = copy.deepcopy(module)
    finally:
        module.trainer = before
    trained.optim = replace(spec, schedule={"name": "constant"})
    sweep = _Sweep(rates)
    with isolate_rng():
        runner = search_trainer(trainer or {}, max_steps=steps, callbacks=[sweep])
        try:
            # the same images, through separate loaders
            runner.fit(trained, datamodule=copy.copy(data))
        except (FloatingPointError, DriftError, RangeError) as error:
            log.info("the sweep ends at step %d: %s", runner.global_step, error)
    return LRCurve(tuple(rates[: len(sweep.means)]), tuple(sweep.means))


class _Sweep(pl.Callback):
    """Trains at the rates of a sweep, until the running mean of the loss diverges.

    Attributes:
        means: the running mean of the loss at each step.
    """

    def __init__(self, rates: Sequence[float]) -> None:
        self.means: list[float] = []
        self._rates, self._mean = rates, 0.0
        self._losses: list[Tensor] = []  # of the batches of a step

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: Tensor) -> None:
        # undo Lightning's division, and the scale of precision=fp16
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scale = 1.0 if scaler is None else scaler.get_scale()
        self._losses.append(loss.detach() * trainer.accumulate_grad_batches / scale)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Any, optimizer: Optimizer
    ) -> None:
        spec = replace(pl_module.optim, lr=self._rates[len(self.means)])
        for group, rate in zip(optimizer.param_groups, rates_at(pl_module, spec), strict=True):
            group["lr"] = rate
        loss, self._losses = float(torch.stack(self._losses).mean()), []
        if not math.isfinite(loss):
            trainer.should_stop = True
            return
        self._mean = BETA * self._mean + (1 - BETA) * loss
        self.means.append(self._mean / (1 - BETA ** (len(self.means) + 1)))
        trainer.should_stop = self.means[-1] > DIVERGED * min(self.means)


def rates_at(module: Classifier, spec: OptimSpec) -> list[float]:
    """The rate that ``spec`` gives to each group of the module's parameters."""
    return [float(group["lr"]) for group in build_optimizer(module.model, spec).param_groups]


def search_trainer(options: Mapping[str, Any], **more: Any) -> pl.Trainer:
    """A trainer on one device, with the :data:`KEPT` options, that does not validate or save."""
    return pl.Trainer(
        # as in configs/trainer/auto.yaml
        **{"accelerator": "auto", **{n: options[n] for n in KEPT if n in options}, **more},
        devices=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
