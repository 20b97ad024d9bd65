"""A user's module, imported by ``--import``, adds a model and a data set to every command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from revzoo.cli import plugins
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
SMALL = ("debug=smoke", "trainer=cpu", "logger=none", "hydra.run.dir=run")


COMMANDS = """
import contextlib, io, json, sys
from revzoo.cli.main import main
outcomes = []
for arguments in json.loads(sys.argv[1]):
    output, status = io.StringIO(), None
    with contextlib.redirect_stdout(output):
        try:
            main(arguments)
        except SystemExit as end:
            status = end.code
    outcomes.append((status, output.getvalue()))
print(json.dumps(outcomes))
"""


def start(cwd: Path, *commands: tuple[str, ...]) -> list[tuple[Any, str]]:
    """The status (or message, if refused) and output of each command, in one process."""
    process = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(process, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [(status, output) for status, output in json.loads(done.stdout)]


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
    script = (
        f"import sys; sys.path.insert(0, {str(site)!r}); from revzoo.cli.main import main; "
        "main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", script]
    cfg = subprocess.run(
        [*command, "train", "model=mynet", "--cfg", "job", "-p", "model"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "name: mynet" in cfg.stdout, cfg.stderr
    listed = subprocess.run(
        [*command, "list", "mynet"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert listed.returncode == 1, "lists of names import nothing"


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
