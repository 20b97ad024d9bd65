"""Searches before a run: the learning rate, and the largest batch that fits into memory.

The rate is found by the range test of Leslie Smith (2017, arXiv 1506.01186, section 3.3): train at
a rising rate, and see where the loss falls fastest. Why not Lightning's ``Tuner``: it gives every
group of parameters the same rate, does not end when activations cannot be recomputed, and suggests
the steepest fall per rate, not per *logarithm* of the rate, so that the smallest rates win.

For the batch, training steps are counted on fake tensors. Why not Lightning's finder: it waits for
an allocation to fail, and on the CPU none does: the system swaps, or kills the process. Known
limits: the count has the tensors of a step, not what the process and the allocator take besides. In
a batch job, which may use a part of the machine, give ``max_bytes``.
"""

from __future__ import annotations

import copy
import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.seed import isolate_rng
from torch.optim import Optimizer

from revzoo._checks import check_count, check_number
from revzoo._files import replacing_table
from revzoo.core.guard import DriftError, RangeError
from revzoo.core.twins import fake_twin, images_for
from revzoo.data import ImageData
from revzoo.profiling.count import trace_step, undisturbed
from revzoo.profiling.plan import largest
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import trainer_of
from revzoo.training.memory import free_bytes, optimizer_bytes
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer

log = logging.getLogger(__name__)

BETA, DIVERGED = 0.98, 4.0  # running mean and its largest rise, as in Lightning's sweep
SKIPPED = 10  # first steps, which are noisy; as in Lightning's suggestion
SHARE = 0.8  # of the free memory; the run validates and saves, too
# how the names of a trainer's options begin that affect a step or its device
KEPT = ("accelerator", "precision", "accumulate_grad_batches", "gradient_clip")


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
        table, picture = folder / "lr_finder.csv", folder / "lr_finder.png"
        with replacing_table(table) as file:
            csv.writer(file).writerows([("lr", "loss"), *zip(self.rates, self.losses, strict=True)])
        from matplotlib.figure import Figure  # not pyplot, which would change the backend

        axes = (figure := Figure(figsize=(6, 4), layout="constrained")).subplots()
        axes.semilogx(self.rates, self.losses)
        if self.suggestion is not None:
            axes.axvline(self.suggestion, linestyle=":", label=f"suggested: {self.suggestion:.2g}")
            axes.legend()
        axes.set(xlabel="learning rate", ylabel="training loss, running mean")
        figure.savefig(picture)
        return [table, picture]


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
    check_count("steps", steps, least=SKIPPED + 5)
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
    # without the trainer, which may hold the data and the optimiser of a run
    trained = copy.deepcopy(module, {id(trainer_of(module)): None})
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
    """Trains at the rates of a sweep, until the running mean of the loss diverges."""

    def __init__(self, rates: Sequence[float]) -> None:
        self.means: list[float] = []  # the running mean of the loss, by step
        self._rates, self._mean = rates, 0.0
        self._losses: list[torch.Tensor] = []  # of the batches of a step

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: Any, optimizer: Optimizer
    ) -> None:
        spec = replace(pl_module.optim, lr=self._rates[len(self.means)])
        for group, rate in zip(optimizer.param_groups, rates_at(pl_module, spec), strict=True):
            group["lr"] = rate

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *args: Any
    ) -> None:
        # Lightning divides the loss of each batch by the number of them
        self._losses.append(outputs["loss"] * trainer.accumulate_grad_batches)
        if trainer.global_step == len(self.means):
            return  # more batches of this step follow
        loss, self._losses = float(torch.stack(self._losses).mean()), []
        self._mean = BETA * self._mean + (1 - BETA) * loss
        mean = self._mean / (1 - BETA ** (len(self.means) + 1))
        trainer.should_stop = not mean <= DIVERGED * min([mean, *self.means])
        if math.isfinite(mean):
            self.means.append(mean)


def rates_at(module: Classifier, spec: OptimSpec) -> list[float]:
    """The rate that ``spec`` gives to each group of the module's parameters."""
    return [float(group["lr"]) for group in build_optimizer(module.model, spec).param_groups]


def search_trainer(options: Mapping[str, Any], **more: Any) -> pl.Trainer:
    """A trainer on one device, with the :data:`KEPT` options, that does not validate or save."""
    kept = {name: value for name, value in options.items() if name.startswith(KEPT)}
    return pl.Trainer(
        # as in configs/trainer/auto.yaml
        **{"accelerator": "auto", **kept, **more},
        devices=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


class BatchSize(NamedTuple):
    """The largest batch: images per step; ``memory``, ``max_size`` or ``training images``."""

    batch_size: int
    limited_by: str


def find_batch_size(
    module: Classifier,
    data: ImageData,
    *,
    max_bytes: float | None = None,
    max_size: int = 8192,
    trainer: Mapping[str, Any] | None = None,
) -> BatchSize:
    """Search for the largest batch that can be trained, of at most ``max_size`` images.

    Moves the images of ``data`` to the device if a run would; changes nothing else. ``max_bytes``
    limits the tensors of a step, by default to four fifths of the device's free memory;
    ``trainer`` has the options of the run's trainer, such as its precision.

    Raises:
        ValueError: not even two images fit, or the system does not report free memory.
    """
    runner = search_trainer(trainer or {})
    model, device = module.model, runner.strategy.root_device
    data.place(device)  # as in the run that follows, which has less memory then
    free = free_bytes(device)
    if max_bytes is None and free is None:
        raise ValueError("the system does not report its free memory: give tuner.max_bytes")
    budget = int(SHARE * (free or 0) if max_bytes is None else max_bytes)
    extra = optimizer_bytes(model, module.optim)

    def need(images: int) -> int:
        twin = fake_twin(model, device)  # a step changes it
        shape = (images, data.in_chans, *data.train_sizes)
        return trace_step(twin, images_for(twin, shape)).peak + extra

    most = min(max_size, data.train_count)
    with undisturbed(model), runner.precision_plugin.forward_context():
        best = largest(need, budget, start=min(data.batch_size, most), most=most)
    if best is None or best < 2:
        raise ValueError(
            "not even a batch of two images fits into memory: free some, raise tuner.max_bytes, or "
            "choose a smaller model or memory mode"
        )
    limits = {most: "max_size" if most == max_size else "training images"}
    return BatchSize(best, limits.get(best, "memory"))
