"""Validate a run that ends at ``max_steps``, also in the middle of an epoch.

Lightning 2.6 leaves the epoch without a validation: the last weights could never be the best, and
the last figures would be of an earlier epoch.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


class LastStep(pl.Callback):
    """Asks the trainer to stop at ``max_steps``, which includes a validation.

    An epoch without a validation (``limit_val_batches=0``, ``check_val_every_n_epoch``) still has
    none.
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
