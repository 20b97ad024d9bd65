"""Logs how far recomputed activations drift from the forward pass's."""

from __future__ import annotations

import pytorch_lightning as pl
from torch.optim import Optimizer

from revzoo._checks import check_count
from revzoo.core.guard import drift


class DriftLogger(pl.Callback):
    """Logs the relative drift of every replayed step: a curve over depth.

    Scalars ``drift/max`` and ``drift/PATH``, PATH being the step's place in the model; relative
    to the largest sampled value (see :mod:`revzoo.core.guard`). Steps
    that are stored have none. The number of the optimiser step counts from 0, as Lightning's does.

    Args:
        every_n_steps: optimiser steps between two records.

    Raises:
        ValueError: ``every_n_steps`` is no positive whole number.
    """

    def __init__(self, *, every_n_steps: int = 100) -> None:
        check_count("every_n_steps", every_n_steps)
        self.every_n_steps = every_n_steps

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Hand the figures of the last backward pass to the loggers."""
        if (trainer.global_step + 1) % self.every_n_steps:
            return
        figures = drift(pl_module)
        if not figures:
            return
        curve = {f"drift/{path}": value for path, value in figures.items()}
        curve["drift/max"] = max(figures.values())
        for logger in trainer.loggers:
            logger.log_metrics(curve, step=trainer.global_step)
