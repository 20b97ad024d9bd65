from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_task import TINY, TinyNet, loader, trainer
from torch import nn

from revzoo.training import BatchNormMomentum, Classifier

OPTIM = {"lr": 0.01, "schedule": {"name": "constant"}}


def test_with_all_its_weight_the_statistics_are_those_of_the_last_batch(tmp_path: Path) -> None:
    module = Classifier(TinyNet(), optim=OPTIM)
    net: Any = module.model
    with torch.no_grad():
        net.body[0].weight.zero_()  # the batch's mean is the bias
        net.body[0].bias.copy_(torch.arange(4.0))
    net.body[0].requires_grad_(False)
    callbacks = [BatchNormMomentum(momentum=1.0)]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    assert torch.equal(net.body[1].running_mean, torch.arange(4.0))


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_every_normalisation_follows(tmp_path: Path, memory: str) -> None:
    module = Classifier({**TINY, "memory": memory}, optim=OPTIM)
    norms = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    callbacks = [BatchNormMomentum()]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    for norm in norms:
        assert norm.momentum == 0.1
        assert norm.running_var is not None
        # four batches, each once: of the variance it began with at least 0.9 ** 4 is left
        assert (norm.running_var >= 0.9**4 - 1e-6).all()
        assert not torch.allclose(norm.running_var, torch.ones(()), atol=1e-3)


@pytest.mark.parametrize("momentum", [0, -0.1, 1.5, None, True])
def test_nonsense_is_refused(momentum: Any) -> None:
    with pytest.raises(ValueError, match=r"momentum=.*expected a number in"):
        BatchNormMomentum(momentum=momentum)
