"""Figures of a run: memory and throughput of each epoch, drift of each replayed step.

Peak memory on a GPU is ``torch.cuda.max_memory_allocated`` over the epoch. On the CPU it is the
process's peak since it started, with libraries, data and what the allocator keeps. To see what a
memory mode saves, read ``footprint/activation_bytes``: the peak of the activations of one training
step, counted on the first batch (see :func:`revzoo.audit`).
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from revzoo._checks import check_count
from revzoo.core.guard import drift
from revzoo.profiling.audit import audit
from revzoo.profiling.clock import wait_for
from revzoo.training.callbacks.registry import TimesEpochs, is_nth_step
from revzoo.training.memory import peak_bytes

log = logging.getLogger(__name__)


def activation_bytes(pl_module: LightningModule, images: Any) -> int | None:
    """Peak bytes of the activations of a training step on ``images``; None if counting fails."""
    model = getattr(pl_module, "model", None)
    if not isinstance(model, nn.Module) or not isinstance(images, Tensor):
        return None
    try:
        with pl_module.trainer.precision_plugin.forward_context():
            return audit(model, tuple(images.shape), modes=[]).activation_bytes
    except Exception as error:
        # a user's model may fail on fake tensors in any way, and a figure must not end a run
        log.debug("activations are not counted: %s", error)
        return None


class Footprint(TimesEpochs):
    """Logs peak memory, activations, throughput and time of each epoch, as ``footprint/...``.

    The scalars are ``peak_bytes``, ``activation_bytes``, ``images_per_second``, ``epoch_seconds``,
    without validations. Under data parallelism it counts the images of all processes and the memory
    of the first.
    """

    _activations: int | None = None
    _counted = False

    def now(self, pl_module: LightningModule) -> float:
        """Seconds on the clock, after the device has finished its work."""
        wait_for(pl_module.device)
        return super().now(pl_module)

    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().begin_epoch(trainer, pl_module)
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        # once: counting takes as long as a few steps, and later batches have the same shape
        if not self._counted:
            self._counted = True
            began = self.now(pl_module)
            self._activations = activation_bytes(pl_module, batch[0])
            self._began += self.now(pl_module) - began  # counting does not train

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        seconds = self.seconds(pl_module)
        figures = {"footprint/epoch_seconds": seconds}
        if seconds > 0:
            figures["footprint/images_per_second"] = self.images / seconds
        peak = peak_bytes(pl_module.device)
        if peak is not None:
            figures["footprint/peak_bytes"] = float(peak)
        if self._activations is not None:
            figures["footprint/activation_bytes"] = float(self._activations)
        for name, value in figures.items():
            # float32, Lightning's default, is exact only up to 16 MiB
            pl_module.log(name, torch.tensor(value, dtype=torch.float64), rank_zero_only=True)


class DriftLogger(Callback):
    """Logs the relative drift of every replayed step: a curve over depth.

    The scalars are ``drift/max`` and ``drift/PATH``, PATH being the step's name in the model. Drift
    is relative to the largest sampled value (see :mod:`revzoo.core.guard`). Stored steps have
    none.

    Args:
        every_n_steps: log at the n-th optimiser step, the 2n-th and so on; Lightning counts from 0,
            so the rows have the numbers n - 1, 2n - 1.

    Raises:
        ValueError: ``every_n_steps`` is not a positive whole number.
    """

    def __init__(self, *, every_n_steps: int = 100) -> None:
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        if not is_nth_step(trainer, self.every_n_steps):
            return
        figures = drift(pl_module)
        if not figures:
            return
        curve = {f"drift/{path}": value for path, value in figures.items()}
        # TensorBoard draws only this one; metrics.csv has the whole curve
        curve["drift/max"] = max(figures.values())
        for logger in trainer.loggers:
            logger.log_metrics(curve, step=trainer.global_step)
