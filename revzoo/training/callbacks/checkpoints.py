"""Saves a run's checkpoints: ``last.ckpt`` to resume from, ``best.ckpt`` to use.

Why not Lightning's ``ModelCheckpoint`` for ``last.ckpt``: it does not know at which batches a run
can resume exactly, and it does not save when a signal stops the run.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from revzoo._checks import check_number
from revzoo.training.checkpoint.files import UnwritableCheckpointError, has_saved
from revzoo.training.figure_names import higher_is_better
from revzoo.training.lightning_compat import callbacks_of
from revzoo.training.resume import (
    RunState,
    can_resume_here,
    stop_requested,
)
from revzoo.weights.source import BEST, CHECKPOINTS, LAST

log = logging.getLogger(__name__)

TIE_BREAKER = "val/loss"
SAVE_AGAIN_AFTER = 60.0  # seconds after a failed save


class LastCheckpoint(Checkpoint):
    """Saves ``last.ckpt`` after every epoch, when a signal stops the run, and every few minutes.

    Args:
        run_dir: the run's folder; the file is ``checkpoints/last.ckpt``.
        minutes: a killed run loses at most about this much training; above 0.
    """

    def __init__(self, run_dir: Path, *, minutes: float = 10.0) -> None:
        check_number("minutes", minutes, open_low=True)
        self.path = run_dir / CHECKPOINTS / LAST
        self.minutes = minutes
        self._saved_at = time.monotonic()  # a clock that never jumps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_at = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if can_resume_here(trainer) and (stop_requested(trainer) or self._is_due(trainer)):
            self._save(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer)

    def _is_due(self, trainer: Trainer) -> bool:
        if trainer.world_size > 1 and trainer.global_step % 20:
            return False  # the processes must agree, and each broadcast costs a synchronisation
        due = time.monotonic() - self._saved_at > self.minutes * 60
        return trainer.strategy.broadcast(due)  # the clock of process 0 decides

    def _save(self, trainer: Trainer) -> None:
        # a dry run leaves no files
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        trainer.save_checkpoint(self.path, weights_only=False)
        self._saved_at = time.monotonic()
        if not was_saved(trainer, self.path):
            # due again in a minute, not after the whole interval
            self._saved_at += SAVE_AGAIN_AFTER - self.minutes * 60
            note_failed_save(trainer, self.path)


def was_saved(trainer: Trainer, path: Path) -> bool:
    """Whether the last save to ``path`` succeeded; the same answer in all processes."""
    saved = path not in getattr(trainer.strategy.checkpoint_io, "failed", {})
    return trainer.strategy.broadcast(saved)  # only process 0 writes


def note_failed_save(trainer: Trainer, path: Path) -> None:
    """Note in the run's summary that a checkpoint could not be written."""
    for state in callbacks_of(trainer, RunState):
        state.notes[path.name] = f"{path.name} could not be written at step {trainer.global_step}"


def direction(figure: str) -> str:
    """``"max"`` for a figure such as the accuracy, ``"min"`` for a loss or an error."""
    return "max" if higher_is_better(figure) else "min"


class BestCheckpoint(ModelCheckpoint):
    """Saves ``best.ckpt`` at the best ``monitor``; ties go to the lower ``val/loss``.

    An epoch is never the best if its ``monitor`` or ``val/loss`` is not finite: logits of NaN count
    as the first class. Without a validation there is no ``best.ckpt``. If a checkpoint could not be
    written, its score does not count, so a later one can still be the best.

    Args:
        run_dir: the run's folder; the file is ``checkpoints/best.ckpt``.
        monitor: a logged figure; None for ``val/acc``.
        mode: ``"min"`` or ``"max"``; None as :func:`direction`.

    Attributes:
        figures: the validation figures of the best checkpoint; empty if it was saved without one.
    """

    def __init__(
        self, run_dir: Path, *, monitor: str | None = None, mode: str | None = None
    ) -> None:
        monitor = monitor or "val/acc"
        super().__init__(
            dirpath=run_dir / CHECKPOINTS,
            filename=BEST.removesuffix(".ckpt"),
            monitor=monitor,
            mode=mode or direction(monitor),
            auto_insert_metric_name=False,
            enable_version_counter=False,  # each run has its own folder
        )
        self.figures: dict[str, float] = {}
        self._least_loss: float | None = None  # of the best validation
        self._validated_at: int | None = None  # the step of the last validation

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._lacks_figures(trainer) and trainer.is_global_zero:
            log.info("no validation, and so no %s: %s has the weights to use", BEST, LAST)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated_at = trainer.global_step
        with self._reverted_if_unsaved(trainer):
            super().on_validation_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lacks_figures(trainer):
            return  # Lightning would warn that it does not find the monitor
        # Lightning saves here if `monitor` is a figure of training
        with self._reverted_if_unsaved(trainer):
            super().on_train_epoch_end(trainer, pl_module)

    def _lacks_figures(self, trainer: Trainer) -> bool:
        """Whether the run does not validate, and so never computes the monitor."""
        return str(self.monitor).startswith("val/") and not trainer.enable_validation

    @contextmanager
    def _reverted_if_unsaved(self, trainer: Trainer) -> Iterator[None]:
        """Restore this callback's state if a new best checkpoint could not be written."""
        before = self.state_dict()
        yield
        path = Path(self.best_model_path)
        # by identity: a new best may have an equal score
        if self.best_model_score is not before["score"] and not was_saved(trainer, path):
            self.load_state_dict(before)
            note_failed_save(trainer, path)

    def check_monitor_top_k(self, trainer: Trainer, current: Tensor | None = None) -> bool:
        # if the monitor is a figure of training, the last validation may be old
        is_new = self._validated_at == trainer.global_step
        loss = trainer.callback_metrics.get(TIE_BREAKER)
        figures = [current, loss if is_new else None]
        if not all(math.isfinite(figure) for figure in figures if figure is not None):
            return False
        better = super().check_monitor_top_k(trainer, current)
        # on small validation splits many epochs share an accuracy
        equal = current is not None and current == self.best_model_score
        if equal and loss is not None and self._least_loss is not None:
            better = better or bool(loss < self._least_loss)
        if better:
            self._least_loss = None if loss is None else float(loss)
            named = trainer.callback_metrics.items() if is_new else ()
            self.figures = {name: float(v) for name, v in named if name.startswith("val/")}
        return better

    def state_dict(self) -> dict[str, Any]:
        """Without paths: there is one file, and users may move a run's folder."""
        return {
            "score": self.best_model_score,
            "least_loss": self._least_loss,
            "figures": dict(self.figures),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        score = state_dict["score"]
        assert self.dirpath is not None
        path = "" if score is None else str(Path(self.dirpath) / BEST)
        self.best_model_path = self.kth_best_model_path = path
        self.best_model_score, self.best_k_models = score, {path: score} if path else {}
        self._least_loss, self.figures = state_dict["least_loss"], dict(state_dict["figures"])


def best_figures(trainer: Trainer) -> dict[str, float]:
    """The validation figures of the best checkpoint; empty if it was saved without a validation."""
    best = _saved_best(trainer)
    return {} if best is None else dict(best.figures)


def best_checkpoint_path(trainer: Trainer) -> Path | None:
    """The best checkpoint of a trainer's run; None if there is none, or its file is missing."""
    best = _saved_best(trainer)
    if best is None:
        return None
    path = Path(best.best_model_path)
    if path.exists():
        return path
    log.error("%s is missing: using the last weights instead", path)
    return None


def check_validated(trainer: Trainer, figures: Mapping[str, float]) -> None:
    """Refuse the end of a run with validations of which none is finite, by its last figures."""
    if _saved_best(trainer) is not None:
        return
    for best in callbacks_of(trainer, BestCheckpoint):
        for name in (str(best.monitor), TIE_BREAKER):
            if not math.isfinite(value := figures.get(name, 0.0)):
                raise FloatingPointError(
                    f"{name} is {value}, and no earlier epoch has finite figures and a {BEST}: no "
                    "weights of the run are worth a test. Lower optim.lr, train longer, or set "
                    "precision=fp32 memory=store"
                )


def check_saved(trainer: Trainer) -> None:
    """Refuse the end of a run that should save checkpoints and has none of its weights."""
    lasts = callbacks_of(trainer, LastCheckpoint)
    wanted = bool(lasts) or bool(callbacks_of(trainer, BestCheckpoint))
    dry: bool = trainer.fast_dev_run  # type: ignore[attr-defined]
    if not wanted or dry or not trainer.is_global_zero:
        return
    failed: Mapping[Path, str] = getattr(trainer.strategy.checkpoint_io, "failed", {})
    # if the last save failed, the file has older weights
    if any(has_saved(last.path.parent) and last.path not in failed for last in lasts):
        return
    if best_checkpoint_path(trainer) is None:
        unknown = "there is no file; keep callbacks.last_checkpoint and the run's folder"
        reason = next(iter(failed.values()), unknown)
        raise UnwritableCheckpointError(f"the run ends without a checkpoint: {reason}")


def _saved_best(trainer: Trainer) -> BestCheckpoint | None:
    """The callback, if it has saved a checkpoint."""
    callbacks = callbacks_of(trainer, BestCheckpoint)
    return next((callback for callback in callbacks if callback.best_model_path), None)
