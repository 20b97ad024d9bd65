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

from revzoo.training import Classifier

MODES = ("store", "recompute", "invert", "exact")
OPTIONS: dict[str, dict[str, Any]] = {
    "static_graph": {"static_graph": True},
    "find_unused_parameters": {"find_unused_parameters": True},
}
pytestmark = pytest.mark.timeout(300)


def fitted(mode: str, options: dict[str, Any], **of_trainer: Any) -> dict[str, Tensor]:
    """The weights after two epochs, with a layer that no forward pass uses if that is allowed."""
    torch.manual_seed(0)
    module = Classifier({**TINY, "units": [2, 2, 2], "memory": mode}, optim={"lr": 0.05})
    if options:
        module.model.unused = nn.Linear(1, 1)
    strategy = DDPStrategy(**options)
    trainer(Path(), devices=2, strategy=strategy, **of_trainer).fit(module, loader())
    return {name: t.clone() for name, t in module.state_dict().items() if "unused" not in name}


def task(rank: int) -> Any:
    os.environ["LOCAL_RANK"] = str(rank)
    found: dict[str, Any] = {}
    for mode in MODES:
        found[mode] = fitted(mode, {})
        found |= {f"{mode} {name}": fitted(mode, options) for name, options in OPTIONS.items()}
    try:
        fitted("invert", OPTIONS["static_graph"], accumulate_grad_batches=2)
    except ValueError as error:
        found["refused"] = str(error)
    return found


def test_options_change_no_weight() -> None:
    for found in run(task):
        assert found.pop("refused").startswith("static_graph=True with accumulate_grad_batches=2:")
        assert len(found) == 12
        for name, weights in found.items():
            for key, value in found[name.partition(" ")[0]].items():
                assert torch.equal(weights[key], value), (name, key)
