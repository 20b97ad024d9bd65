"""An exponential moving average of the weights: Lightning's callback with eight corrections.

1. Integers, such as BatchNorm's count of batches, are copied: torch truncates their average.
2. The decay can have a warm-up: at update t it is ``min(decay, (1 + t) / (10 + t))``, as in
   TensorFlow's ``tf.train.ExponentialMovingAverage`` with ``num_updates``.
3. A test loads the weights that were validated; Lightning 2.6 swaps them with the average.
4. The average ends with its ``fit``; Lightning keeps it for any module that follows.
5. After an exception in a validation, the module has the training weights, not the average.
6. A finished run that is resumed ends with the average again: it enters no training loop, after
   which Lightning copies the average.
7. The average is on the device of the weights, and an update reads no value, so it fits into a CUDA
   graph. Lightning keeps the average on the CPU, and torch's update reads its count.
8. Under ``trainer=fsdp2`` (:mod:`revzoo.training.fsdp2`) each process has its part of the average.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import WeightAveraging
from torch import Tensor
from torch.distributed.tensor import DTensor

from revzoo._checks import check_number
from revzoo.training.callbacks.registry import RestoresAfterFit
from revzoo.training.lightning_compat import average_of, is_fitting, swap_with_average, units_of


class AveragedWeights(RestoresAfterFit, WeightAveraging):
    """Validates, tests and saves the average of the weights and of the running statistics.

    Args:
        decay: the weight of the old average at each update; updates follow every optimiser step.
        warmup: start with a smaller decay, see above.

    Raises:
        ValueError: ``decay`` is not in [0, 1).
    """

    def __init__(self, *, decay: float = 0.999, warmup: bool = True) -> None:
        check_number("decay", decay, high=1, open_high=True)
        self.decay = decay
        self.warmup = warmup
        self._in_place = False  # whether the module holds the average
        super().__init__(use_buffers=True)

    def decay_after(self, updates: Tensor | int) -> Tensor:
        """The decay of the next update, after ``updates`` updates; the first one copies."""
        t = torch.as_tensor(updates)
        warm = (1 + t) / (10 + t) if self.warmup else torch.ones_like(t, dtype=torch.float32)
        return warm.clamp(max=self.decay)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # Lightning loads the checkpoint after this
            self.load_state_dict({"latest_update_step": 0})  # point 4
            self._in_place = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        average_of(self).to(pl_module.device)  # point 7: in setup the module is still on the CPU

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        step = trainer.global_step
        if step > self.state_dict()["latest_update_step"]:
            if not getattr(pl_module, "in_graph", False):  # otherwise the graph has updated it
                self.update(pl_module)
            self.load_state_dict({"latest_update_step": step})

    @torch.no_grad()
    def update(self, pl_module: LightningModule) -> None:
        """Average once more, after an optimiser step."""
        averages = average_of(self)
        count: Any = averages.n_averaged
        decay = self.decay_after(count) * (count > 0)  # the first update copies
        pairs = zip(
            chain(averages.module.parameters(), averages.module.buffers()),
            chain(pl_module.parameters(), pl_module.buffers()),
            strict=True,
        )
        for average, current in (map(_part, pair) for pair in pairs):
            if average.is_floating_point():
                torch.lerp(current, average, decay.to(average), out=average)
            else:  # point 1
                average.copy_(current)
        count += 1

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_fitting(trainer):  # point 4
            self._swap(pl_module)
            self._in_place = True

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lightning swaps here, after a strategy has distributed weights and statistics."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_fitting(trainer):
            self._swap(pl_module)
            self._in_place = False
            for unit in units_of(pl_module):  # other callbacks may evaluate in one process
                unit.unshard()

    def _swap(self, pl_module: LightningModule) -> None:
        for unit in units_of(pl_module):  # gathered for a validation
            unit.reshard()
        swap_with_average(self, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._in_place = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # point 6: such a run skips on_train_end
        if not self._in_place:
            self.on_train_end(trainer, pl_module)

    def undo(self, pl_module: LightningModule) -> None:
        # point 5: an exception inside a validation finds the average in the module
        if self._in_place:  # after training, both copies are the average
            self._swap(pl_module)
        self._in_place = False

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if is_fitting(trainer):
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if is_fitting(trainer):  # point 3
            super().on_load_checkpoint(trainer, pl_module, checkpoint)


def _part(t: Tensor) -> Tensor:
    """The part of this process, in the memory of ``t``; a whole tensor itself."""
    return t.to_local() if isinstance(t, DTensor) else t
