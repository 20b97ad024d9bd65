"""The parts of a run that are built from its configuration."""

from datetime import timedelta

import pytest

from revzoo.cli.config import compose
from revzoo.cli.run.build import build_trainer, check_launcher, make_trainer, run_description
from revzoo.cli.terminal import ConfigError


def test_tables_that_compare_runs_have_columns_of_numbers():
    """Rate, weight decay and optimiser were one text, which no table sorts."""
    config = compose(["optim=adamw", "optim.lr=0.002", "trainer.max_epochs=7"]).config
    described = run_description(config)
    numbers = {"batch": 64, "epochs": 7, "lr": 0.002, "seed": 0, "weight_decay": 0.05}
    assert {key: described[key] for key in numbers} == numbers
    assert described["optimizer"] == "adamw"


def test_a_timeout_limits_the_waits_of_the_process_group(tmp_path):
    devices = ["trainer.accelerator=cpu", "trainer.devices=2"]
    config = compose(["trainer=ddp", *devices, "trainer.timeout=60"]).config
    strategy = build_trainer(config, run_dir=tmp_path).strategy
    assert strategy._timeout == timedelta(seconds=60)


def test_an_evaluation_takes_the_trainers_of_several_processes() -> None:
    """``timeout`` ended it with a TypeError, and ``fsdp2`` had no strategy."""
    config = compose(["trainer=fsdp2", "trainer.accelerator=cpu", "trainer.devices=2"]).config
    assert type(make_trainer(**config["trainer"]).strategy).__name__ == "FSDP2"


@pytest.mark.parametrize(
    ("started", "overrides", "message"),
    [
        (
            "2",
            [],
            r"2 processes, but trainer.devices=1 \* trainer.num_nodes=1 is 1: add trainer=ddp",
        ),
        ("2", ["trainer=ddp", "trainer.devices=3"], r"has started 2 processes, but .* is 3: add"),
        ("2", ["trainer=ddp", "trainer.devices=2"], None),
        (
            "1",
            ["trainer=ddp", "trainer.num_nodes=2"],
            "start the run on each machine with torchrun",
        ),
    ],
)
def test_the_launcher_starts_the_processes_of_the_trainer(
    started, overrides, message, tmp_path, monkeypatch
):
    """Without trainer=ddp, the processes of torchrun trained the same run twice, in one folder."""
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", started)
    config = compose(["trainer.accelerator=cpu", *overrides]).config
    trainer = build_trainer(config, run_dir=tmp_path)
    if message is None:
        check_launcher(trainer)
        return
    with pytest.raises(ConfigError, match=message):
        check_launcher(trainer)
