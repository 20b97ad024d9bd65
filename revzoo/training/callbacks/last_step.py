"""Validates a run that ends at ``max_steps``, even inside an epoch.

Lightning 2.6 ends such an epoch without a validation: the final weights could never be the best,
and the final figures would belong to an earlier epoch.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl


class LastStep(pl.Callback):
    """Asks the trainer to stop at ``max_steps``, which runs a validation if the epoch has one."""

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if 0 < trainer.max_steps <= trainer.global_step:
            # Lightning validates before it obeys this, but not when it reaches max_steps by itself
            trainer.should_stop = True
