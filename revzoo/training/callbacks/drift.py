"""Logs the drift of reconstructed activations: their distance from the forward pass's values."""

from __future__ import annotations

from pytorch_lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from revzoo._checks import check_count
from revzoo.core.guard import drift
from revzoo.training.callbacks.base import is_nth_step


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
        """Log the drift of the last backward pass."""
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
