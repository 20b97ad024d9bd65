"""The largest batch that fits into memory: train copies, double until it runs out, then bisect.

On a GPU an allocation fails. On the CPU none does: the system swaps, or kills the process. So there
we measure the peak of the process, and do not try what would exceed the limit by extrapolation.

Why not Lightning's finder: it waits for an allocation to fail, and returns its upper end untried.

Known limits: the search ignores memory that other processes take later, and that a batch job may
use only a part of the machine: give ``max_bytes`` there. Gaps in the heap count, so small limits
(about 100 MiB) give too small batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from revzoo._files import json_bytes, write_atomically
from revzoo.data import ImageData
from revzoo.training.classifier import Classifier
from revzoo.training.process_memory import free_bytes, peak_host_bytes, release_memory, status_bytes
from revzoo.training.tuning.out_of_memory import is_out_of_memory
from revzoo.training.tuning.trial import Trial, trial_trainer

SHARE = 0.8  # of the free memory, on the CPU; the run validates and saves, too
FIRST = 8  # images of the first trial
STEPS = 2  # of a trial: gradients and momentum exist from the second step on
FILE = "batch_size_finder.json"


@dataclass(frozen=True)
class BatchSize:
    """The result of the search.

    Attributes:
        batch_size: images per step.
        limited_by: ``memory``, ``max_size`` or ``training images``.
    """

    batch_size: int
    limited_by: str

    def write(self, folder: Path) -> list[Path]:
        """Write ``batch_size_finder.json``."""
        write_atomically(folder / FILE, json_bytes(asdict(self)))
        return [folder / FILE]


def find_batch_size(
    module: Classifier,
    data: ImageData,
    *,
    max_bytes: float | None = None,
    max_size: int = 8192,
    trainer: Mapping[str, Any] | None = None,
) -> BatchSize:
    """Search for the largest batch that can be trained. Changes none of its arguments.

    Args:
        module: we train a copy of it.
        data: a data module after ``setup``.
        max_bytes: limit for the whole process (on a GPU: for its tensors); None for four fifths of
            the free memory on the CPU, and all of it on a GPU.
        max_size: largest batch to try, in images.
        trainer: options of the run's trainer, such as its precision.

    Raises:
        ValueError: not even two images fit, or the system does not report free memory.
    """
    most = min(max_size, data.train_count)
    images = copy.copy(data)  # the same images, through separate loaders
    with trial_trainer(trainer or {}, max_steps=STEPS) as runner:
        device = runner.strategy.root_device  # only Lightning knows which one it chooses
    release_memory()  # what the heap keeps would fit more images
    room, before = room_on(device, max_bytes), status_bytes("VmRSS") or 0
    tried = taken = 0

    def fits(size: int) -> bool:
        nonlocal tried, taken
        # an upper bound: activations grow with the batch, the rest does not
        if room is not None and size > tried > 0 and taken * size / tried > room:
            return False
        release_memory()
        images.batch_size = size
        with trial_trainer(trainer or {}, max_steps=STEPS) as runner:
            try:
                runner.fit(Trial(module), datamodule=images)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):  # a fault of the model
                    raise
                return False
        tried, taken = size, (peak_host_bytes() or 0) - before
        return room is None or taken <= room

    best, too_large, size = 0, math.inf, min(FIRST, most)
    try:
        # the last few images are not worth the time
        while best < most and too_large - best > max(1, best / 16):
            if fits(size):
                best = size
            else:
                too_large = size
            size = min(2 * best, most) if too_large == math.inf else (best + int(too_large)) // 2
    finally:
        room_on(device, None)  # lifts a GPU's limit
    if best < 2:
        raise ValueError(
            "not even a batch of two images fits into memory: free some, raise tuner.max_bytes, or "
            "choose a smaller model or memory mode"
        )
    limits = {most: "max_size" if most == max_size else "training images"}
    return BatchSize(best, limits.get(best, "memory"))


def room_on(device: torch.device, max_bytes: float | None) -> int | None:
    """Bytes that the process may grow by; None on a GPU, whose allocator gets the limit.

    Raises:
        ValueError: the system does not report its memory.
    """
    if device.type == "cuda":
        share = (max_bytes or math.inf) / torch.cuda.get_device_properties(device).total_memory
        # torch knows a limit only as a share of the device
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    if device.type != "cpu":
        return None
    free, resident = free_bytes(), status_bytes("VmRSS")
    if free is None or resident is None:
        raise ValueError("on the CPU, the search for a batch size needs Linux")
    return int(SHARE * free if max_bytes is None else max_bytes - resident)
