"""How fast the running statistics of BatchNorm follow, in runs of few steps.

After t steps the statistics that a network began with still weigh ``(1 - momentum) ** t``: with the
paper's momentum of 0.01 that is 45 % after 80 steps, so that a network which is trained, or
fine-tuned, for so short a time is evaluated with statistics that are not its own.
"""

from __future__ import annotations

import pytorch_lightning as pl
from torch.nn.modules.batchnorm import _BatchNorm

from revzoo.training.spec import check_range


class BatchNormMomentum(pl.Callback):
    """Sets the momentum, in torch's sense, of all BatchNorms for a training.

    Args:
        momentum: the weight of a batch's statistics; torch's own default is 0.1.

    Raises:
        ValueError: no number above 0, and at most 1.
    """

    def __init__(self, *, momentum: float = 0.1) -> None:
        check_range("momentum", momentum, high=1, open_low=True)
        self.momentum = momentum

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        for module in pl_module.modules():
            if isinstance(module, _BatchNorm):
                module.momentum = self.momentum
