"""Where in an epoch a run can be saved such that Lightning resumes exactly."""

from __future__ import annotations

import pytorch_lightning as pl

from revzoo.training.lightning_compat import batches_of_epoch, batches_of_run


def can_resume_here(trainer: pl.Trainer) -> bool:
    """Whether a state saved at the end of this batch resumes as if never stopped.

    It does not between the batches of one optimiser step, as gradients are not saved; nor where a
    validation or the end of the epoch is due, as Lightning would resume behind it.
    """
    return batches_of_epoch(trainer) % trainer.accumulate_grad_batches == 0 and not _is_pause(
        trainer, batches_of_epoch(trainer), trainer.global_step
    )


def is_last_chance(trainer: pl.Trainer) -> bool:
    """Whether the next optimiser step is followed by a validation or the end of the epoch."""
    next_step = batches_of_epoch(trainer) + trainer.accumulate_grad_batches
    return _is_pause(trainer, next_step, trainer.global_step + 1)


def _is_pause(trainer: pl.Trainer, batches: int, steps: int) -> bool:
    if batches >= trainer.num_training_batches or 0 < trainer.max_steps <= steps:
        return True
    every = trainer.val_check_batch
    if every is None or every == float("inf"):
        return False
    total = batches_of_run(trainer)  # if not counted by epochs
    ahead = batches - batches_of_epoch(trainer)
    count = total + ahead if trainer.check_val_every_n_epoch is None else batches
    return count % int(every) < trainer.accumulate_grad_batches and count >= every
