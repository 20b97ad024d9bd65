"""The largest batch that fits into memory, by Lightning's ``BatchSizeFinder`` on a copy.

Lightning tries larger and larger batches until memory runs out. On a GPU an error ends the search.
On the CPU there is no error: the system swaps, or kills a process. So there we compute an upper end
first:

1. A trial with two images triggers all lazy loading. We count the activations of one image in each
   memory mode (:func:`bytes_per_image`). Together with gradients, momentum and the optimiser's
   copies this gives the largest batch for the free (or allowed) memory.
2. Lightning's finder trains batches from an eighth of that size up to it. Before each batch we
   extrapolate the growth of the process, after it we measure it. Beyond the limit we raise the
   error of torch's allocator, which Lightning handles.
3. The finder returns its upper end untried, so we train the result for two more steps and lower it
   until the process stays within the limit.

Between trials we return the free pages of glibc's heap to the system: without this, 64 images of
revnet38 in ``invert`` started with 72 MB of leftovers, with it 6 MB. Gaps in the heap within a
trial count, since the run has them too: the same 64 images took 169 MB, of which 38 are activations
(58 MB with ``MALLOC_MMAP_THRESHOLD_=65536``, which leaves no gaps but doubles the time of a step;
32x32 pixels, glibc 2.36).

Known limits: the search ignores memory that other processes take later. Gaps in the heap differ
from trial to trial, so small limits (about 100 MiB) give too small batches.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.tuner.tuning import Tuner

from revzoo._files import json_bytes, write_atomically
from revzoo.data import ImageData
from revzoo.training.classifier import Classifier
from revzoo.training.lightning_compat import data_of
from revzoo.training.process_memory import (
    free_bytes,
    give_back,
    peak_bytes,
    reset_peak,
    resident_bytes,
)
from revzoo.training.tuning.out_of_memory import bytes_per_image, is_out_of_memory
from revzoo.training.tuning.trial import Trial, random_states_kept, trial_trainer

log = logging.getLogger(__name__)

SHARE = 0.8  # of the free memory; kernels' workspaces and gaps of the heap need the rest
STEPS = 2  # of a trial: gradients and momentum exist from the second step on
SMALLEST = 2
FIRST = 8  # the search starts at the largest batch that may fit, divided by this
SUCCESSES = 6  # at most, on the CPU: finding the last image is not worth the time
FIXED_COPIES = 3  # of the parameters: gradients, momentum, temporaries of the optimiser
FILE = "batch_size_finder.json"


@dataclass(frozen=True)
class BatchSize:
    """The result of the search.

    Attributes:
        batch_size: images per step.
        limited_by: ``memory``, ``max_size`` or ``training images``.
        room: bytes available to a step; None on a GPU without ``max_bytes``.
        taken: growth of the process in the trials, in bytes (on a GPU: peak of its tensors); None
            if unknown or if it did not grow.
        per_image: bytes of activations of each image in each memory mode, counted in float32.
        largest: images that fit into ``room`` in each memory mode, by that count.
    """

    batch_size: int
    limited_by: str
    room: int | None
    taken: int | None
    per_image: dict[str, float] = field(default_factory=dict)
    largest: dict[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> list[Path]:
        """Write ``batch_size_finder.json``."""
        write_atomically(folder / FILE, json_bytes(asdict(self)))
        return [folder / FILE]


class NoRoomError(ValueError):
    """Not even a small batch fits, or the free memory is unknown."""


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
        NoRoomError: not even two images fit, or the system does not report free memory.
    """
    # as in configs/trainer/auto.yaml
    options = {"accelerator": "auto", **(trainer or {})}
    with trial_trainer(options, max_steps=STEPS) as runner:
        # only Lightning knows which device it chooses
        device = runner.strategy.root_device
    if not _Trials(module, data, options, _Limit(device, None)).train(SMALLEST):
        raise NoRoomError(
            "not even a batch of two images fits into memory: free some, or choose a smaller "
            "model or memory mode"
        )
    give_back()
    # from here on, memory that libraries load lazily counts as used
    limit = _Limit(device, room_on(device, max_bytes))
    with random_states_kept():  # counting builds models, which draws weights
        per_image = counted(module, data, options) if device.type == "cpu" else {}
    # the weights themselves are in memory already
    left = (limit.room or 0) - FIXED_COPIES * sum(p.nbytes for p in module.parameters())
    largest = {name: int(max(0, left) // size) for name, size in per_image.items()}
    # on a GPU nothing is counted: its allocator finds the limit
    bounds = {"memory": largest.get(module.memory_mode, max_size), "max_size": max_size}
    bounds["training images"] = data.train_count
    limited_by = min(bounds, key=lambda name: bounds[name])
    if bounds[limited_by] < SMALLEST:
        raised = "" if max_bytes is None else f", raise tuner.max_bytes ({max_bytes})"
        raise NoRoomError(
            f"a batch of {SMALLEST} images does not fit ({limited_by}: {bounds[limited_by]}); "
            f"free memory{raised} or choose a smaller model"
        )
    size = _Trials(module, data, options, limit).largest(bounds[limited_by])
    # the trials ended below the upper end
    by = limited_by if size == bounds[limited_by] else "memory"
    return BatchSize(size, by, limit.room, limit.taken(), per_image, largest)


def room_on(device: torch.device, max_bytes: float | None) -> int | None:
    """Bytes that a step may take beyond current use; None if only the device limits it."""
    if device.type != "cpu":
        # on a GPU max_bytes limits the tensors, on the CPU the whole process
        return None if max_bytes is None else int(max_bytes)
    resident, free = resident_bytes(), free_bytes(device)
    if max_bytes is not None and resident is not None:
        return max(0, int(max_bytes) - resident)
    if free is None or resident is None:
        raise NoRoomError(
            "this system does not report free memory and raises no error when it runs out: on the "
            "CPU, the search for a batch size needs Linux"
        )
    return int(SHARE * free)


def counted(module: Classifier, data: ImageData, options: Mapping[str, Any]) -> dict[str, float]:
    """Bytes of activations of one image, in each memory mode that the model has.

    Counted in float32; autocast to a narrower dtype does not need more.
    """
    # float64 has twice the bytes
    factor = 2 if options.get("precision") == "64-true" else 1
    counts = bytes_per_image(module.hparams["model"], data.image_size)
    return {mode: factor * count for mode, count in counts.items()}


class _Limit:
    """The memory that trials may take; on a GPU torch's allocator watches it, on the CPU we do.

    Args:
        device: of the trials.
        room: bytes; None for the whole device.
    """

    def __init__(self, device: torch.device, room: int | None) -> None:
        self.device, self.room = device, room
        self.tried = 0  # images of the last trial
        self._before, self._measures = resident_bytes() or 0, False

    def begin(self, batch_size: int) -> None:
        """Before a trial: extrapolate from the last one.

        Raises:
            RuntimeError: as torch's allocator raises it, if the estimate exceeds the room.
        """
        # Lightning's search may go down again; then the last trial is no guide
        if self.tried and batch_size > self.tried:
            # an upper bound: activations grow with the batch, the rest does not
            self._refuse(batch_size, (self.taken() or 0) * batch_size / self.tried)
        give_back()
        self.tried, self._measures = batch_size, reset_peak()

    def end(self) -> None:
        """After a trial: measure it.

        Raises:
            RuntimeError: as :meth:`begin`.
        """
        self._refuse(self.tried, self.taken() or 0)

    def taken(self) -> int | None:
        """Growth of the process at its peak, in bytes; see :class:`BatchSize`."""
        peak = peak_bytes(self.device)
        # on a GPU the peak counts tensors only, so nothing is subtracted
        if peak is None or self.device.type == "cuda":
            return peak
        return max(0, peak - self._before) if self._measures else None

    def _refuse(self, batch_size: int, needed: float) -> None:
        if self.device.type == "cpu" and self.room is not None and needed > self.room:
            # Lightning's finder recognises this text
            raise RuntimeError(
                f"DefaultCPUAllocator: can't allocate memory: {batch_size} images take about "
                f"{needed:.0f} bytes of {self.room}"
            )

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """On a GPU, make torch's allocator raise beyond the room."""
        if self.device.type != "cuda" or self.room is None:
            yield
            return
        whole = torch.cuda.get_device_properties(self.device).total_memory
        # torch knows a limit only as a share of the device
        torch.cuda.set_per_process_memory_fraction(min(1.0, self.room / whole), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)


class _Trials:
    """Trains copies of a module on batches of different sizes, within a limit."""

    def __init__(
        self, module: Classifier, data: ImageData, options: Mapping[str, Any], limit: _Limit
    ) -> None:
        self.module, self.data, self.options, self.limit = module, data, options, limit

    def largest(self, most: int) -> int:
        """The largest batch up to ``most`` that trains within the limit."""
        size = max(SMALLEST, most // FIRST)
        with self.limit.enforced(), trial_trainer(self.options, max_steps=STEPS) as runner:
            best = Tuner(runner).scale_batch_size(
                _Guarded(self.module, self.limit),
                datamodule=self._batches_of(size),
                # doubles until memory runs out, then bisects
                mode="binsearch",
                steps_per_trial=STEPS,
                init_val=size,
                # 25 is Lightning's default
                max_trials=SUCCESSES if self.limit.device.type == "cpu" else 25,
                # by default Lightning 2.6 lowers the result by 5 %; the trials below measure
                margin=0.0,
                max_val=most,
            )
        assert best is not None, "only fast_dev_run returns None"
        while best > SMALLEST and not self.train(best):
            # gaps of the heap vary by a few percent from trial to trial
            best = max(SMALLEST, int(0.9 * best))
        return best

    def train(self, size: int) -> bool:
        """Train two steps; False if they do not fit into memory."""
        with self.limit.enforced(), trial_trainer(self.options, max_steps=STEPS) as runner:
            try:
                runner.fit(_Guarded(self.module, self.limit), datamodule=self._batches_of(size))
            except RuntimeError as error:
                # any other error is a fault of the model
                if not is_out_of_memory(error):
                    raise
                return False
        return True

    def _batches_of(self, size: int) -> ImageData:
        data = copy.copy(self.data)  # the same images, through separate loaders
        data.batch_size = size
        return data


class _Guarded(Trial):
    """A trial that asks the limit before and after each batch size."""

    def __init__(self, original: Classifier, limit: _Limit) -> None:
        super().__init__(original)
        self._limit = limit

    def on_train_start(self) -> None:
        super().on_train_start()
        data = data_of(self.trainer)
        self._limit.begin(data.batch_size)

    def on_train_end(self) -> None:
        super().on_train_end()
        self._limit.end()
