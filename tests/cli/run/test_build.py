"""The parts of a run that are built from its configuration."""

from datetime import timedelta

from revzoo.cli.config import compose
from revzoo.cli.run.build import build_trainer, make_trainer, run_description


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
