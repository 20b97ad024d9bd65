"""Callbacks of every run: log the training figures, validate the last weights, end at NaN.

A run whose loss is NaN or infinite ends, and never saves such weights.

On the CPU we check each loss before its backward pass; in mode ``exact`` after it, since a stream
beyond its range makes the loss NaN, and :mod:`revzoo.training.step_retry` then repeats the step on
a coarser grid. Of a GPU, the host reads the losses together, every :data:`READ_EVERY` steps and
before each save: for each loss it would have to wait.

A finite loss has diverged if its mean over an epoch is above 10 times ln(classes), the loss of
uniform guessing.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torchmetrics import MetricCollection

from revzoo.training.callbacks.checkpoints import LastCheckpoint
from revzoo.training.checkpoint.files import has_saved
from revzoo.training.lightning_compat import callbacks_of
from revzoo.training.metrics import log_metrics
from revzoo.training.resume.run_state import RunState

log = logging.getLogger(__name__)

DIVERGED = 10  # times ln(classes); see above
READ_EVERY = 50  # steps


class EpochFigures(Callback):
    """Logs ``metrics_of("train")`` as ``train/NAME``, if the steps update them."""

    _logged_in: int | None = None  # the epoch

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        # once per epoch: Lightning computes the logged metrics at its end
        if self._logged_in == trainer.current_epoch:
            return
        # before the check: a module that does not use the metrics never will
        self._logged_in = trainer.current_epoch
        metrics: MetricCollection = pl_module.metrics_of("train")  # type: ignore[operator]
        if all(metric.update_called for metric in metrics.values()):
            log_metrics(pl_module, metrics)


class LastStep(Callback):
    """Asks the trainer to stop at ``max_steps``, which runs a validation if the epoch has one.

    Lightning 2.6 ends such an epoch without a validation: the final weights could never be the
    best, and the final figures would belong to an earlier epoch.
    """

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            # Lightning validates before it obeys this, but not when it reaches max_steps by itself
            trainer.should_stop = True


class FiniteLoss(Callback):
    """Raises ``FloatingPointError`` if the training loss or a weight is NaN or infinite."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None  # to be checked after its backward pass
        self._pending: list[tuple[Tensor, int, int]] = []  # finite or not, step, epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss, self._pending = None, []

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Check the loss, or record it on the device."""
        # only revzoo's Classifier repeats steps
        retry = getattr(pl_module, "retry", None)
        if retry is not None and retry.may_widen:
            self._loss = loss.detach()
        else:
            self._check(trainer, pl_module, loss)

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Check the loss of a network in mode ``exact``; for a repeated step, the last loss."""
        loss, self._loss = self._loss, None
        if loss is not None:
            # the NaN of the first attempt does not count if the step was repeated
            again = pl_module.retry.loss
            self._check(trainer, pl_module, loss if again is None else again)

    def _check(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        step, epoch = trainer.global_step, trainer.current_epoch
        finite = torch.isfinite(loss.detach())
        if trainer.world_size > 1:  # if only one process raised, the others would wait for it
            finite = trainer.strategy.reduce(finite.float(), reduce_op="mean") == 1
        self._pending.append((finite, step, epoch))
        if loss.device.type == "cpu" or step % READ_EVERY == 0:
            self._read(pl_module)

    def _read(self, pl_module: LightningModule) -> None:
        """Wait for the device; raise for the first loss that was not finite."""
        pending, self._pending = self._pending, []
        flags = torch.stack([finite for finite, _, _ in pending]).tolist() if pending else []
        for finite, (_, step, epoch) in zip(flags, pending, strict=True):
            if not finite:
                raise divergence_error(pl_module, step, epoch)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Do not save a state that has diverged."""
        self._read(pl_module)
        # one stack, so that we wait for a GPU once, not for each parameter
        checks = [p.detach().isfinite().all() for p in pl_module.parameters()]
        if checks and not bool(torch.stack(checks).all()):
            name = next(n for n, p in pl_module.named_parameters() if not p.isfinite().all())
            step, epoch = trainer.global_step, trainer.current_epoch
            raise divergence_error(pl_module, step, epoch, what=f"the parameter {name}")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the epoch's mean training loss is above :data:`DIVERGED` times ln(classes)."""
        # callback_metrics reduces over all processes, so each must call it
        figure = trainer.callback_metrics.get("train/loss")
        classes = getattr(getattr(pl_module, "model", None), "num_classes", None)
        if figure is None or not isinstance(classes, int):
            return
        limit = DIVERGED * math.log(max(classes, 2))  # ln(1) is 0
        loss, epoch = float(figure), trainer.current_epoch
        if loss > limit:
            for state in callbacks_of(trainer, RunState):
                note = (
                    f"the mean training loss of epoch {epoch + 1} is {loss:.3g}, more than "
                    f"{DIVERGED} times the loss of uniform guessing: training has diverged; lower "
                    f"optim.lr{_rate(pl_module)}"
                )
                # warn once; the note keeps the last epoch's figures
                if "loss" not in state.notes and trainer.is_global_zero:
                    log.warning("%s", note)
                state.notes["loss"] = note

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(pl_module)


def divergence_error(
    module: LightningModule, step: int, epoch: int, *, what: str = "the training loss"
) -> FloatingPointError:
    """The error of a run that has diverged, with the step, the epoch and the remedy.

    ``epoch`` counts from 0, as Lightning does; the message counts from 1, as the progress does.
    """
    saved = [has_saved(c.path.parent) for c in callbacks_of(module.trainer, LastCheckpoint)]
    end = (
        "No checkpoint was written, and a resumed run would end the same way: start a new run"
        if saved and not any(saved)
        else "Earlier checkpoints are intact"
    )
    if getattr(module, "graph", None) is not None:
        folder = module.trainer.default_root_dir
        end += (
            ". If a stream of memory=exact left its range, a step without a CUDA graph repeats "
            f"itself: --resume {folder} trainer.cuda_graph=false"
        )
    return FloatingPointError(
        f"{what} is not finite at step {step}, in epoch {epoch + 1}: training has diverged; lower "
        f"optim.lr{_rate(module)} or raise the precision. {end}"
    )


def _rate(module: LightningModule) -> str:
    lr = getattr(getattr(module, "optim", None), "lr", None)
    return f" (now {lr:g})" if lr is not None else ""
