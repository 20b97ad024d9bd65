"""The largest batch that fits into memory: counts training steps on fake tensors.

Why not Lightning's finder: it waits for an allocation to fail, and on the CPU none does: the system
swaps, or kills the process.

Known limits: the count has the tensors of a step, not what the process and the allocator take
besides. In a batch job, which may use a part of the machine, give ``max_bytes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from revzoo._files import json_bytes, write_atomically
from revzoo.data import ImageData
from revzoo.profiling.count import trace_step, undisturbed
from revzoo.profiling.plan import largest, state_bytes
from revzoo.profiling.twins import copied, fake_twin, images_for
from revzoo.training.classifier import Classifier
from revzoo.training.optim.optimizers import build_optimizer
from revzoo.training.process_memory import free_bytes
from revzoo.training.tuning.lr_finder import search_trainer

SHARE = 0.8  # of the free memory; the run validates and saves, too
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
    """Search for the largest batch that can be trained.

    Moves the images of ``data`` to the device if a run would; changes nothing else.

    Args:
        module: its model and its optimiser's state are counted.
        data: a data module after ``setup``.
        max_bytes: limit for the tensors of a step; None for four fifths of the device's free
            memory.
        max_size: largest batch to try, in images.
        trainer: options of the run's trainer, such as its precision.

    Raises:
        ValueError: not even two images fit, or the system does not report free memory.
    """
    runner = search_trainer(trainer or {})
    model, device = module.model, runner.strategy.root_device
    data.place(device)  # as in the run that follows, which has less memory then
    free = free_bytes(device)
    if max_bytes is None and free is None:
        raise ValueError("the system does not report its free memory: give tuner.max_bytes")
    budget = int(SHARE * (free or 0) if max_bytes is None else max_bytes)
    extra = state_bytes(build_optimizer(copied(model, lambda t: t.to("meta")), module.optim))

    def need(images: int) -> int:
        twin = fake_twin(model, device)  # a step changes it
        shape = (images, data.in_chans, data.image_size, data.image_size)
        return trace_step(twin, images_for(twin, shape)).peak + extra

    most = min(max_size, data.train_count)
    with undisturbed(model), runner.precision_plugin.forward_context():
        best = largest(need, budget, start=min(data.batch_size, most), most=most)
    if best is None or best < 2:
        raise ValueError(
            "not even a batch of two images fits into memory: free some, raise tuner.max_bytes, or "
            "choose a smaller model or memory mode"
        )
    limits = {most: "max_size" if most == max_size else "training images"}
    return BatchSize(best, limits.get(best, "memory"))
