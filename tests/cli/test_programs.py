"""The commands of the README as a user starts them, in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from revzoo.training.checkpoints import read_checkpoint

ROOT = Path(__file__).parents[2]
SMALL = ("debug=smoke", "trainer=cpu", "+model.units=[1,1,1]")


def start(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
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


def summaries(cwd: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in cwd.glob("outputs/**/summary.json")]


def test_train_py_trains_from_any_folder(tmp_path: Path) -> None:
    done = start(str(ROOT / "train.py"), *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (summary,) = summaries(tmp_path)
    assert summary["steps"] == 3
    assert "Warning" not in done.stderr


def test_train_py_refuses_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    done = start(str(ROOT / "train.py"), "modle=revnet38", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "revzoo: modle=revnet38: there is no key 'modle'; did you mean 'model'?"
    ]
    assert list(tmp_path.iterdir()) == []


def test_an_installed_wheel_trains_outside_the_checkout(wheel_site: Path, tmp_path: Path) -> None:
    where = "import revzoo, revzoo.configs as c; print(revzoo.__file__, c.__file__)"
    told = start("-c", where, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert told.stdout.split() == [
        str(wheel_site / "revzoo" / "__init__.py"),
        str(wheel_site / "revzoo" / "configs" / "__init__.py"),
    ]
    module = ("-m", "revzoo.cli.train")
    done = start(*module, *SMALL, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert done.returncode == 0, done.stderr
    assert len(summaries(tmp_path)) == 1
    (checkpoint,) = tmp_path.glob("outputs/**/best.ckpt")
    evaluate = ("-m", "revzoo.cli.evaluate", f"ckpt={checkpoint}", "trainer=cpu")
    told = start(*evaluate, cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert told.stdout.startswith("test/loss "), told.stderr


def test_the_console_script_is_the_same_program(wheel_site: Path, tmp_path: Path) -> None:
    (entry,) = wheel_site.glob("revzoo-*.dist-info/entry_points.txt")
    for name, module in (("train", "train"), ("eval", "evaluate"), ("predict", "predict")):
        assert f"revzoo-{name} = revzoo.cli.{module}:main" in entry.read_text()
    script = "import sys; from revzoo.cli.train import main; sys.exit(main())"
    done = start("-c", script, "optim.lrr=1", cwd=tmp_path, PYTHONPATH=str(wheel_site))
    assert done.returncode == 1
    assert done.stderr.startswith("revzoo: optim.lrr=1: there is no key 'optim.lrr'")


@pytest.mark.slow
def test_data_parallel_processes_train_together(tmp_path: Path) -> None:
    options = ("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", SMALL[2])
    done = start(str(ROOT / "train.py"), "debug=smoke", *options, cwd=tmp_path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    (summary,) = summaries(tmp_path)
    assert summary["steps"] == 3


@pytest.mark.slow
def test_a_sweep_runs_each_choice(tmp_path: Path) -> None:
    done = start(str(ROOT / "train.py"), "-m", "seed=0,1", *SMALL, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(summaries(tmp_path)) == 2


def test_a_run_refused_for_its_data_leaves_nothing(tmp_path: Path) -> None:
    options = ("data=imagefolder", "data.root=nowhere", "trainer=cpu")
    done = start(str(ROOT / "train.py"), *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "nowhere does not exist" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("signum", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_the_run_and_tells(signum: int, status: int, tmp_path: Path) -> None:
    log, run_dir = tmp_path / "run" / "train.log", tmp_path / "run"
    options = ("trainer=cpu", SMALL[2], "trainer.max_epochs=1000", "hydra.run.dir=run")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        deadline = time.monotonic() + 60
        while "epoch 0" not in (log.read_text() if log.exists() else ""):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signum)
        told, _ = process.communicate(timeout=30)
    assert process.returncode == status, told
    assert "go on with: revzoo-train --resume" in told
    assert "Traceback" not in told
    assert read_checkpoint(run_dir / "checkpoints" / "last.ckpt")["global_step"] >= 20
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stopped"] == f"stopped by {signal.Signals(signum).name}"
