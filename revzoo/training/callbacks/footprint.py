"""Peak memory and throughput of each training epoch.

Peak memory is the accelerator's (``torch.cuda.max_memory_allocated``, over the epoch) or, on the
CPU, the process's high-water mark ``VmHWM`` of ``/proc/self/status`` (over the whole process):
``getrusage`` is no substitute, as a child's ``ru_maxrss`` starts at its parent's. Where neither
exists, no memory is logged.

The clock runs during training steps and stops during validation.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

STATUS = Path("/proc/self/status")


def peak_host_bytes(status: Path = STATUS) -> int | None:
    """The process's highest resident set in bytes, or None where the system does not say."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024  # the kernel prints KiB
    return None


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory in bytes: of the GPU on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_bytes()


class Footprint(pl.Callback):
    """Log ``footprint/peak_bytes``, ``footprint/images_per_second``, ``footprint/epoch_seconds``.

    Under data parallelism the images of all processes count, and the memory of the first process.
    In an epoch that is resumed, the figures are of the part after the resume.
    """

    def __init__(self) -> None:
        self.images = 0
        self.seconds = 0.0
        self._since: float | None = None

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.images = 0
        self.seconds = 0.0
        if pl_module.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(pl_module.device)
        self._resume(pl_module)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._since is None:  # an epoch resumed in its middle has no start
            self._resume(pl_module)

    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        self.images += len(batch[0]) * trainer.world_size

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._resume(pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pause(pl_module)
        figures = {"footprint/epoch_seconds": self.seconds}
        if self.seconds > 0:
            figures["footprint/images_per_second"] = self.images / self.seconds
        peak = peak_bytes(pl_module.device)
        if peak is not None:
            figures["footprint/peak_bytes"] = float(peak)
        for name, value in figures.items():
            # float32, Lightning's default, holds whole bytes only up to 16 MiB
            pl_module.log(name, torch.tensor(value, dtype=torch.float64), rank_zero_only=True)

    def _resume(self, pl_module: pl.LightningModule) -> None:
        self._since = _now(pl_module.device)

    def _pause(self, pl_module: pl.LightningModule) -> None:
        if self._since is not None:
            self.seconds += _now(pl_module.device) - self._since
            self._since = None


def _now(device: torch.device) -> float:
    """Seconds on the clock once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
