"""Data in shards: an epoch with two kills, by two processes and by one, shows each image once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from resumed import resume
from several_processes import free_ports
from torch.multiprocessing import ProcessExitedException
from two_processes import start

from revzoo.cli.config import compose
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.data.folders import scan
from revzoo.data.pack import pack
from revzoo.training.callbacks.checkpoints import LastCheckpoint
from revzoo.training.resume import GracefulStop

STEPS, IMAGES = 12, 100  # an epoch of 12 steps of 8 images leaves out 4
SAVED = (3, 7)
pytestmark = pytest.mark.timeout(300)
pytest.importorskip("webdataset")


class Recorder(GracefulStop):
    """Records the images of each step and the weights after step 7; is killed in a step."""

    session, killed_in = "", -1

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        super().on_train_batch_start(trainer, pl_module, *args)
        if trainer.global_step == self.killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        images = trainer.datamodule.shown(args[0][0])  # type: ignore[attr-defined]
        numbers = (images[:, 0, 4, 4] * 255).round().int().tolist()
        with Path(f"{self.session}.{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.global_step} {' '.join(map(str, numbers))}\n")
        if trainer.global_step == SAVED[-1]:
            torch.save(pl_module.model.state_dict(), f"{self.session}.weights")


def run(folder: Path, session: str, killed_in: int, *, again: bool, changes: Any = ()) -> None:
    Recorder.session, Recorder.killed_in = str(folder / session), killed_in
    train_module.GracefulStop = Recorder  # type: ignore[misc, attr-defined]
    LastCheckpoint._is_due = lambda self, trainer: trainer.global_step in SAVED  # type: ignore[method-assign]
    if again:
        resume(folder / "killed", changes)
        return
    config = compose(
        [
            *(
                "data=webdataset",
                f"data.root={folder / 'shards'}",
                "data.image_size=8",
                "data.cache_bytes=0",
            ),
            *("data.batch_size=4", "data.num_workers=0", "data.window=2", "precision=fp64"),
            *("data.augment.crop_padding=0", "+model.units=[1,1,1]", "model.norm=group"),
            *("trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "test=false"),
            *("trainer.max_epochs=2", "logger=csv", "callbacks.samples=null"),
            *("callbacks.confusion=null", "callbacks.reconstructions=null"),
        ]
    ).config
    train(config, run_dir=folder / ("killed" if killed_in > 0 else "whole"))


def worker(rank: int, ports: list[int], folder: Path, scenes: list[Any]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    for port, (session, killed_in, again) in zip(ports, scenes, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        run(folder, session, killed_in, again=again)
    os._exit(0)


def recorded(folder: Path, session: str) -> dict[int, list[int]]:
    """The numbers of the images by step."""
    steps: dict[int, list[int]] = {}
    for path in sorted(folder.glob(f"{session}.[01]")):
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            steps.setdefault(step, []).extend(numbers)
    return steps


def test_each_image_is_seen_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for split, count in (("train", IMAGES), ("val", 8)):
        for number in range(count):
            path = tmp_path / "images" / split / "ab"[number % 2] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (number, 0, 0)).save(path)
    pack(scan(tmp_path / "images"), tmp_path / "shards", form="webdataset", shard_bytes=9000)
    for scenes in ([("whole", -1, False), ("first", 5, False)], [("second", 9, True)]):
        with pytest.raises(ProcessExitedException, match="SIGKILL"):
            start(worker, free_ports(len(scenes)), tmp_path, scenes)
    for name in (train_module, "GracefulStop"), (LastCheckpoint, "_is_due"):
        monkeypatch.setattr(*name, getattr(*name))  # restored after the test
    run(tmp_path, "third", -1, again=True, changes=["trainer.devices=1", "data.batch_size=8"])

    whole = recorded(tmp_path, "whole")
    sessions = {name: recorded(tmp_path, name) for name in ("first", "second", "third")}
    assert [[min(s), max(s)] for s in sessions.values()] == [[0, 4], [3, 8], [7, 2 * STEPS - 1]]
    seen = {k: v for steps in sessions.values() for k, v in steps.items()}
    for epoch in (0, 1):
        images = [n for step in range(epoch * STEPS, (epoch + 1) * STEPS) for n in seen[step]]
        assert len(images) == len({*images}) == 8 * STEPS
    assert {k: sorted(v) for k, v in seen.items()} == {k: sorted(v) for k, v in whole.items()}
    # with as many processes, bit for bit
    weights = [torch.load(tmp_path / f"{name}.weights") for name in ("whole", "second")]
    assert all(torch.equal(value, weights[1][key]) for key, value in weights[0].items())
