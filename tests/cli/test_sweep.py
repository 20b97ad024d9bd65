import csv
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from programs import program

from revzoo.cli import sweep
from revzoo.cli.config import quoted_if_needed
from revzoo.cli.main import main
from revzoo.cli.run import multirun as jobs
from revzoo.cli.run.folder import locked
from revzoo.cli.terminal import command_line

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
SPACE = ("trainer=cpu", "optim.lr=tag(log,interval(0.01,1))")
pytest.importorskip("optuna")


def no_runs():
    script = Path(__file__).parent / "run_of_no_time.py"
    sweep.train_words = lambda: [sys.executable, str(script)]


@pytest.fixture(autouse=True)
def no_training(monkeypatch):
    monkeypatch.setattr(sweep, "train_words", sweep.train_words)  # restored after the test
    no_runs()


def search(folder, *arguments):
    """Run a sweep and return the table of its trials."""
    main(["sweep", f"dir={folder}", *arguments])
    return table(folder)


def table(folder):
    with (folder / "trials.csv").open() as file:
        return list(csv.DictReader(file))


def refused(folder, *arguments):
    with pytest.raises(SystemExit) as end:
        search(folder, *arguments)
    return str(end.value)


def figures(rows):
    return [tuple(row[k] for k in ("trial", "state", "val/acc", "optim.lr")) for row in rows]


def test_the_best_trial_is_logged_and_recorded(tmp_path, caplog):
    with caplog.at_level("INFO"):
        rows = search(tmp_path, *SPACE, "trials=4", "seed=3")
    assert [row["state"] for row in rows] == ["complete"] * 4
    best = max(rows, key=lambda row: float(row["val/acc"]))
    kept = yaml.safe_load((tmp_path / "best.yaml").read_text())
    assert kept["trial"] == int(best["trial"])
    assert kept["parameters"] == {"optim.lr": float(best["optim.lr"])}
    command = command_line("train", "trainer=cpu", "seed=3", f"optim.lr={best['optim.lr']}")
    assert kept["command"] == command
    assert caplog.messages[:2] == [
        f"{tmp_path}: 4 trials, to maximize val/acc",
        f"trial 0 starts; its log: {tmp_path / '0000.log'}",
    ]
    assert caplog.messages[-2].endswith(f", in {tmp_path / best['trial'].zfill(4)}")
    assert caplog.messages[-1] == command
    assert "seed=3" in (tmp_path / "0000" / "config.yaml").read_text().splitlines()


def test_a_folder_of_configurations_is_recorded(tmp_path):
    """A user's own experiment could not be searched."""
    configs, folder = tmp_path / "configs", tmp_path / "sweep"
    (configs / "experiment").mkdir(parents=True)
    (configs / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    search(folder, *SPACE, "trials=1", "experiment=mine", "--config-dir", str(configs))
    words = (folder / "0000" / "config.yaml").read_text().splitlines()
    assert words[:2] == ["--config-dir", str(configs)]
    assert len(search(folder, "trials=2")) == 2
    command = yaml.safe_load((folder / "best.yaml").read_text())["command"]
    assert f"--config-dir {configs}" in command
    assert "only trials may change" in refused(folder, "--config-dir", str(tmp_path))


def test_a_stopped_sweep_continues_with_the_same_trials(tmp_path):
    whole = search(tmp_path / "whole", *SPACE, "trials=13")
    search(tmp_path / "parts", *SPACE, "trials=3")
    search(tmp_path / "parts", "trials=12")
    assert figures(search(tmp_path / "parts", "trials=13")) == figures(whole)
    assert len({row["optim.lr"] for row in whole}) == 13
    assert search(tmp_path / "parts") == table(tmp_path / "parts")  # all trials are done


@pytest.mark.parametrize("name", ["out/a=1 b", "x,y", "run(1)", "it's", "2026", "plain/é"])
def test_the_printed_folder_of_a_sweep_is_read_again(name, tmp_path, monkeypatch, caplog):
    """Hydra reads many signs of a path in its own way."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep.Search, "next_trial", Mock(side_effect=KeyboardInterrupt))
    with caplog.at_level("INFO"), pytest.raises(SystemExit):
        main(["sweep", f"dir={quoted_if_needed(name)}", *SPACE])
    assert (tmp_path / name / sweep.STUDY).exists()
    printed = shlex.split(caplog.messages[-1].partition("to resume: ")[2])
    with pytest.raises(SystemExit):
        main(printed[printed.index("sweep") :])
    assert [path.name for path in tmp_path.iterdir()] == [Path(name).parts[0]]


def test_ctrl_c_between_two_trials_names_the_command_to_continue(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(sweep.Search, "next_trial", Mock(side_effect=KeyboardInterrupt))
    with caplog.at_level("INFO"), pytest.raises(SystemExit) as ended:
        search(tmp_path, *SPACE)
    assert ended.value.code == 130
    assert (
        f"stopped by SIGINT; to resume: {command_line('sweep', f'dir={tmp_path}')}" in caplog.text
    )


def test_another_search_in_the_folder_is_refused(tmp_path):
    search(tmp_path, *SPACE, "trials=1")
    assert "only trials may change" in refused(tmp_path, "seed=1,2")
    assert "only trials may change" in refused(tmp_path, "sampler_seed=4")
    with locked(tmp_path):
        assert f"in use by process {os.getpid()}" in refused(tmp_path)


def test_the_folder_of_a_run_is_refused(tmp_path):
    """The sweep put its trials beside the checkpoints."""
    (tmp_path / "config.yaml").touch()
    assert "holds a run: choose another folder" in refused(tmp_path, *SPACE, "trials=1")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("damage", [b"no database", b"SQLite format 3\0" + bytes(5000), None])
def test_a_damaged_study_is_one_line(damage, tmp_path):
    """A traceback of SQLAlchemy; the file stays as it is."""
    file = tmp_path / sweep.STUDY
    if damage is None:
        file.mkdir()
    else:
        file.write_bytes(damage)
    message = refused(tmp_path, *SPACE, "trials=1")
    assert "study.db is not readable as a study of optuna" in message
    assert "\n" not in message
    assert damage is None or file.read_bytes() == damage


def test_failed_trials_are_recorded_and_the_search_continues(tmp_path):
    (tmp_path / "plot").write_text("fail")
    rows = search(tmp_path, *SPACE, "trials=8")
    states = {row["state"] for row in rows}
    assert states == {"complete", "fail"}
    for row in rows:
        failed = float(row["optim.lr"]) > 0.3
        assert row["error"] == ("status 1: revzoo: lower optim.lr" if failed else "")
        assert (row["state"] == "fail") == failed


def test_it_gives_up_if_the_first_trials_all_fail(tmp_path):
    (tmp_path / "plot").write_text("fail_all")
    assert "first 3 trials have failed" in refused(tmp_path, *SPACE, "trials=8")
    assert len(table(tmp_path)) == 3
    (tmp_path / "plot").unlink()
    rows = search(tmp_path, "trials=8")  # the fault is repaired
    assert [row["state"] for row in rows] == ["fail"] * 3 + ["complete"] * 5


@pytest.mark.parametrize(
    ("metric", "meant"),
    [("acc", "; did you mean 'val/acc'?"), ("f", ", expected one of val/loss, val/acc")],
)
def test_a_missing_figure_ends_the_sweep(metric, meant, tmp_path):
    """Every trial trained to its end, only to fail for the same reason."""
    message = f"metric={metric}: a run has no such figure{meant}"
    assert refused(tmp_path, *SPACE, f"metric={metric}", "trials=4") == f"revzoo: {message}"
    (row,) = table(tmp_path)
    assert (row["state"], row["error"]) == ("fail", message)


def test_a_figure_that_is_not_finite_fails(tmp_path, caplog):
    with caplog.at_level("INFO"):
        search(tmp_path, *SPACE, "metric=val/loss", "trials=1")
    assert table(tmp_path)[0]["error"] == "val/loss is nan"
    assert f"{tmp_path}: 1 trial, to minimize val/loss" in caplog.messages


def test_bad_trials_are_pruned(tmp_path, monkeypatch):
    monkeypatch.setattr(
        jobs.run_program, "__kwdefaults__", {**jobs.run_program.__kwdefaults__, "poll": 0.05}
    )
    search(tmp_path, *SPACE, "trials=5", "prune=true")
    (tmp_path / "plot").write_text("slow")
    start = time.monotonic()
    rows = search(tmp_path, "trials=9")
    assert time.monotonic() - start < 50
    pruned = [row for row in rows if row["state"] == "pruned"]
    assert pruned
    assert all(row["val/acc"] == "" for row in pruned)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trainer=cpu",), "the sweep has no range"),
        ((*SPACE, "optim.lrr=1"), r"did you mean 'optim.lr'"),
        ((*SPACE, "trials=0"), "trials=0: expected a whole number >= 1"),
        ((*SPACE, "trials=many"), "trials='many'"),
        ((*SPACE, "direction=up"), "direction=up: expected one of maximize, minimize"),
        ((*SPACE, "prune=1"), "prune=1: expected true or false"),
        ((*SPACE, "metric=test/acc"), "val/acc"),
    ],
)
def test_wrong_plans_are_refused_and_leave_no_files(arguments, message, tmp_path):
    assert message in refused(tmp_path / "new", *arguments)
    assert not (tmp_path / "new").exists()


def test_one_process_searches(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert "without torchrun and srun" in refused(tmp_path / "new", *SPACE)


def test_without_optuna_the_message_names_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert "pip install optuna" in refused(tmp_path, *SPACE)


def sweep_program(words):
    no_runs()
    main(["sweep", *words])


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_trial_is_resumed(signum, tmp_path):
    (tmp_path / "plot").write_text("wait")
    words, output = (f"dir={tmp_path}", *SPACE, "trials=2"), tmp_path / "output"
    with program(sweep_program, words, cwd=ROOT, output=output) as process:
        deadline = time.monotonic() + 80
        while not (tmp_path / "waiting").exists():
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.05)
        os.kill(process.pid, signum)
        process.join(30)
    if signum == signal.SIGTERM:
        assert process.exitcode == 143
        assert f"revzoo sweep dir={tmp_path}" in output.read_text()
    rows = search(tmp_path)
    assert [row["state"] for row in rows] == ["complete", "complete"]
    starts = [line.split()[:2] for line in (tmp_path / "starts").read_text().splitlines()]
    assert starts == [["0000", "trainer=cpu"], ["0000", "--resume"], ["0001", "trainer=cpu"]]
