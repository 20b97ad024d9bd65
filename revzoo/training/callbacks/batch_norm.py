"""A warm-up of BatchNorm's momentum, so that short runs evaluate with fresh running statistics.

After t batches the initial statistics still weigh ``(1 - momentum) ** t``: 45 % after 80 batches at
the paper's momentum of 0.01. The warm-up gives batch t at least the weight ``9 / (10 + t)``, the
rule of the weight average (:mod:`revzoo.training.callbacks.ema`). It ends after 890 batches.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from revzoo._checks import check_count, check_number
from revzoo.layers.make_reversible import recalibrate_batch_norm
from revzoo.training.callbacks.registry import RestoresAfterFit
from revzoo.training.lightning_compat import batches_of_run

log = logging.getLogger(__name__)


class BatchNormMomentum(RestoresAfterFit):
    """Sets the momentum (torch's convention) of all BatchNorms during training.

    A BatchNorm with momentum None averages over all batches; it stays unchanged. Modules that
    :class:`~revzoo.training.CompiledBranches` compiles get no warm-up: each new momentum would
    start another compilation.

    Args:
        momentum: the weight of a batch's statistics; None keeps each BatchNorm's momentum.
        warmup: start with a larger momentum, see above.
        recalibrate: number of batches of training images that replace the statistics before the
            first step (:func:`revzoo.recalibrate_batch_norm`).

    Raises:
        ValueError: ``momentum`` is not in (0, 1], or ``recalibrate`` is not a whole number >= 0.
    """

    def __init__(
        self, *, momentum: float | None = None, warmup: bool = True, recalibrate: int = 0
    ) -> None:
        check_count("recalibrate", recalibrate, least=0)
        self.recalibrate = recalibrate
        if momentum is not None:
            check_number("momentum", momentum, high=1, open_low=True)
        self.momentum = momentum
        self.warmup = warmup
        # by name: Lightning may replace the modules by SyncBatchNorms and back
        self._original: dict[str, float] = {}  # restored after training
        self._targets: dict[_BatchNorm, float] = {}  # the momentum after the warm-up

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the momenta here, not in ``setup``: Lightning inserts SyncBatchNorms after it."""
        compiled = _inside_compiled(pl_module)
        self._original, self._targets = {}, {}
        for name, norm in pl_module.named_modules():
            if isinstance(norm, _BatchNorm) and norm.momentum is not None:
                self._original[name] = norm.momentum
                norm.momentum = norm.momentum if self.momentum is None else self.momentum
                if self.warmup and norm not in compiled:
                    self._targets[norm] = norm.momentum
        if self.warmup and len(self._targets) < len(self._original):
            log.warning(
                "BatchNorms of compiled parts get no warm-up of their momentum; set "
                "callbacks.batch_norm.momentum=0.1 for runs of a few hundred steps"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.recalibrate or trainer.global_step:  # a resumed run has its statistics
            return
        loader: Any = trainer.train_dataloader
        with torch.random.fork_rng():  # training draws the same numbers with and without
            # a separate iterator: training still starts with the first batch
            batches = itertools.islice(iter(loader), self.recalibrate)
            moved = (trainer.strategy.batch_to_device(b, pl_module.device, 0) for b in batches)
            recalibrate_batch_norm(pl_module, (images for images, _ in moved))
        if trainer.is_global_zero:
            log.info(
                "BatchNorm: statistics of %d batches of training images replace the loaded ones "
                "(callbacks.batch_norm.recalibrate)",
                min(self.recalibrate, trainer.num_training_batches),
            )

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        least = 9 / (9 + batches_of_run(trainer))  # Lightning has counted this batch already
        for norm, momentum in self._targets.items():
            norm.momentum = max(momentum, least)
        if least <= min(self._targets.values(), default=1):
            self._targets = {}  # the warm-up is over

    def undo(self, pl_module: LightningModule) -> None:
        for name, momentum in self._original.items():
            norm = pl_module.get_submodule(name)
            assert isinstance(norm, _BatchNorm), "as in on_fit_start"
            norm.momentum = momentum
        self._original, self._targets = {}, {}


def _inside_compiled(module: nn.Module) -> set[nn.Module]:
    """All modules inside a module that was compiled in place."""
    compiled = [m for m in module.modules() if m._compiled_call_impl is not None]
    return {part for whole in compiled for part in whole.modules()}
