"""More side bits over the last epochs, so that a converted network ends close to the plain one.

The weight b = 2^-bits of :mod:`revzoo.layers.side_bits` goes towards 0, like Dr2Net's coefficients
(Zhao et al., CVPR 2024, arXiv 2401.04105). The bits depend only on the epoch, so a resumed run
needs no other state. :class:`~revzoo.training.Classifier` records the bits in checkpoints.
"""

from __future__ import annotations

import logging

from pytorch_lightning import LightningModule, Trainer
from torch import nn

from revzoo._checks import check_count
from revzoo.layers.side_bits import MAX_BITS, SideBits
from revzoo.training.callbacks.progress_bar import epoch_of
from revzoo.training.callbacks.registry import ChecksModel, FollowsEpochs

log = logging.getLogger(__name__)


class AnnealedBits(FollowsEpochs, ChecksModel):
    """Raises the bits of a network that :func:`revzoo.make_reversible` has changed.

    Args:
        epochs: number of final epochs over which the bits rise, in equal steps.
        most: the bits of the last epoch.

    Raises:
        ValueError: ``epochs`` or ``most`` is out of range.
    """

    def __init__(self, *, epochs: int, most: int = MAX_BITS) -> None:
        check_count("epochs", epochs)
        check_count("most", most)
        if most > MAX_BITS:
            raise ValueError(f"most={most}: expected at most {MAX_BITS}")
        self.epochs, self.most = epochs, most
        self._first: dict[SideBits, int] = {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        # None or -1: a run that max_steps or a time limit ends
        if (trainer.max_epochs or -1) < 1:
            raise ValueError("annealed bits need a last epoch: give trainer.max_epochs")
        self.check_model(pl_module)
        self._first = {m: m.bits for m in pl_module.modules() if isinstance(m, SideBits)}

    def check_model(self, network: nn.Module) -> None:
        if not any(isinstance(m, SideBits) for m in network.modules()):
            raise ValueError(
                "the network has no blocks with side bits: give model.reversible_bits=4 and, if no "
                "run of blocks pays, model.reversible_runs=all; or call revzoo.make_reversible"
            )

    def begin_epoch(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.max_epochs is not None, "see setup"
        # 1 in the first of the annealed epochs, so the last one has all bits
        passed = trainer.current_epoch + 1 - (trainer.max_epochs - self.epochs)
        share = min(1.0, max(0.0, passed / self.epochs))
        before = self._bits()
        for step, first in self._first.items():
            step.bits = first + round(share * max(0, self.most - first))
        if self._bits() != before and trainer.is_global_zero:
            log.info(
                "side bits: %s in epoch %s (callbacks.side_bits raises them to %d)",
                self._bits(),
                epoch_of(trainer),
                self.most,
            )

    def _bits(self) -> int:
        return max(step.bits for step in self._first)
