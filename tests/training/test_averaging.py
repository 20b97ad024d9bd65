"""The moving average against its formula, step by step."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer
from torch import Tensor

from revzoo.training import Classifier, build_callbacks
from revzoo.training.averaging import AveragedWeights


class States(pl.Callback):
    """The state after every optimiser step, and the average's at the end."""

    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *arguments: Any) -> None:
        self.after.append({k: v.clone() for k, v in pl_module.state_dict().items()})


def averaged(states: list[dict[str, Tensor]], decays: list[float]) -> dict[str, Tensor]:
    average = states[0]
    for state, decay in zip(states[1:], decays, strict=True):
        average = {k: decay * v + (1 - decay) * state[k] for k, v in average.items()}
    return average


@pytest.mark.parametrize("warmup", [True, False])
def test_weights_and_statistics_follow_the_formula_and_counts_are_copied(
    tmp_path: Path, warmup: bool
) -> None:
    states, average = States(), AveragedWeights(decay=0.3, warmup=warmup)
    module = Classifier(TinyNet(), optim={"lr": 0.5, "schedule": {"name": "constant"}})
    trainer(tmp_path, callbacks=[states, average]).fit(module, loader(), loader())
    found = module.state_dict()
    assert len(states.after) == 8
    warm = [2 / 11, 3 / 12, 0.3, 0.3, 0.3, 0.3, 0.3]
    expected = averaged(states.after, warm if warmup else [0.3] * 7)
    moved = 0
    for name, value in found.items():
        if value.is_floating_point():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), name
            moved += not torch.allclose(value, states.after[-1][name])
        else:
            assert torch.equal(value, states.after[-1][name]), name
    assert found["model.body.1.num_batches_tracked"] == 8
    assert moved >= 4


def test_the_decay_rises_to_what_was_asked_for() -> None:
    average = AveragedWeights(decay=0.99)
    decays = [float(average.decay_after(t)) for t in range(2000)]
    assert decays[:2] == pytest.approx([0.1, 2 / 11])
    assert all(a <= b for a, b in itertools.pairwise(decays))
    assert decays[889] < 0.99
    assert decays[-1] == pytest.approx(0.99)
    constant = AveragedWeights(decay=0.99, warmup=False)
    assert float(constant.decay_after(torch.tensor(1))) == pytest.approx(0.99)


def test_options_reach_the_average(tmp_path: Path) -> None:
    (average,) = build_callbacks({"ema": {"decay": 0.5, "warmup": False}}, run_dir=tmp_path)
    assert isinstance(average, AveragedWeights)
    assert (average.decay, average.warmup) == (0.5, False)
