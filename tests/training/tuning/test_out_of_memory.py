from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_run import QUICK

from revzoo.cli.main import main
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.core.modes import set_memory
from revzoo.training import Classifier
from revzoo.training.memory import is_out_of_memory, memory_advice

SPEC = {"name": "revnet38", "num_classes": 10, "in_chans": 3, "memory": "store"}
CONFIGS = Path(__file__).parents[3] / "configs"


def advice(had: int | None = None, **spec: Any) -> str:
    data: Any = SimpleNamespace(batch_size=64, train_sizes=(32, 32))
    return memory_advice(Classifier({**SPEC, "units": [1, 1, 1], **spec}), data, had)


def test_the_advice_lists_the_modes() -> None:
    text = advice()
    assert "activations take" in text
    need = {mode: float(size) for size, mode in re.findall(r"([\d.]+) MiB in (\w+)", text)}
    assert next(iter(need)) == "store"  # the present mode
    assert {"exact", "invert", "recompute"} <= need.keys()
    assert text.endswith("or lower data.batch_size (64)")
    assert need["invert"] < need["store"] / 2


@pytest.mark.parametrize(("had", "fits"), [(24, 24), (12, 8), (6, 5), (1, None), (900, None)])
def test_the_advice_names_a_batch_that_fits(had: int, fits: int | None) -> None:
    ending = "" if fits is None else f", to about {fits} in invert"
    assert advice(had=had * 2**20).endswith(f"or lower data.batch_size (64){ending}")


def test_a_planned_run_is_listed_first() -> None:
    module = Classifier({**SPEC, "units": [1, 1, 1], "memory": None})
    set_memory(module.model, {"stages.2": "store"})
    data: Any = SimpleNamespace(batch_size=64, train_sizes=(32, 32))
    assert re.search(r"activations take [\d.]+ MiB in as set; ", memory_advice(module, data))


def test_a_model_that_cannot_be_counted_gets_the_other_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("revzoo.profiling.audit.audit", fails)
    assert advice() == "; lower data.batch_size (64)"


def fails(*args: Any) -> None:
    raise MemoryError


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
            # not when the advice counts, with fake tensors
            if when(module) and type(inputs[0]) is torch.Tensor:
                raise kind("out of memory")

        norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        norms[3].register_forward_pre_hook(fail)
        return module

    return build


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_a_run_ends_with_the_advice(
    kind: type[Exception], compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(*QUICK, "memory=store")
    build = module_that_fails(kind, lambda module: module.training)
    monkeypatch.setattr(train_module, "build_module", build)
    with pytest.raises(SystemExit) as end:
        train(config, run_dir=tmp_path)
    message = str(end.value)
    assert message.startswith("revzoo: step 0: out of memory at a peak of ")
    assert re.search(r"activations take [\d.]+ [KM]iB in store; .* in exact", message)
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
        train(compose(*QUICK), run_dir=tmp_path)
    message = str(end.value)
    assert message.startswith("revzoo: out of memory at a peak of ")
    assert message.endswith(EVALUATING + "data.eval_batch_size")
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped"] == message.removeprefix("revzoo: ")
    assert ("val/acc" in summary["metrics"]) == (stage == "test")


def test_so_does_revzoo_eval(compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(compose(*QUICK), run_dir=tmp_path)

    monkeypatch.setattr(Classifier, "test_step", fails)
    with pytest.raises(SystemExit) as end:
        main(["eval", f"ckpt={tmp_path / 'checkpoints' / 'best.ckpt'}", "trainer=cpu"])
    assert str(end.value).endswith(EVALUATING + "batch_size")
