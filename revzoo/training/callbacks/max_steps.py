"""A run that ends after so many steps is validated at its end, wherever in an epoch that is.

Lightning 2.6 leaves an epoch in its middle at ``max_steps`` without a validation: the last weights
could never be the best, and the figures of an earlier epoch would stand for those of the end.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


class LastStep(pl.Callback):
    """Asks for the end, and thereby for a validation, once ``max_steps`` are done.

    There is none where the epoch would have had none (``limit_val_batches=0``,
    ``check_val_every_n_epoch``).
    """

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            trainer.should_stop = True
