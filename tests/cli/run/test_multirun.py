import json

import pytest

from revzoo.cli import terminal
from revzoo.cli.config import ConfigFiles
from revzoo.cli.run import multirun
from revzoo.cli.terminal import ConfigError


def test_jobs_use_the_configuration_of_the_command_line(tmp_path, monkeypatch):
    (tmp_path / "own.yaml").write_text("defaults: [train, _self_]\n")
    started = []
    monkeypatch.setattr(multirun, "run_program", lambda command: started.append(command) or 0)
    monkeypatch.setattr(terminal, "imported", ["mine"])
    given = [
        "seed=1,2",
        "hydra.sweep.subdir=${hydra.job.num}",
        f"hydra.sweep.dir={tmp_path / 'jobs'}",
    ]
    multirun.multirun(given, ConfigFiles("own", extra=tmp_path))
    assert [command[-4:-3] for command in started] == [["seed=1"], ["seed=2"]]
    for number, command in enumerate(started):
        named = ["--import", "mine", "--config-name", "own", "--config-dir", str(tmp_path)]
        assert command[-4 - len(named) : -4] == named
        assert command[-3:-1] == given[1:]
        assert command[-1] == f"hydra.run.dir='{tmp_path / 'jobs' / str(number)}'"
    assert not (tmp_path / "jobs").exists(), "each job locks its folder before it writes there"


def test_an_interval_makes_no_jobs():
    with pytest.raises(ConfigError, match="revzoo sweep searches intervals"):
        multirun.multirun(["optim.lr=interval(0, 1)"])


def test_what_all_jobs_refuse_is_refused_once(monkeypatch):
    """Each job reported it after 30 seconds of imports."""
    monkeypatch.setattr(multirun, "run_program", pytest.fail)
    with pytest.raises(ConfigError, match=r"^optim.name=sdg: expected one of .*did you mean 'sgd'"):
        multirun.multirun(["seed=0,1", "optim.name=sdg"])


def test_a_refused_job_is_named_before_the_others_train(monkeypatch, tmp_path, caplog):
    """Its message came only after the other jobs had trained."""
    started = []
    warned = []

    def run_program(command):
        started.append(command)
        warned.extend(r.message for r in caplog.records if r.levelname == "WARNING")
        return 0

    monkeypatch.setattr(multirun, "run_program", run_program)
    with (
        caplog.at_level("INFO"),
        pytest.raises(SystemExit, match=r"^revzoo: job 1 \(optim.lr=abc\): .* expected a number"),
    ):
        multirun.multirun(["optim.lr=0.1,abc", f"hydra.sweep.dir={tmp_path}"])
    assert [command[-3] for command in started] == ["optim.lr=0.1"]
    (warning,) = warned
    assert warning.startswith("cannot run job 1 (optim.lr=abc): optim.lr=abc: expected a number")
    assert "Launching 1 job, one after the other" in caplog.messages


@pytest.mark.parametrize(("option", "said"), [("seed=0,1", True), ("optim.lr=0.1,0.2", False)])
def test_repeats_end_with_mean_and_spread(option, said, monkeypatch, tmp_path, caplog):
    def run_program(command):
        folder = tmp_path / command[-1].rstrip("'")[-1]
        folder.mkdir()
        figures = {"best": {"val/acc": 0.5 + 0.1 * int(folder.name)}, "metrics": {"test/acc": 0.4}}
        (folder / "summary.json").write_text(json.dumps(figures))
        return 0

    monkeypatch.setattr(multirun, "run_program", run_program)
    with caplog.at_level("INFO"):
        multirun.multirun([option, f"hydra.sweep.dir={tmp_path}"])
    assert ("0.5500 +- 0.0707  (0.5000 to 0.6000)" in caplog.messages[-1]) == said
    assert ("test/acc             0.4000 +- 0.0000" in caplog.messages[-1]) == said
