from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, loader, trainer

from revzoo.cli.main import main
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.core.set_memory import set_memory
from revzoo.training import Classifier
from revzoo.training.tuning import out_of_memory
from revzoo.training.tuning.out_of_memory import (
    NoMemoryError,
    bytes_per_image,
    is_out_of_memory,
    memory_advice,
    memory_errors,
)

SPEC = {"name": "revnet38", "num_classes": 10, "in_chans": 3, "memory": "store"}
CPU = torch.device("cpu")
CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = ("debug=smoke", "trainer=cpu")


def test_reversible_modes_need_less() -> None:
    needs = bytes_per_image(SPEC, 32)
    assert needs["invert"] < needs["store"] / 4
    # benchmarks/bench_activations.py: 2,981 KiB per image, gradients of weights included
    assert needs["store"] == pytest.approx(2981 * 1024, rel=0.15)
    assert "invert" not in bytes_per_image({**SPEC, "name": "resnet32"}, 32)


@pytest.mark.parametrize(
    ("memory", "free", "batch_size", "message"),
    [
        ("store", 2**30, 128, "memory=invert would fit: 1.00 GiB are free"),
        ("store", 2**20, 128, "memory=invert needs least, but only 1.00 MiB are free"),
        ("store", 2**20, 128, "lower data.batch_size (128) as well"),
        ("invert", 2**30, 64, "No mode takes less than invert: lower data.batch_size (64)"),
        ("store", None, 64, "Use memory=invert"),
    ],
)
def test_the_advice(
    memory: str, free: int | None, batch_size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "free_bytes", lambda device: free)
    text = advice(batch_size, memory=memory, units=[1, 1, 1])
    assert message in text
    assert f"with memory={memory}" in text


def test_the_advice_to_a_planned_run() -> None:
    """A run with memory=auto was advised as if it had run in the inverting mode."""
    module = Classifier({**SPEC, "units": [1, 1, 1], "memory": None})
    set_memory(module.model, {"stages.2": "store"})
    data: Any = SimpleNamespace(batch_size=64, image_size=32)
    text = memory_advice(module, data, device=CPU)
    assert "with a plan of exact and store" in text
    assert re.search(r"activations take: the plan [\d.]+ MiB, store [\d.]+ MiB", text)


def advice(batch_size: int, **spec: Any) -> str:
    data: Any = SimpleNamespace(batch_size=batch_size, image_size=32)
    return memory_advice(Classifier({**SPEC, **spec}), data, device=CPU)


def test_only_a_mode_that_needs_less_is_advised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs = {"store": 2.0**20, "exact": 2.0**20}
    monkeypatch.setattr(out_of_memory, "bytes_per_image", lambda *args: needs)
    assert "No mode takes less than store: lower data.batch_size (64)" in advice(64, memory="store")
    assert "less than store" in advice(64, name="resnet32", memory=None)
    monkeypatch.setattr(out_of_memory, "bytes_per_image", fails)
    assert advice(64, memory="invert").endswith("memory=invert; lower data.batch_size (64)")


def fails(*args: Any) -> None:
    raise MemoryError


def test_the_failed_step_is_freed_before_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    class Greedy(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            activations = self.model(batch[0])
            kept.append(weakref.ref(activations))
            try:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            except RuntimeError as error:
                raise MemoryError from error

    alive: list[bool] = []

    def look(*args: Any, **options: Any) -> str:
        alive.append(kept[0]() is not None)
        return "advice"

    monkeypatch.setattr(out_of_memory, "memory_advice", look)
    module, runner = Greedy(TINY), trainer(tmp_path)
    data: Any = None
    with (
        pytest.raises(NoMemoryError, match="step 0: advice"),
        memory_errors(runner, module, data),
    ):
        runner.fit(module, loader())
    assert alive == [False]
    callbacks = runner.callbacks  # type: ignore[attr-defined]
    assert not [c for c in callbacks if isinstance(c, pl.callbacks.LambdaCallback)]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shapes do not fit"), False),
        (ValueError(), False),
    ],
)
def test_errors_that_count_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def module_that_fails(kind: type[Exception], when: Callable[[Classifier], bool]) -> Any:
    """``build_module`` with a model that runs out of memory in training or in evaluation."""
    original = train_module.build_module

    def build(*args: Any, **shape: Any) -> Any:
        module = original(*args, **shape)

        def fail(layer: Any, inputs: Any) -> None:
            if when(module):
                raise kind("out of memory")

        norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        norms[3].register_forward_pre_hook(fail)
        return module

    return build


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_a_run_ends_with_the_advice(
    kind: type[Exception], compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(*SMALL, "memory=store")
    build = module_that_fails(kind, lambda module: module.training)
    monkeypatch.setattr(train_module, "build_module", build)
    with pytest.raises(SystemExit) as end:
        train(config, run_dir=tmp_path)
    message = str(end.value)
    assert message.startswith("revzoo: step 0: out of memory at a peak of ")
    assert "GiB" in message
    # for images this small the weights need more than the activations
    assert re.search("memory=(invert|recompute|exact) would fit", message)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert message == f"revzoo: {summary['stopped']}"


EVALUATING = "evaluating 512 images at once: lower "


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_an_evaluation_ends_with_advice(
    stage: str, compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = module_that_fails(
        torch.OutOfMemoryError, lambda module: module.trainer.state.stage == stage
    )
    monkeypatch.setattr(train_module, "build_module", build)
    with pytest.raises(SystemExit) as end:
        train(compose(*SMALL), run_dir=tmp_path)
    message = str(end.value)
    assert message.startswith("revzoo: out of memory at a peak of ")
    assert message.endswith(EVALUATING + "data.eval_batch_size")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped"] == message.removeprefix("revzoo: ")
    assert ("val/acc" in summary["metrics"]) == (stage == "test")


def test_so_does_revzoo_eval(compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(compose(*SMALL, "+model.units=[1,1,1]"), run_dir=tmp_path)

    monkeypatch.setattr(Classifier, "test_step", fails)
    with pytest.raises(SystemExit) as end:
        main(["eval", f"ckpt={tmp_path / 'checkpoints' / 'best.ckpt'}", "trainer=cpu"])
    assert str(end.value).endswith(EVALUATING + "batch_size")
