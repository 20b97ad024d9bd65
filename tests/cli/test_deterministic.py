"""``trainer.deterministic=true``: the same bits in each run, and restored switches after it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from small_images import image_folder

from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.core.modes import MODES

# a warning on machines with one CPU
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

SMALL = (
    "debug=smoke",
    "trainer=cpu",
    "trainer.deterministic=true",
    "+model.units=[1,1,1]",
    "model.dropout=0.1",
    "test=false",
    "callbacks.footprint=null",  # it counts a step, which takes longer than the run
    "memory=exact",
)


def weights(run_dir: Path) -> Any:
    state = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)
    for optimizer in state["optimizer_states"]:
        for group in optimizer["param_groups"]:
            del group["name"]  # assert_close() knows no strings
    return state["state_dict"], state["optimizer_states"]


def assert_same_bits(one: Path, other: Path) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=0, atol=0)


@pytest.mark.parametrize("mode", MODES)
def test_two_runs_are_the_same(mode: str, compose: Any, tmp_path: Path) -> None:
    for workers in (0, 2):
        config = compose(*SMALL, f"memory={mode}", f"data.num_workers={workers}")
        train(config, run_dir=tmp_path / str(workers))
    assert_same_bits(tmp_path / "0", tmp_path / "2")


def test_images_augmented_by_workers_are_the_same(compose: Any, tmp_path: Path) -> None:
    root = image_folder(tmp_path / "images")
    images = ("data=imagefolder", f"data.root={root}", "data.cache_bytes=0", "data.batch_size=8")
    images += ("data.image_size=8",)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = compose(*SMALL, *images, "data.num_workers=2", f"seed={seed}")
        train(config, run_dir=tmp_path / name)
    assert_same_bits(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError, match="not equal"):
        assert_same_bits(tmp_path / "a", tmp_path / "c")


def switches() -> tuple[Any, ...]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.benchmark,
        os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
    )


def test_the_switches_are_on_only_during_the_run(
    compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = []
    fit_and_test = train_module.fit_and_test

    def watched(*args: Any, **options: Any) -> dict[str, float]:
        inside.append(switches())
        return fit_and_test(*args, **options)

    monkeypatch.setattr(train_module, "fit_and_test", watched)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    before = switches()
    train(compose(*SMALL), run_dir=tmp_path)
    assert inside == [(True, False, ":4096:8")]
    assert switches() == before == (False, True, None)
    assert "PL_GLOBAL_SEED" not in os.environ
