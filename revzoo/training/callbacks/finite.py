"""Ends a run whose loss is not finite, never saves such weights, and warns of a diverged loss.

On the CPU each loss is checked before its backward pass. On a GPU a check would stall it: there the
device notes the first step that is not finite, and the note is copied to the host without waiting.
It is read some steps later, and always before a checkpoint is saved.

A finite loss counts as diverged when its mean over a whole epoch is above 10 times ln(classes), the
loss of guessing. A network of random weights starts near that loss, and label smoothing, mixup and
a few bad steps do not bring the mean of an epoch there; the mean is computed anyway.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from revzoo.training.checkpoint.state import RunState

log = logging.getLogger(__name__)

DIVERGED = 10


class FiniteLoss(pl.Callback):
    """Raises ``FloatingPointError`` for a training loss, or for weights, of NaN or infinity."""

    def __init__(self) -> None:
        self._first: Tensor | None = None  # on the device: step and epoch, -1 while all are finite
        self._copy: Tensor | None = None  # of the above, on the host
        self._copied: torch.cuda.Event | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._first = self._copy = self._copied = None

    def on_before_backward(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor
    ) -> None:
        """Note the loss.

        Raises:
            FloatingPointError: naming the first step whose loss was not finite.
        """
        step, epoch = trainer.global_step, trainer.current_epoch
        finite = torch.isfinite(loss.detach())
        if trainer.world_size > 1:  # of all processes: one alone would leave the others waiting
            finite = trainer.strategy.reduce(finite.float(), reduce_op="mean") == 1
        if loss.device.type == "cpu":
            if not finite:
                raise diverged(pl_module, step, epoch)
            return
        self._note(finite, step, epoch)
        if loss.device.type == "cuda":
            self._poll(pl_module)
        elif step % 50 == 0:  # no events to ask
            self._read(pl_module)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Refuse to save a state that has diverged.

        Raises:
            FloatingPointError: if a loss was, or a parameter is, not finite.
        """
        self._read(pl_module)
        grouped = [p.detach() for p in pl_module.parameters()]
        if grouped and not bool(torch.stack([p.isfinite().all() for p in grouped]).all()):
            name = next(n for n, p in pl_module.named_parameters() if not p.isfinite().all())
            raise diverged(
                pl_module, trainer.global_step, trainer.current_epoch, what=f"the parameter {name}"
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Warn of an epoch whose mean training loss is :data:`DIVERGED` times a guess's."""
        figure = trainer.callback_metrics.get("train/loss")  # in all processes: they gather it
        classes = getattr(getattr(pl_module, "model", None), "num_classes", None)
        if figure is None or not isinstance(classes, int):
            return
        limit = DIVERGED * math.log(max(classes, 2))
        loss, epoch = float(figure), trainer.current_epoch
        if loss > limit:
            for state in RunState.of(trainer):
                note = (
                    f"the mean training loss of epoch {epoch} is {loss:.3g}, more than {DIVERGED} "
                    f"times a guess's: training has diverged; lower optim.lr"
                    f"{_rate(pl_module)}"
                )
                if "loss" not in state.notes and trainer.is_global_zero:
                    log.warning("%s", note)
                state.notes["loss"] = note

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._read(pl_module)

    def _note(self, finite: Tensor, step: int, epoch: int) -> None:
        if self._first is None:
            self._first = torch.full((2,), -1, dtype=torch.int64, device=finite.device)
        # two fills instead of a tensor from the host, which would have to wait for its copy
        now = torch.full_like(self._first, step)
        now[1].fill_(epoch)
        found = ~finite & (self._first[0] < 0)
        self._first = torch.where(found, now, self._first)

    def _poll(self, module: pl.LightningModule) -> None:
        """Read a copy that has arrived; send for the next one."""
        assert self._first is not None
        if self._copied is not None:
            if not self._copied.query():  # type: ignore[no-untyped-call]
                return
            self._raise_if_infinite(module, self._copy)
        self._copy = self._first.to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def _read(self, module: pl.LightningModule) -> None:
        """Wait for the device, and raise if a loss was not finite."""
        if self._first is not None:
            self._raise_if_infinite(module, self._first.cpu())

    @staticmethod
    def _raise_if_infinite(module: pl.LightningModule, note: Tensor | None) -> None:
        if note is not None and int(note[0]) >= 0:
            raise diverged(module, int(note[0]), int(note[1]))


def diverged(
    module: pl.LightningModule, step: int, epoch: int, *, what: str = "the training loss"
) -> FloatingPointError:
    """The error of a run that has diverged: where, and what to change."""
    return FloatingPointError(
        f"{what} is not finite at step {step}, in epoch {epoch}: training has diverged; lower "
        f"optim.lr{_rate(module)} or raise the precision. Checkpoints saved before are as they were"
    )


def _rate(module: pl.LightningModule) -> str:
    lr = getattr(getattr(module, "optim", None), "lr", None)
    return f" (now {lr:g})" if lr is not None else ""
