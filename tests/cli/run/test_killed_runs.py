"""Runs that SIGKILL ends within an epoch resume bit for bit: they lose only that epoch's steps."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from resumed import resume
from small_images import image_folder
from small_run import NO_EXTRAS

from revzoo.cli.run.train import train
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.weights.source import LAST

# trains each case in a fork, which ends itself in its second epoch
KILLED = """
import json, os, signal, sys
from pathlib import Path
from revzoo.cli.config import compose
from revzoo.cli.run import train as module

class Killed(module.GracefulStop):
    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGKILL)

module.GracefulStop = Killed
for name, overrides in json.loads(sys.argv[1]).items():
    if not os.fork():
        module.train(compose(overrides).config, run_dir=Path(name), overrides=overrides)
        os._exit(0)
    assert os.wait()[1] == signal.SIGKILL, name
"""


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
    command = [sys.executable, "-c", KILLED, json.dumps(overrides)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
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
