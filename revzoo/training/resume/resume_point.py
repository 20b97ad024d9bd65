"""The batches of an epoch after which Lightning can resume a saved run exactly."""

from __future__ import annotations

import pytorch_lightning as pl

from revzoo.training.lightning_compat import batches_of_epoch, batches_of_run


def can_resume_here(trainer: pl.Trainer) -> bool:
    """Whether a run saved after this batch resumes exactly.

    Not between the batches of one optimiser step, because gradients are not saved; not before a due
    validation or the end of an epoch, because Lightning would skip these.
    """
    batches = batches_of_epoch(trainer)
    whole_step = batches % trainer.accumulate_grad_batches == 0
    return whole_step and not _is_pause(trainer, batches, trainer.global_step)


def is_last_chance(trainer: pl.Trainer) -> bool:
    """Whether a validation or the end of the epoch follows the next optimiser step."""
    next_step = batches_of_epoch(trainer) + trainer.accumulate_grad_batches
    return _is_pause(trainer, next_step, trainer.global_step + 1)


def _is_pause(trainer: pl.Trainer, batches: int, steps: int) -> bool:
    if batches >= trainer.num_training_batches or 0 < trainer.max_steps <= steps:
        return True
    every = trainer.val_check_batch
    # no validation, or none inside an epoch
    if every is None or every == float("inf"):
        return False
    ahead = batches - batches_of_epoch(trainer)
    by_run = trainer.check_val_every_n_epoch is None  # Lightning then counts across epochs
    count = batches_of_run(trainer) + ahead if by_run else batches
    # the validation may fall inside an optimiser step; then the step's end counts
    return count % int(every) < trainer.accumulate_grad_batches and count >= every
