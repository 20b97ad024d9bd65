"""An exponential moving average of the weights, by Lightning's callback, mended in one place."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import EMAWeightAveraging
from pytorch_lightning.trainer.states import TrainerFn


class AveragedWeights(EMAWeightAveraging):
    """Validates with, tests and saves the average; running statistics are averaged, too.

    Lightning 2.6 exchanges the average for the weights in training whenever a checkpoint is loaded,
    also to test it: the test would be one of weights that nothing else has seen.
    """

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)
