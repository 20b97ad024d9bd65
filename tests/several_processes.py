"""Short runs in several processes, and what they leave."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo.cli.config import compose
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.training.resume import GracefulStop
from revzoo.weights.source import LAST

TIMES = ("footprint/epoch_seconds", "footprint/images_per_second", "footprint/peak_bytes")
COMMON = (
    "debug=smoke",
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=4",
    "trainer.limit_test_batches=null",
    "trainer.limit_val_batches=null",
    "+model.units=[1,1,1]",
    "+model.stem_width=8",
    "+model.widths=[8,8,8]",
    "model.norm=group",
    "precision=fp64",
    "data.augment.crop_padding=0",
    "data.eval_batch_size=64",
    "logger=csv",
)


class SignalledInStep5(GracefulStop):
    """Sends SIGTERM to the second process only."""

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def config(*overrides: str) -> dict[str, Any]:
    return compose(overrides).config


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = read_checkpoint(run_dir / "checkpoints" / LAST)["state_dict"]
    return found


def figures(run_dir: Path) -> dict[str, float]:
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["stopped"] is None
    return {name: v for name, v in summary["metrics"].items() if name not in TIMES}
