"""The README's commands, each in another process, as a user starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from programs import program
from small_run import QUICK, SMALL

from revzoo.cli.main import main
from revzoo.training.checkpoint.files import read_checkpoint

ROOT = Path(__file__).parents[2]


def start(*command, cwd, **environment):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "HYDRA_FULL_ERROR")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**env, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def wait_for(condition, process):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process.is_alive()
        time.sleep(0.05)


def summaries(cwd):
    return [json.loads(path.read_text()) for path in cwd.glob("outputs/**/summary.json")]


def test_train_py_trains_from_any_folder(tmp_path):
    done = start(str(ROOT / "train.py"), *SMALL[:3], cwd=tmp_path)  # memory=auto, too
    assert done.returncode == 0, done.stderr
    (summary,) = summaries(tmp_path)
    assert summary["steps"] == 3
    assert "Warning" not in done.stderr


def test_train_py_refuses_in_one_line_and_leaves_no_files(tmp_path):
    done = start(str(ROOT / "train.py"), "modle=revnet38", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "revzoo: modle=revnet38: there is no option 'modle'; did you mean 'model'?"
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_installed_wheel_trains_outside_the_checkout(wheel_site, tmp_path):
    where = "import revzoo, revzoo.configs as c; print(revzoo.__file__, c.__file__)"
    result = start("-c", where, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert result.stdout.split() == [
        str(wheel_site / "revzoo" / "__init__.py"),
        str(wheel_site / "revzoo" / "configs" / "__init__.py"),
    ]
    module = ("-m", "revzoo", "train")
    done = start(*module, *QUICK, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert done.returncode == 0, done.stderr
    assert len(summaries(tmp_path)) == 1
    # composed from the wheel's own files, before anything slow is imported
    evaluate = ("-m", "revzoo", "eval", "ckpt=nowhere.ckpt", "trainer=cpu")
    result = start(*evaluate, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert "no weights, file or folder 'nowhere.ckpt'" in result.stderr


def test_the_console_script_is_the_same_program(wheel_site, tmp_path):
    (entry,) = wheel_site.glob("revzoo-*.dist-info/entry_points.txt")
    assert entry.read_text().split() == ["[console_scripts]", "revzoo", "=", "revzoo.cli.main:main"]
    script = "import sys; from revzoo.cli.main import main; sys.exit(main())"
    done = start("-c", script, "train", "optim.lrr=1", cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert done.returncode == 1
    assert done.stderr.startswith("revzoo: optim.lrr=1: there is no option 'optim.lrr'")


def test_jobs_of_a_multirun_are_plain_runs_that_fail_alone(tmp_path):
    words = ["train", "-m", "seed=-1,1", *QUICK, "hydra.sweep.dir=jobs"]
    with program(main, words, cwd=tmp_path, output=tmp_path / "output") as process:
        process.join(100)
    assert process.exitcode == 1
    output = (tmp_path / "output").read_text()
    assert "): seed=-1: expected a whole number" in output
    assert "job 0 (seed=-1 " in output
    assert [path.parent.name for path in tmp_path.glob("jobs/*/summary.json")] == ["1"]
    sessions = (tmp_path / "jobs" / "1" / "sessions.jsonl").read_text().splitlines()
    assert json.loads(sessions[0])["overrides"] == ["seed=1", *QUICK]


def test_a_run_in_the_folder_of_another_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("seed: 1\n")
    with pytest.raises(SystemExit, match="already holds a run: resume it with --resume"):
        main(["train", *SMALL, f"hydra.run.dir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "add hydra.run.dir=outputs/NAME"),
        (("-m", "hydra.run.dir=a"), "without torchrun and srun"),
        (("hydra.run.dir=a",), "has started 2 processes, but trainer.devices=1"),
    ],
)
def test_processes_started_together_need_one_run(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    with pytest.raises(SystemExit, match=message):
        main(["train", *arguments, *SMALL])


def search(temporary):
    tempfile.tempdir = str(temporary)
    main(["train", *QUICK[1:], "tuner=lr", "tuner.steps=1000000", "hydra.run.dir=run"])


def test_ctrl_c_ends_a_search_and_leaves_no_files(tmp_path):
    temporary, cwd, output = (tmp_path / name for name in ("temporary", "cwd", "output"))
    temporary.mkdir()
    cwd.mkdir()
    with program(search, temporary, cwd=cwd, output=output) as process:
        wait_for(lambda: "searching for optim.lr" in output.read_text(), process)
        time.sleep(1)  # it trains
        os.kill(process.pid, signal.SIGINT)
        process.join(30)
    result = output.read_text()
    assert process.exitcode == 130, result
    # Python reports, and ignores, an interrupt inside a weak reference's callback
    assert "Traceback" not in result.partition("Exception ignored")[0]
    assert list(cwd.iterdir()) == []
    assert not list(temporary.glob("revzoo-*"))


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_run_and_names_the_next_command(signum, status, tmp_path):
    log, run_dir, output = (tmp_path / name for name in ("run/train.log", "run", "output"))
    words = ["train", *QUICK[1:], "trainer.max_epochs=1000", "hydra.run.dir=run"]
    with program(main, words, cwd=tmp_path, output=output) as process:
        wait_for(lambda: log.exists() and "epoch 1/" in log.read_text(), process)
        os.kill(process.pid, signum)
        process.join(30)
    result = output.read_text()
    assert process.exitcode == status, result
    unfolded = " ".join(result.replace("\\\n", "").split())
    assert re.search(r"to resume: \S*revzoo train --resume", unfolded)
    assert "Traceback" not in result
    assert read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["global_step"] >= 20
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stopped"] == f"stopped by {signal.Signals(signum).name}"
