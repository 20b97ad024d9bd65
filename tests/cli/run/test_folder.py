"""The folder of a run: its name, its record and its lock."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from revzoo.cli.config import compose
from revzoo.cli.main import main
from revzoo.cli.run import train
from revzoo.cli.run.folder import (
    LOCK_FILE,
    check_changes,
    located,
    locked,
    new_folder,
    resumed_config,
    seconds_before,
    write_config,
)
from revzoo.cli.terminal import ConfigError, command_line

HOLDER = """
import os, sys, time
from pathlib import Path
from revzoo.cli.run.folder import locked
with locked(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)  # after the fork has closed the lock's file
    time.sleep(100)
"""


def test_runs_of_the_same_second_have_different_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jobs = []

    def run(config, *, run_dir, **options):
        jobs.append(run_dir.relative_to(tmp_path))
        (run_dir / "config.yaml").touch()
        return {}

    monkeypatch.setattr(train, "train", run)
    monkeypatch.setattr("sys.argv", ["train.py"])
    # the time stands still
    timed = "hydra.run.dir='runs/${now:x}'"
    for _ in range(3):
        composed = compose([timed])
        train.begin(composed.config, composed.whole, overrides=[])
    assert jobs == [Path("runs", name) for name in ("x", "x-2", "x-3")]
    # for the further processes of a distributed run
    assert sys.argv == ["train.py", *(f"hydra.run.dir='{job}'" for job in jobs)]
    # a folder that the user names is not replaced by another
    composed = compose(["hydra.run.dir=runs/x"])
    with pytest.raises(ConfigError, match="already holds a run"):
        train.begin(composed.config, composed.whole, overrides=[])
    assert new_folder(tmp_path / "runs" / "x").name == "x-4"


def test_the_default_name_is_short():
    whole = compose([]).whole
    assert len(str(whole.hydra.run.dir)) == len("outputs/revnet38-digits/2026-01-01_00-00-00")


def test_a_change_of_a_run_is_answered_with_the_command_of_a_new_run(tmp_path):
    """The message named RUN literally, and not the run's own overrides."""
    first = ["model=resnet32", "model.pretrained=true", "trainer.max_epochs=3", "seed=2"]
    sessions = [{"overrides": first}, {"overrides": ["--resume", str(tmp_path)]}]
    (tmp_path / "sessions.jsonl").write_text("".join(f"{json.dumps(s)}\n" for s in sessions))

    def answer():
        with pytest.raises(ConfigError) as refused:
            check_changes(["seed=4"], tmp_path)
        return str(refused.value).partition("(with its --config-dir, if it had one): ")[2]

    words = ["model=resnet32", "model.pretrained=true", "trainer.max_epochs=3", "seed=4"]
    assert answer() == command_line("train", *words)
    last = tmp_path / "checkpoints" / "last.ckpt"
    last.parent.mkdir()
    last.touch()
    words = ["model=resnet32", "trainer.max_epochs=3", "seed=4", f"+model.checkpoint_path={last}"]
    assert answer() == command_line("train", *words)
    (tmp_path / "sessions.jsonl").write_text("damaged")
    assert answer() == command_line("train", *words[2:])


@pytest.mark.parametrize("text", ["", "5", "[]", '{"train_seconds": null}'])
def test_a_wrong_training_time_is_named(text, tmp_path, caplog):
    """They ended in tracebacks."""
    (tmp_path / "summary.json").write_text(text)
    assert seconds_before(tmp_path) == 0
    assert f"{tmp_path}/summary.json" in caplog.text


def test_the_limits_of_a_plan_may_change_and_its_mode_stays(tmp_path):
    """memory.fraction was refused; memory.bytes alone silently changed the mode to auto."""
    config = compose(["memory=budget", "memory.bytes=1GiB", "model=revnet38"]).config
    config["memory"]["plan"] = {"stem": "store"}
    write_config(config, tmp_path)
    changed = resumed_config(tmp_path, ["memory.bytes=2GiB"])["memory"]
    assert changed == {"mode": "budget", "bytes": "2GiB", "inverting": None}
    share = ["memory=auto", "memory.fraction=0.3"]
    assert resumed_config(tmp_path, share)["memory"]["fraction"] == 0.3
    with pytest.raises(ConfigError, match="of the free memory: add memory=auto"):
        resumed_config(tmp_path, ["memory.fraction=0.3"])


def test_the_paths_of_the_data_are_recorded_for_a_resume_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = {"_target_": "revzoo.data.Table", "table": "a.csv", "root": None}
    assert located(table) == table | {"table": str(tmp_path / "a.csv")}
    flowers = {"_target_": "flowers", "table": "a", "root": "b"}  # of a plugin: a name, perhaps
    assert located(flowers) == flowers | {"root": str(tmp_path / "b")}


def test_a_second_program_names_the_holder_until_it_ends(tmp_path):
    """Also if a fork of the holder lives on."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        fork = int(holder.stdout.readline())
        try:
            named = f"in use by process {holder.pid} on "
            with pytest.raises(SystemExit, match=named), locked(tmp_path):
                pass
            holder.kill()  # SIGKILL, as out of memory: no clean-up runs
            holder.wait()
            with locked(tmp_path):
                assert str(holder.pid) not in (tmp_path / LOCK_FILE).read_text()
        finally:
            holder.kill()
            os.kill(fork, signal.SIGKILL)


def test_child_programs_do_not_inherit_the_lock(tmp_path):
    with locked(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    with locked(tmp_path):
        child.kill()
    child.wait()


@pytest.mark.parametrize("variable", ["RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"])
def test_the_processes_of_one_run_share_the_lock(variable, tmp_path, monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)  # another test of the process may leave one
    with locked(tmp_path):
        monkeypatch.setenv(variable, "1")
        with locked(tmp_path):
            pass


def test_a_folder_in_use_stays_unchanged(tmp_path):
    """A second program had overwritten ``.hydra/`` and the log before the lock refused it."""
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    files = {run_dir / ".hydra" / "config.yaml": "first", run_dir / "train.log": "begun"}
    for path, text in files.items():
        path.write_text(text)
    with locked(run_dir):
        for start in ([f"hydra.run.dir={run_dir}"], [f"hydra.run.dir={run_dir}", "data=cifar10"]):
            with pytest.raises(SystemExit, match="is in use by process"):
                main(["train", "trainer=cpu", *start])
    assert {path: path.read_text() for path in files} == files
    assert set(run_dir.rglob("*")) == {*files, run_dir / ".hydra", run_dir / LOCK_FILE}
