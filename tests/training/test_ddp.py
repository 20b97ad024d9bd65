"""Options of DistributedDataParallel that the trainer passes on, in every memory mode."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy
from small_task import TINY, loader, trainer
from torch import Tensor, nn
from two_processes import run

import revzoo
from revzoo.training import Classifier

MODES = ("store", "recompute", "invert", "exact")
OPTIONS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
pytestmark = pytest.mark.timeout(300)


def fitted(
    mode: str, options: dict[str, Any], *, blank: bool = False, **of_trainer: Any
) -> dict[str, Tensor]:
    """The weights after an epoch, with a layer that no forward pass uses if that is allowed."""
    torch.manual_seed(0)
    module = Classifier({**TINY, "units": [2, 2, 2], "memory": mode}, optim={"lr": 0.05})
    if blank:
        module.model.blank = revzoo.ActNorm(4)
    if options:
        module.model.unused = nn.Linear(1, 1)
    strategy = DDPStrategy(**options)
    trainer(Path(), devices=2, max_epochs=1, strategy=strategy, **of_trainer).fit(module, loader())
    return {name: t.clone() for name, t in module.state_dict().items() if "unused" not in name}


def task(rank: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    found: dict[str, Any] = {}
    for mode in MODES:
        found[mode] = fitted(mode, {})
        found |= {f"{mode} {name}": fitted(mode, options) for name, options in OPTIONS.items()}
    with pytest.raises(ValueError, match=r"static_graph=True with accumulate_grad_batches=2: to"):
        fitted("invert", OPTIONS["static_graph"], accumulate_grad_batches=2)
    with pytest.raises(ValueError, match=r"sets blank \(ActNorm\), and each process would set its"):
        fitted("invert", {}, blank=True)
    return found


def test_options_change_no_weight() -> None:
    """A static graph with accumulated batches failed in torch, ActNorms differed by process."""
    for found in run(task):
        assert len(found) == 12
        for name, weights in found.items():
            for key, value in found[name.partition(" ")[0]].items():
                assert torch.equal(weights[key], value), (name, key)
