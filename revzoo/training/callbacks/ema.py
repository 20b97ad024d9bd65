"""An exponential moving average of the weights: Lightning's callback with six corrections.

1. Whole numbers, such as BatchNorm's count of batches, are copied. Torch's average truncates them
   to integers at every update, and so leaves them where they were after the first.
2. The decay may be warmed up: at update t it is ``min(decay, (1 + t) / (10 + t))``, as TensorFlow's
   ``tf.train.ExponentialMovingAverage`` does with ``num_updates``. A constant decay of 0.999 would
   hold on to the first weights for some thousand steps.
3. Lightning 2.6 exchanges average and weights whenever a checkpoint is loaded, even for a test: it
   would test weights that were never validated. We exchange them only to resume a training.
4. The average ends with its training. Lightning keeps it: the next validation would be of the old
   average, whatever module is validated, and a second training with the same callback would not be
   averaged before it passed the steps of the first.
5. After an exception in a validation, the module has the weights of training, not the average.
6. A finished run that is resumed ends with the average again. Lightning copies it into the module
   at the end of a loop that such a run does not enter.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor

from revzoo.training.callbacks.base import RestoresAfterFit
from revzoo.training.lightning_compat import OpenWeightAveraging


class AveragedWeights(RestoresAfterFit, OpenWeightAveraging):
    """Validates, tests and saves the average; running statistics are averaged, too.

    Args:
        decay: the share of the average that stays at an update, one after each optimiser step.
        warmup: begin with a smaller one, see above.
    """

    def __init__(self, *, decay: float = 0.999, warmup: bool = True) -> None:
        self.decay = decay
        self.warmup = warmup
        self._in_place = False  # whether the average is in the network's place
        super().__init__(use_buffers=True, avg_fn=self._average)

    def decay_after(self, updates: Tensor | int) -> Tensor:
        """The decay of the update after ``updates`` earlier ones, the first of which copies."""
        t = torch.as_tensor(updates)
        warm = (1 + t) / (10 + t) if self.warmup else torch.ones_like(t, dtype=torch.float32)
        return warm.clamp(max=self.decay)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # what a checkpoint says is loaded after this
            self.forget_steps()
            self._in_place = False

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._in_place = True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._in_place:
            self.copy_average(pl_module)

    def undo(self, pl_module: pl.LightningModule) -> None:
        if self._in_place:  # at the end of a training both are the average
            self.exchange(pl_module)
        self.forget_average()
        self._in_place = False

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_load_checkpoint(trainer, pl_module, checkpoint)

    def exchange(self, pl_module: pl.LightningModule) -> None:
        super().exchange(pl_module)
        self._in_place = not self._in_place

    def _average(self, average: Tensor, current: Tensor, updates: Tensor | int) -> Tensor:
        if not average.is_floating_point():
            return current
        return torch.lerp(current, average, self.decay_after(updates).to(average))
