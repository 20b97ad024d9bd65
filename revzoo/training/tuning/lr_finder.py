"""The learning-rate range test: train at a rising rate, and find where the loss falls fastest.

Leslie Smith 2017, arXiv 1506.01186, section 3.3. The sweep works as Lightning's ``Tuner``, on a
copy of the module (see :mod:`revzoo.training.tuning.trial`). It differs in four points:

1. Lightning gives every group of parameters the same rate. Here each group gets the rate that it
   would have if ``optim.lr`` were the sweep's rate, with ``layer_decay`` and Muon's ``sgd_lr``.
2. The sweep also ends when the loss is not finite or activations cannot be recomputed
   (``DriftError``, ``RangeError``): the run has diverged.
3. Lightning's running mean of the losses starts at half of the first loss, because its bias
   correction counts one step too many. Here it starts at the first loss.
4. We suggest the rate at which the loss falls fastest per *logarithm* of the rate, since the sweep
   is exponential. Lightning uses the slope per rate, so noise makes the smallest rates win: 1e-4 on
   the digits, where our rule gives 0.10 (the recipe's peak is 0.2).
"""

from __future__ import annotations

import copy
import csv
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.tuner.tuning import Tuner
from torch import Tensor
from torch.optim import Optimizer

from revzoo._checks import check_number
from revzoo._files import replacing_table
from revzoo.core.guard.drift import DriftError
from revzoo.core.guard.ranges import RangeError
from revzoo.profiling.figures import new_figure
from revzoo.training.classifier import Classifier
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer
from revzoo.training.tuning.trial import Trial, trial_trainer

log = logging.getLogger(__name__)

BETA = 0.98  # of Lightning's running mean
SKIPPED = 10  # first steps, which are noisy; as in Lightning's suggestion
LEAST_STEPS = SKIPPED + 5
CURVE_FILE, PICTURE_FILE = "lr_finder.csv", "lr_finder.png"


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
        # a slope needs two points
        if len(rates) < 2:
            return None
        slopes = torch.gradient(
            torch.tensor(losses, dtype=torch.float64),
            spacing=(torch.tensor(rates, dtype=torch.float64).log(),),
        )[0]
        steepest = int(slopes.argmin())
        return rates[steepest] if slopes[steepest] < 0 else None

    def write(self, folder: Path) -> list[Path]:
        """Write ``lr_finder.csv`` and ``lr_finder.png``."""
        table = folder / CURVE_FILE
        with replacing_table(table) as file:
            csv.writer(file).writerows([("lr", "loss"), *zip(self.rates, self.losses, strict=True)])
        axes = (figure := new_figure(figsize=(6, 4), layout="constrained")).subplots()
        axes.semilogx(self.rates, self.losses)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle=":", label=f"suggested: {self.suggestion:.2g}")
            axes.legend()
        axes.set(xlabel="learning rate", ylabel="training loss, running mean")
        figure.savefig(folder / PICTURE_FILE)
        return [table, folder / PICTURE_FILE]


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
    check_rates(min_lr=min_lr, max_lr=max_lr, steps=steps)
    _check_that_lr_matters(module, min_lr, max_lr)
    sweep = _Sweep(module)
    with trial_trainer(trainer or {}, max_steps=steps) as runner:
        sweep_result = Tuner(runner).lr_find(
            sweep,
            datamodule=copy.copy(data),  # the same images, through separate loaders
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=steps,
            # the result goes into the configuration, not into the module
            update_attr=False,
        )
    assert sweep_result is not None, "only fast_dev_run returns None"
    return _curve(sweep_result.results["lr"], sweep_result.results["loss"])


def check_rates(*, min_lr: Any = 1e-5, max_lr: Any = 10.0, steps: Any = 100) -> None:
    """Raise a ValueError for a wrong range or number of steps."""
    check_number("min_lr", min_lr, open_low=True, open_high=True)
    check_number("max_lr", max_lr, low=min_lr, open_low=True, open_high=True)
    # fewer steps leave too few points after the skipped ones
    if not isinstance(steps, int) or steps < LEAST_STEPS:
        raise ValueError(f"steps={steps!r}: expected a whole number >= {LEAST_STEPS}")


def _check_that_lr_matters(module: Classifier, *rates: float) -> None:
    """Raise a ValueError if ``optim.lr`` does not change the rate of any parameter."""
    spec = module.optim
    # with Muon and frozen layers, all trained parameters may use sgd_lr
    if len({tuple(rates_at(module, replace(spec, lr=lr))) for lr in rates}) == 1:
        raise ValueError(
            f"no trained parameter uses optim.lr: with optim.name={spec.name} and the "
            f"frozen layers, all use optim.sgd_lr={spec.sgd_lr}. Choose optim.sgd_lr by hand, "
            "search with SGD (optim=onecycle), or unfreeze more at the start "
            "(callbacks.finetuning.unfreeze=[0])"
        )


def _curve(rates: list[float], means: list[float]) -> LRCurve:
    """The sweep up to the last finite loss, with corrected running means (point 3)."""
    # undo Lightning's correction, apply the right one
    losses = [mean * (1 - BETA ** (n + 1)) / (1 - BETA**n) for n, mean in enumerate(means, start=1)]
    finite = [math.isfinite(loss) for loss in losses]
    count = finite.index(False) if False in finite else len(losses)
    return LRCurve(tuple(rates[:count]), tuple(losses[:count]))


class _Sweep(Trial):
    """A classifier whose groups of parameters follow the sweep at their rates."""

    def on_train_start(self) -> None:
        super().on_train_start()
        # a step ends with the epoch, but Lightning's sweep records whole steps only
        batches: Any = min(self.trainer.accumulate_grad_batches, self.trainer.num_training_batches)
        self.trainer.accumulate_grad_batches = batches
        # otherwise Lightning draws its progress bar into log files
        self.trainer.callbacks[0].progress_bar_refresh_rate = 0  # type: ignore[attr-defined]

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Run the backward pass; end the sweep if it fails or the loss is not finite."""
        reason = None
        if not torch.isfinite(loss.detach()):
            reason = "the loss is not finite"
        else:
            try:
                super().backward(loss, *args, **kwargs)
            except (DriftError, RangeError) as error:
                reason = type(error).__name__
        if reason is not None:
            # otherwise the optimiser would still step with the failed gradients
            self.zero_grad(set_to_none=True)
            self.trainer.should_stop = True
            log.info("the sweep ends at step %d: %s", self.trainer.global_step, reason)

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        lr = optimizer.param_groups[0]["lr"]  # Lightning's schedule sets one rate for all groups
        for group, rate in zip(
            optimizer.param_groups, rates_at(self, replace(self.optim, lr=lr)), strict=True
        ):
            group["lr"] = rate


def rates_at(module: Classifier, spec: OptimSpec) -> list[float]:
    """The rate that ``spec`` gives to each group of the module's parameters."""
    return [float(group["lr"]) for group in build_optimizer(module.model, spec).param_groups]
