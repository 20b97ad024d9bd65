"""A training step that fails: computed again if its cause can be changed, else it ends the run.

A drift beyond its limit makes the gradients of a step wrong, and a resumed run would drift again:
under bfloat16 autocast, all of four revnet38 in mode ``invert`` drifted by 2e-3 to 6e-3 within 40
steps. So we switch the drifted parts of the network to mode ``recompute``, which keeps their
inputs, and compute the step again from the same state. If a stream leaves the range of its integers
(``RangeError``), its grid has adapted, and we also repeat the step:

1. Before the forward pass, copy buffers (BatchNorm's statistics), metrics and random states.
2. Before the backward pass, copy the gradients of earlier batches of the same optimiser step.
3. After a failure, restore all of these, and run the step again;
   ``train/loss_step`` still shows the first loss, NaN after a range error.
4. If a GPU is out of memory, ``lower`` sets a leaner plan of memory modes, once in a run of one
   process. The run goes on as if this step had begun with that plan.
5. Distributed processes agree on the drifted parts, and repeat the step together. Each adapts its
   own grids.

Without gradients, sequences run again on their own. Networks without a part in mode ``invert`` or
``exact`` make no copies, unless the plan can be lowered. Known limit: float16's scaled loss keeps
the rest of a failed graph until the step ends.

A run whose loss is NaN or infinite ends, and never saves such weights (:class:`FiniteLoss`). On the
CPU we check each loss before its backward pass; in mode ``exact`` after it, since a stream beyond
its range makes the loss NaN, and the step is then repeated on a coarser grid. Of a GPU, the host
reads the losses together, every :data:`READ_EVERY` steps and before each save: for each loss it
would have to wait. A finite loss has diverged if its mean over an epoch is above 10 times
ln(classes), the loss of uniform guessing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn

from revzoo.core.guard import DriftError, RangeError
from revzoo.core.invertible import Step, all_steps
from revzoo.core.modes import mode_of
from revzoo.training.callbacks.checkpoints import LastCheckpoint
from revzoo.training.callbacks.registry import MeasuresSteps
from revzoo.training.checkpoint.files import has_saved
from revzoo.training.lightning_compat import callbacks_of, gathered
from revzoo.training.resume import RunState, can_drift, set_states, states_of

log = logging.getLogger(__name__)

T = TypeVar("T")

DIVERGED = 10  # times ln(classes); see above
READ_EVERY = 50  # steps


class Attempt(NamedTuple):
    """The state before the forward pass of a training step."""

    batch: Any
    batch_idx: int
    parameters: list[nn.Parameter]  # FSDP2 replaces some of them during the step
    buffers: list[Tensor]
    metrics: dict[str, Any]
    random: Tensor
    device_random: Tensor | None


class Failure(NamedTuple):
    """The findings of all processes in a backward pass."""

    error: DriftError | RangeError | torch.OutOfMemoryError
    drifted: list[str]
    beyond: bool  # whether a stream left its range
    adapted: bool  # whether the grids of these streams fit now


class StepRetry:
    """Repeats the training steps of ``module`` that drifted, left their range or ran out of memory.

    Attributes:
        running: whether a step is being repeated.
        may_widen: whether this step has streams on a grid, whose range may cause a NaN loss.
        lower: sets a leaner plan of memory modes, given the bytes in use (None on the CPU), and
            describes it; returns an empty text if there is none. None if the plan stays.
        loss: the loss of a repeated step, on its device; None if the last step was not repeated.
    """

    def __init__(self, module: pl.LightningModule) -> None:
        self.module: Any = module
        self.running = self.may_widen = False
        self.loss: Tensor | None = None
        self.lower: Callable[[int | None], str] | None = None
        self._attempt: Attempt | None = None
        self._steps: list[Step] | None = None
        self._in_use: int | None = None  # bytes, when memory ran out

    def begin(self, batch: Any, batch_idx: int) -> None:
        """Copy the state before a forward pass."""
        if self.running:  # the copies are still of the first forward pass
            return
        self._attempt = self.loss = None
        if batch_idx == 0 or self._steps is None:  # once an epoch: finding them takes a millisecond
            self._steps = [*all_steps(self.module).values()]
        self.may_widen = any(step.grid is not None for step in self._steps)
        # each time: modes may change between two steps
        if self.lower is not None or any(mode_of(step.memory).inverts for step in self._steps):
            parameters = list(self.module.parameters())
            buffers = [buffer.clone() for buffer in self.module.buffers()]
            metrics = states_of(self.module.training_metrics())
            device, random = self.module.device, torch.get_rng_state()
            on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
            self._attempt = Attempt(
                batch, batch_idx, parameters, buffers, metrics, random, on_device
            )

    def forward(self, run: Callable[[], T]) -> T:
        """Call ``run()``; if memory runs out, lower the plan, once, and call it again."""
        try:
            return run()
        except torch.OutOfMemoryError as error:
            if self._attempt is None or self.lower is None:
                raise
            short = self._out_of_memory(error)
        self._lower(short)
        self._restore(self._attempt)
        return run()

    def backward(self, loss: Tensor, run: Callable[[Tensor], None]) -> None:
        """Call ``run(loss)``; after a failure, change the steps and repeat the training step.

        Raises:
            DriftError: a step drifted that is not inverted, so its forward is not deterministic.
            RangeError: a stream left its range, and the grid cannot adapt.
            torch.OutOfMemoryError: the plan cannot be lowered, or was lowered before.
        """
        # taken over, so the copies are freed when the step ends
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            try:
                run(loss)
            except DriftError as drift:
                raise self._final(drift) from drift
            return
        # from earlier batches of this optimiser step; a failed pass adds to them
        gradients = [None if p.grad is None else p.grad.clone() for p in attempt.parameters]
        # each failure removes a cause, so this ends: fewer inverted steps, coarser grids, one plan
        while (failure := self._failure(loss, run)) is not None:
            if isinstance(failure.error, torch.OutOfMemoryError):
                loss.detach_()  # Lightning holds the loss, and so the rest of the graph
                self._lower(failure.error)
            elif failure.beyond:
                if not failure.adapted:
                    raise failure.error
                note = "streams left their range in memory=exact: its grids adapted"
                self._report("coarser units for its samples", failure.error, "range", note)
            else:
                self._switch(failure)
            loss = self._forward(attempt)
            self.loss = loss.detach()
            for p, gradient in zip(attempt.parameters, gradients, strict=True):
                # a copy: the next attempt may fail as well
                p.grad = None if gradient is None else gradient.clone()

    def _failure(self, loss: Tensor, run: Callable[[Tensor], None]) -> Failure | None:
        """The failure of all processes; None after a good backward pass."""
        trainer, steps = self.module.trainer, all_steps(self.module)
        error: DriftError | RangeError | torch.OutOfMemoryError | None = None
        drifted: list[str] = []
        try:
            run(loss)
        except DriftError as drift:
            error = drift.with_traceback(None)  # its frames would keep the failed graph
            drifted = [name for name, step in steps.items() if _drifted(step) or step is drift.step]
        except RangeError as beyond:
            error = beyond.with_traceback(None)
        except torch.OutOfMemoryError as short:
            if self.lower is None:
                raise
            error = self._out_of_memory(short)
        # a process that repeats the step alone would wait for the others forever;
        # this costs one small collective per step, the next one only after a failure
        if not trainer.strategy.reduce_boolean_decision(error is not None, all=False):
            return None
        report: Any = (drifted, isinstance(error, RangeError), getattr(error, "adapted", True))
        reports = gathered(report)
        names = sorted({name for part, _, _ in reports for name in part})
        error = error or DriftError("another process of this run reports a drift or a range")
        left = any(beyond for _, beyond, _ in reports)
        return Failure(error, names, left, all(adapted for _, _, adapted in reports))

    def _switch(self, failure: Failure) -> None:
        """Recompute the drifted steps from now on."""
        steps = all_steps(self.module)
        switched = [name for name in failure.drifted if can_drift(steps[name])]
        if not switched:
            assert isinstance(failure.error, DriftError)
            raise self._final(failure.error) from failure.error
        for name in switched:
            steps[name].memory = "recompute"
        names: list[str] = []
        for state in callbacks_of(self.module.trainer, RunState):
            state.recomputed += switched
            names = state.recomputed
        change = f"memory=recompute from now on for {', '.join(switched)}"
        note = f"activations drifted: memory=recompute for {', '.join(names)}"
        self._report(change, failure.error, "drift", note)

    def _out_of_memory(self, error: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """The error without its frames, which hold the tensors of the failed pass."""
        device = self.module.device
        self._in_use = torch.cuda.memory_allocated(device) if device.type == "cuda" else None
        return error.with_traceback(None)

    def _lower(self, error: torch.OutOfMemoryError) -> None:
        """Set a leaner plan of memory modes, or raise ``error``."""
        lower, self.lower = self.lower, None  # once
        if lower is None or not (change := lower(self._in_use)):
            raise error
        self.may_widen = any(s.grid is not None for s in all_steps(self.module).values())
        torch.cuda.empty_cache()  # its blocks fit the tensors of the former plan
        note = f"the device was out of memory: a leaner plan ({change})"
        self._report(f"a leaner plan ({change})", "the device is out of memory", "memory", note)

    def _report(self, change: str, error: object, topic: str, note: str) -> None:
        """Warn of the change, and note it in the summary of the run."""
        trainer = self.module.trainer
        if trainer.is_global_zero:
            step, reason = trainer.global_step, getattr(error, "reason", None) or error
            log.warning("computing step %d again, with %s: %s", step, change, reason)
        for state in callbacks_of(trainer, RunState):
            state.notes[topic] = note

    def _restore(self, attempt: Attempt) -> None:
        """Restore the state of the attempt, and let callbacks measure the step anew."""
        set_states(self.module.training_metrics(), attempt.metrics)
        for buffer, before in zip(self.module.buffers(), attempt.buffers, strict=True):
            buffer.copy_(before)
        torch.set_rng_state(attempt.random)
        if attempt.device_random is not None:
            torch.cuda.set_rng_state(attempt.device_random, self.module.device)
        for callback in callbacks_of(self.module.trainer, MeasuresSteps):  # type: ignore[type-abstract]
            callback.restart()

    def _forward(self, attempt: Attempt) -> Tensor:
        """Compute the loss of the attempt again, scaled as Lightning scales it."""
        trainer: Any = self.module.trainer
        self._restore(attempt)
        if isinstance(trainer.strategy, DDPStrategy):
            # the reducer of the failed pass still waits for gradients
            trainer.strategy.model = self.module
            trainer.strategy.configure_ddp()
        self.running = True
        try:
            loss = trainer.strategy.training_step(attempt.batch, attempt.batch_idx)
        finally:
            self.running = False
        # Lightning does these two after training_step, before backward
        loss = loss / trainer.accumulate_grad_batches
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        return loss if scaler is None else scaler.scale(loss)

    def _final(self, error: DriftError) -> DriftError:
        folder = self.module.trainer.default_root_dir
        remedy = f"To continue with stored activations: --resume {folder} memory=store"
        return DriftError(f"{error}. {remedy}")


def _drifted(step: Step) -> bool:
    if step.drift is None or step.drift_limit is None:
        return False
    # `not <=` is also true for NaN
    return can_drift(step) and not step.drift <= step.drift_limit


class FiniteLoss(Callback):
    """Raises ``FloatingPointError`` if the training loss or a weight is NaN or infinite."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None  # to be checked after its backward pass
        self._pending: list[tuple[Tensor, int, int]] = []  # finite or not, step, epoch

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._loss, self._pending = None, []

    def on_before_backward(self, trainer: Trainer, pl_module: Any, loss: Tensor) -> None:
        """Check the loss, or record it on the device."""
        if pl_module.retry.may_widen:
            self._loss = loss.detach()
        else:
            self._check(trainer, pl_module, loss)

    def on_after_backward(self, trainer: Trainer, pl_module: Any) -> None:
        """Check the loss of a network in mode ``exact``; for a repeated step, the last loss."""
        loss, self._loss = self._loss, None
        if loss is not None:
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

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        """Warn if the epoch's mean training loss is above :data:`DIVERGED` times ln(classes)."""
        # callback_metrics reduces over all processes, so each must call it
        loss = float(trainer.callback_metrics.get("train/loss", 0.0))
        if not loss > DIVERGED * math.log(max(pl_module.model.num_classes, 2)):  # ln(1) is 0
            return
        for state in callbacks_of(trainer, RunState):
            note = (
                f"the mean training loss of epoch {trainer.current_epoch + 1} is {loss:.3g}, more "
                f"than {DIVERGED} times the loss of uniform guessing: training has diverged; lower "
                f"optim.lr (now {pl_module.optim.lr:g})"
            )
            # warn once; the note keeps the last epoch's figures
            if "loss" not in state.notes and trainer.is_global_zero:
                log.warning("%s", note)
            state.notes["loss"] = note

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._read(pl_module)


def divergence_error(
    module: Any, step: int, epoch: int, *, what: str = "the training loss"
) -> FloatingPointError:
    """The error of a run that has diverged, with the step, the epoch (from 0) and the remedy."""
    saved = [has_saved(c.path.parent) for c in callbacks_of(module.trainer, LastCheckpoint)]
    end = (
        "No checkpoint was written, and a resumed run would end the same way: start a new run"
        if saved and not any(saved)
        else "Earlier checkpoints are intact"
    )
    if module.graph is not None:
        folder = module.trainer.default_root_dir
        end += (
            ". If a stream of memory=exact left its range, a step without a CUDA graph repeats "
            f"itself: --resume {folder} trainer.cuda_graph=false"
        )
    return FloatingPointError(
        f"{what} is not finite at step {step}, in epoch {epoch + 1}: training has diverged; lower "
        f"optim.lr (now {module.optim.lr:g}) or raise the precision. {end}"
    )
