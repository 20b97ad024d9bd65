"""The first and last lines of a run, and their format."""

from __future__ import annotations

import logging
import re
import shutil
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from revzoo.cli.invocation import short_path
from revzoo.cli.run.console import LogFormat, _length, kept_bytes, logged_warnings
from revzoo.cli.run.train import train
from revzoo.data import Digits
from revzoo.profiling.costs import activation_bytes
from revzoo.training import Classifier

SMALL = ("debug=smoke", "trainer=cpu", "+model.units=[1,1,1]", "memory=exact")


def record(level: int) -> logging.LogRecord:
    return logging.LogRecord("revzoo.a.long.name", level, "f.py", 1, "step %d", (3,), None)


def test_the_prefix_is_short_and_names_levels_above_info() -> None:
    line = LogFormat(date=False).format(record(logging.INFO))
    assert len(line) == len("08:01:30 step 3")
    assert LogFormat(date=False).format(record(logging.WARNING)).endswith(" warning: step 3")
    assert len(LogFormat(date=True).format(record(logging.INFO))) == 26


def test_a_run_logs_its_description_and_its_figures(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="revzoo"):
        figures = train(compose(*SMALL, "seed=7"), run_dir=tmp_path / "run")
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.INFO]
    opening = {line[:8].strip(): line[9:] for line in lines if len(line) > 9 and line[8] == " "}
    assert opening["model"].startswith("revnet38, ")
    assert opening["data"] == "Digits, 10 classes, images of 1x8x8"
    assert "1,293 to train, 144 to validate" in lines[2]
    assert opening["memory"].startswith("exact, ")
    assert opening["memory"].endswith("KiB of activations per image")
    assert opening["device"].startswith("cpu, float32, ")
    assert opening["train"] == "1 epoch, 64 images per step, sgd with lr 0.2, seed 7"
    assert opening["trained"].startswith("1 epoch, 3 steps in ")
    assert f"acc {figures['test/acc']:.4f}" in opening["test"]
    assert "best checkpoint" in opening["test"]
    assert opening["curves"].endswith(f"tensorboard --logdir {tmp_path / 'run'}")
    assert shutil.which(opening["curves"].split()[0])  # an existing program
    assert opening["predict"].endswith("best.ckpt IMAGES")
    assert all(len(line) <= 71 for line in lines if str(tmp_path) not in line)


def test_a_network_made_reversible_says_so(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("model=resnet32", "model.reversible_bits=4", "test=false")
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*SMALL, *options), run_dir=tmp_path / "run")
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("model  ")]
    text = r"model    resnet32, [\d,]+ parameters, \d+ blocks reversible with 4 bits"
    assert re.fullmatch(text, line)


def test_a_run_says_what_side_bits_and_recalibration_do(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = ("model=resnet32", "model.reversible_bits=4", "test=false", "trainer.max_epochs=3")
    callbacks = ("callbacks.side_bits={epochs: 2}", "callbacks.batch_norm.recalibrate=2")
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*SMALL, *options, *callbacks), run_dir=tmp_path / "run")
    lines = [line for line in caplog.messages if line.startswith(("side bits", "BatchNorm"))]
    assert lines == [
        "BatchNorm: statistics of 2 batches of training images replace the weights' "
        "(callbacks.batch_norm.recalibrate)",
        "side bits: 6 in epoch 2/3 (callbacks.side_bits raises them to 8)",
        "side bits: 8 in epoch 3/3 (callbacks.side_bits raises them to 8)",
    ]


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings(), logged_warnings():
        for _ in range(2):
            with warnings.catch_warnings():  # as revzoo.training.quiet
                warnings.simplefilter("always")
                warnings.warn("first\n  line", RuntimeWarning, stacklevel=1)
                warnings.warn("second", stacklevel=1)
    assert caplog.messages == ["first line", "second"]


def test_counting_activations_takes_no_memory_and_no_random_numbers() -> None:
    spec = {"name": "revnet38", "units": (1, 1, 1), "in_chans": 1, "num_classes": 10}
    module, data = Classifier({**spec, "memory": "store"}), Digits()
    data.setup("fit")
    state = torch.get_rng_state()
    found = kept_bytes(module, data)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.device.type == "cpu" for p in module.parameters())
    assert found == activation_bytes(module.model, torch.randn(2, 1, 8, 8))


def test_a_plan_is_logged_by_its_modes(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first line listed auto's modes, the second one only invert."""
    with caplog.at_level(logging.INFO, logger="revzoo"):
        train(compose(*SMALL, "memory=auto", "test=false"), run_dir=tmp_path / "run")
    (line,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("memory  ")]
    assert re.match(r"memory   auto \((\d+ \w+(, )?)+\), [\d,]+ KiB", line), line


def test_threads_are_set_until_the_run_ends(compose: Any, tmp_path: Path) -> None:
    seen: list[int] = []
    before = torch.get_num_threads()
    wanted = before + 1
    config = compose(*SMALL, f"threads={wanted}", "test=false", "logger=none")

    def record(*_: Any) -> None:
        seen.append(torch.get_num_threads())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(record)
    try:
        train(config, run_dir=tmp_path / "run")
    finally:
        hook.remove()
    assert seen[-1] == wanted
    assert torch.get_num_threads() == before


def test_paths_are_short_below_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert short_path(tmp_path / "outputs" / "a") == Path("outputs/a")
    assert short_path(Path("/etc")) == Path("/etc")


@pytest.mark.parametrize(
    ("epochs", "steps", "text"),
    [
        (30, 2000, "30 epochs or 2,000 steps"),
        (1, -1, "1 epoch"),
        (-1, 5, "5 steps"),
        (None, -1, "00:01:00:00 of time"),
    ],
)
def test_the_length_of_a_run(epochs: int | None, steps: int, text: str) -> None:
    """With both limits, only the epochs were named; with a time alone, -1 steps."""
    trainer: Any = SimpleNamespace(max_epochs=epochs, max_steps=steps)
    assert _length(trainer, "00:01:00:00") == text
