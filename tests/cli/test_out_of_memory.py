from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from revzoo.cli import out_of_memory
from revzoo.cli import train as train_module
from revzoo.cli.out_of_memory import bytes_per_image, is_out_of_memory, memory_advice
from revzoo.cli.train import train

SPEC = {"name": "revnet38", "num_classes": 10, "in_chans": 3, "memory": "store"}
CPU = torch.device("cpu")
SMALL = ("debug=smoke", "trainer=cpu")


def test_reversible_modes_need_less() -> None:
    needs = {m: bytes_per_image({**SPEC, "memory": m}, 32) for m in ("store", "invert")}
    assert needs["store"] is not None
    assert needs["invert"] is not None
    assert needs["invert"] < needs["store"] / 4
    # benchmarks/bench_activations.py: 2,981 KiB per image, gradients of weights included
    assert needs["store"] == pytest.approx(2981 * 1024, rel=0.15)
    assert bytes_per_image({**SPEC, "name": "resnet32", "memory": "invert"}, 32) is None


@pytest.mark.parametrize(
    ("memory", "limit", "batch_size", "message"),
    [
        ("store", 2**30, 128, "memory=invert would fit"),
        ("store", 2**20, 128, "memory=invert needs least; lower data.batch_size (128) as well"),
        ("invert", 2**20, 64, "least of all modes: lower data.batch_size (64)"),
        ("store", None, 64, "Use memory=invert"),
    ],
)
def test_the_advice(
    memory: str, limit: int | None, batch_size: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(out_of_memory, "available_bytes", lambda device: limit)
    monkeypatch.setattr(out_of_memory, "MODES", ("store", "invert"))
    spec = {**SPEC, "memory": memory, "units": [1, 1, 1]}
    said = memory_advice(spec, batch_size=batch_size, image_size=32, device=CPU)
    assert message in said
    assert f"with memory={memory}" in said


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
def test_what_counts_as_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_a_run_ends_with_the_advice(
    kind: type[Exception], compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = compose(*SMALL, "memory=store")
    original = train_module.build_module

    def build(*args: Any) -> Any:
        module = original(*args)

        def fail(layer: Any, inputs: Any) -> None:
            if layer.training:
                raise kind("out of memory")

        norms = [m for m in module.modules() if isinstance(m, torch.nn.BatchNorm2d)]
        norms[3].register_forward_pre_hook(fail)
        return module

    monkeypatch.setattr(train_module, "build_module", build)
    with pytest.raises(SystemExit) as end:
        train(config, run_dir=tmp_path)
    message = str(end.value)
    assert message.startswith("revzoo: step 0: out of memory at a peak of ")
    assert "GiB" in message
    # of images this small the weights need more than the activations
    assert re.search("memory=(invert|recompute|exact) would fit", message)
