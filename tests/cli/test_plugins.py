"""A user's module, imported by ``--import``, adds a model and a data set to every command."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from programs import program
from small_run import NO_EXTRAS

from revzoo.cli import plugins
from revzoo.cli.main import main
from revzoo.cli.run import folder
from revzoo.cli.terminal import ConfigError

MODULE = """
import torch
import revzoo
from revzoo.data import Digits
from revzoo.models.revnet import RevNet
from revzoo.models.revnet import Variant

class MyDigits(Digits):
    def __init__(self, level=1, *, colour="grey", **loading):
        super().__init__(**loading)
        assert (level, colour) == (2, "grey")

row = Variant(stem_width=8, widths=(8, 8, 8), units=(1, 1, 1))
revzoo.register_model("mynet", RevNet, row)

class Block(torch.nn.Conv2d):
    def forward(self, x):
        return x + super().forward(x).relu()

def plain(num_classes, in_chans, width=4):
    blocks = torch.nn.Sequential(*(Block(width, width, 3, padding=1) for _ in range(3)))
    first, pool = torch.nn.Conv2d(in_chans, width, 3), torch.nn.AdaptiveAvgPool2d(1)
    classifier = torch.nn.Linear(width, num_classes)
    return torch.nn.Sequential(first, blocks, pool, torch.nn.Flatten(), classifier)

revzoo.register_model("plain", plain)
revzoo.register_data("mydata", MyDigits)
revzoo.register_optimizer("nadam", torch.optim.NAdam)
revzoo.register_callback("grad_norm", lambda *, every: None)
"""
SMALL = ("debug=smoke", "trainer=cpu", *NO_EXTRAS, "hydra.run.dir=run")


def run_all(commands: Sequence[Sequence[str]], site: str) -> None:
    sys.path.insert(0, site)
    outcomes = []
    for arguments in commands:
        output, status = io.StringIO(), None
        with contextlib.redirect_stdout(output):
            try:
                main(list(arguments))
            except SystemExit as end:
                status = end.code
        outcomes.append((status, output.getvalue()))
    Path("outcomes.json").write_text(json.dumps(outcomes))


def start(cwd: Path, *commands: tuple[str, ...], site: str = "") -> list[tuple[Any, str]]:
    """The status (or message, if refused) and output of each command, in one other process."""
    output = cwd / "output"
    with program(run_all, commands, site, cwd=cwd, output=output) as process:
        process.join(100)
    assert process.exitcode == 0, output.read_text()
    assert "Traceback" not in output.read_text()
    return [(status, shown) for status, shown in json.loads((cwd / "outcomes.json").read_text())]


@pytest.mark.timeout(400)
def test_a_users_model_and_data_are_trained_resumed_evaluated(tmp_path: Path) -> None:
    (tmp_path / "mymodels.py").write_text(MODULE)
    given = ("--import", "mymodels")
    chosen = ("model=mynet", "data=mydata", "data.level=2", "memory=exact")
    module = ("model=plain", "model.width=8", "model.reversible_bits=4", "data.batch_size=8")
    (unknown, _), (misspelt, _), (trained, _), (plain, _), (evaluated, shown) = start(
        tmp_path,
        ("train", *chosen),
        ("train", *given, "model=mynett"),
        ("train", *given, *chosen, *SMALL),
        ("train", *given, *module, *SMALL[:-1], "hydra.run.dir=plain"),
        ("eval", *given, "ckpt=plain", "trainer=cpu"),
    )
    assert (plain, evaluated) == (None, None)
    assert "test/loss " in shown
    assert "mynet: no such option" in unknown
    assert "did you mean 'mynet'" in misspelt
    assert trained is None
    (session,) = map(json.loads, (tmp_path / "run" / "sessions.jsonl").read_text().splitlines())
    assert session["imports"] == ["mymodels"]
    resume = ("train", "--resume", "run")
    evaluate = ("eval", "ckpt=run/checkpoints/best.ckpt", "trainer=cpu")
    outcomes = start(tmp_path, resume, evaluate, (*resume, *given), (*evaluate, *given))
    for message, _ in outcomes[:2]:
        assert "add --import mymodels, if you trust these modules" in message
    assert [status for status, _ in outcomes[2:]] == [None, None]
    assert "test/loss " in outcomes[3][1]


def test_registered_optimisers_and_callbacks_are_found_by_name(tmp_path: Path) -> None:
    """Neither name was known; adamw and batch_norm were suggested."""
    (tmp_path / "mymodels.py").write_text(MODULE)
    given = ("train", "--import", "mymodels")
    (status, shown), (misspelt, _), (added, wanted) = start(
        tmp_path,
        (*given, "optim=nadam", "optim.lr=0.01", "--cfg", "job", "-p", "optim"),
        (*given, "callbacks.grad_norm={evry: 2}"),
        (*given, "callbacks.grad_norm={every: 2}", "--cfg", "job"),
    )
    assert (status, added) == (None, None)
    assert "name: nadam" in shown
    assert "lr: 0.01" in shown
    assert "grad_norm:\n    every: 2\n" in wanted
    assert "did you mean 'callbacks.grad_norm.every'" in " ".join(misspelt.split())


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "broken_module.py").write_text("import nothing_of_this_name")
    with pytest.raises(ConfigError, match="--import broken_module failed: ModuleNotFoundError"):
        plugins.load_plugins(["broken_module"], [])
    with pytest.raises(ConfigError, match="--import not_there failed"):
        plugins.load_plugins(["not_there"], [])
    for given, meant in (("not_there.py", "not_there"), ("./a/not_there.py", "a.not_there")):
        with pytest.raises(ConfigError, match=rf"did you mean --import {meant}\?"):
            plugins.load_plugins([given], [])


def test_entry_points_of_installed_packages_are_loaded(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "mypackage-1.dist-info").mkdir(parents=True)
    (site / "mypackage-1.dist-info" / "METADATA").write_text("Name: mypackage\nVersion: 1\n")
    points = "[revzoo.plugins]\nmine = mypackage\n"
    (site / "mypackage-1.dist-info" / "entry_points.txt").write_text(points)
    (site / "mypackage.py").write_text(MODULE)
    (listed, _), (_, shown) = start(
        tmp_path,
        ("list", "mynet"),
        ("train", "model=mynet", "--cfg", "job", "-p", "model"),
        site=str(site),
    )
    assert "no model matches 'mynet'" in listed, "lists of names import nothing"
    assert "name: mynet" in shown


@pytest.mark.parametrize(
    "line", ['{"imports": 5}', '{"imports": [5]}', "5", "", '{"imports": "os"}']
)
def test_a_damaged_record_is_named(
    line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Deep lists and numbers ended in tracebacks."""
    (tmp_path / "sessions.jsonl").write_text(f"{line}\n")
    folder.check_imports(tmp_path)
    assert f"{tmp_path}/sessions.jsonl is damaged" in caplog.text


def test_a_recommended_command_is_quoted(tmp_path: Path) -> None:
    """A record held text for the shell: the command that the message recommends would run it."""
    session = {"imports": ["a; touch trap"], "overrides": []}
    (tmp_path / "sessions.jsonl").write_text(json.dumps(session))
    with pytest.raises(ConfigError, match="add --import 'a; touch trap', if you trust"):
        folder.check_imports(tmp_path)
