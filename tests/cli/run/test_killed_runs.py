"""Runs that SIGKILL ends within an epoch resume bit for bit: they lose only that epoch's steps."""

import csv
import multiprocessing
import os
import signal

import pytest
import torch
from resumed import resume
from small_images import image_folder
from small_run import NO_EXTRAS

from revzoo.cli.config import compose as compose_config
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.training.resume import GracefulStop
from revzoo.weights.source import LAST


class Killed(GracefulStop):
    """Ends its process in the second epoch."""

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)


def train_until_killed(overrides, run_dir):
    train_module.GracefulStop = Killed
    train(compose_config(overrides).config, run_dir=run_dir, overrides=overrides)


def cases(folder):
    """The overrides of each run; its files are in ``folder``."""
    root = image_folder(folder / "images")
    with (folder / "labels.csv").open("w", newline="") as file:
        rows = [
            (f"images/{split}/{name}/{i}.png", name, f"{split} {i // 4}")
            for split in ("train", "test")
            for name in ("dark", "light")
            for i in range(20)
        ]
        csv.writer(file).writerows([("path", "label", "patient"), *rows])
    short = ["debug=smoke", "trainer=cpu", "trainer.max_epochs=2", "trainer.limit_train_batches=4"]
    short += ["memory=store", *NO_EXTRAS, "data.batch_size=8"]
    small = [*short, "+model.units=[1,1,1]"]
    return {
        "segmentation": [
            *("experiment=segmentation", "model.channels=[8,16]", "model.units=[1,1]", *short)
        ],
        "folds": [
            *("data=table", f"data.table={folder / 'labels.csv'}", "data.group_column=patient"),
            *("data.folds=2", "data.fold=1", *small),
        ],
        "randaugment": [
            *("data=imagefolder", f"data.root={root}", "data.augment.policy=randaugment", *small)
        ],
    }


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    overrides = cases(folder)
    for name, words in overrides.items():
        options = {"target": train_until_killed, "args": (words, folder / name)}
        process = multiprocessing.get_context("forkserver").Process(**options)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, name
    return folder, overrides


@pytest.mark.parametrize("name", ["segmentation", "folds", "randaugment"])
def test_a_killed_run_resumes_bit_for_bit(name, killed, compose, tmp_path):
    folder, overrides = killed
    assert read_checkpoint(folder / name / "checkpoints" / LAST)["global_step"] == 4
    resume(folder / name)
    train(compose(*overrides[name]), run_dir=tmp_path)
    states = [
        read_checkpoint(run / "checkpoints" / LAST)["state_dict"]
        for run in (folder / name, tmp_path)
    ]
    assert states[0].keys() == states[1].keys()
    assert all(map(torch.equal, states[0].values(), states[1].values()))
