"""The loaders for training and for evaluation; they start at any batch.

Lightning's protocol (loaders with ``load_state_dict``) does not work here: Lightning 2.6 loads the
states when it builds the loaders, but a schedule that asks for the number of steps makes it build
the loaders before it restores the checkpoint.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from threading import Thread
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from torch.utils.data import BatchSampler, DataLoader

from revzoo._checks import at_most, cores
from revzoo.data.errors import DataError
from revzoo.data.images import Batch, ImageSet, TensorImages, as_is
from revzoo.data.on_device import DeviceImages
from revzoo.data.order import (
    EpochSampler,
    FetchingSampler,
    PoissonSampler,
    ShardSampler,
    batches_of_epoch,
)

_MAX_WORKERS = 8  # per training process


def train_loader(
    images: ImageSet,
    *,
    batch_size: int,
    workers: int | None,
    seed: int,
    trainer: pl.Trainer | None,
    poisson: bool = False,
    stretches: int = 1,
) -> Loader:
    """The loader for this process's share of the training images, in a new order every epoch.

    The options are those of ``ImageData`` and of the samplers. ``trainer`` is Lightning's; None for
    your own loop in one process.

    Raises:
        DataError: the share is smaller than a batch.
    """
    processes, rank = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
    check_batch_size(batch_size, len(images), processes)
    options = {"batch_size": batch_size, "seed": seed, "processes": processes, "rank": rank}
    sampler: EpochSampler
    if images.shards is not None and not poisson:
        window = images.window
        sampler = ShardSampler(images.shards, window=window, stretches=stretches, **options)
    else:
        sampler = (PoissonSampler if poisson else EpochSampler)(len(images), **options)
    any_trainer: Any = trainer  # Lightning declares no type for overfit_batches
    overfits = trainer is not None and any_trainer.overfit_batches
    loader = Loader(
        **_options(images, batch_size, workers, trainer),
        sampler=None if overfits else sampler,  # overfitting needs the same batches in every epoch
        drop_last=True,
    )
    if trainer is not None:
        # a function: the count is known only when a resumed epoch begins
        loader.first_batch = partial(batches_of_epoch, trainer)
    return loader


def left_out(batch_size: int, images: int, processes: int) -> int:
    """How many images each epoch leaves out because its last batch is incomplete."""
    return images - images // processes // batch_size * batch_size * processes


def check_batch_size(batch_size: int, images: int, processes: int) -> None:
    """Refuse a batch size above a process's share of the training images."""
    share = images // processes
    if share < batch_size:
        raise DataError(
            f"batch_size={batch_size} is more than the {share} training images of each "
            f"process: set data.batch_size to at most {share}"
        )


def eval_loader(
    images: ImageSet, *, batch_size: int, workers: int | None, trainer: pl.Trainer | None
) -> Loader:
    """The loader for all images, in their order."""
    return Loader(**_options(images, batch_size, workers, trainer))


def _options(
    images: ImageSet, batch_size: int, workers: int | None, trainer: pl.Trainer | None
) -> dict[str, Any]:
    if workers is None:
        # each training process uses one device; the processes of a machine share its CPUs
        processes = 1 if trainer is None else trainer.num_devices
        # indexing a tensor takes less time than sending the batch from a worker
        workers = 0 if images.in_memory else min(_MAX_WORKERS, suggested_max_num_workers(processes))
    # more than one a core: workers may wait for a network disk
    workers = at_most(4 * cores(), "data.num_workers", workers)
    return {
        "dataset": images,
        "batch_size": batch_size,
        "num_workers": workers,
        "persistent_workers": workers > 0,  # starting them again would delay every epoch
        "pin_memory": torch.cuda.is_available(),
        "collate_fn": as_is,
        "generator": torch.Generator(),  # seeds workers without draws from the global generator
    }


class Loader(DataLoader[Batch]):
    """A loader that can begin inside a pass.

    It draws and loads nothing until the first batch is asked for: Lightning makes the iterator
    before it sets the epoch.

    Attributes:
        first_batch: returns the index of the batch to begin with; None for 0.
    """

    dataset: ImageSet
    first_batch: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        skipped = 0 if self.first_batch is None else self.first_batch()
        if isinstance(self.sampler, EpochSampler):
            # the sampler skips them, so their images are not read
            self.sampler.start, skipped = skipped, 0
            self.dataset.begin_epoch(self.sampler.epoch_seed, self.sampler.epoch)
        yield from islice(self._batches(), skipped, None)

    def _batches(self) -> Iterator[Batch]:
        # both without torch's fetcher, which takes longer than reading such a batch
        if isinstance(self.dataset, DeviceImages):  # all indices go to the device at once
            return self.dataset.batches(list(self._index_sampler))
        if isinstance(self.dataset, TensorImages) and not (self.num_workers or self.pin_memory):
            return map(self.dataset.__getitems__, self._index_sampler)
        if not isinstance(self.worker_init_fn, _BeginWorker):  # now: Lightning may set its own
            self.worker_init_fn = _BeginWorker(self.worker_init_fn)
        return super().__iter__()

    @property
    def _index_sampler(self) -> Any:  # where torch takes the indices of a batch from
        if isinstance(self.sampler, PoissonSampler):
            return self.sampler
        if self.dataset.prefetch:
            # here, since Lightning gives the evaluations of several processes its own sampler
            sampler = FetchingSampler(self.sampler, self.dataset)
            return BatchSampler(sampler, self.batch_size or 1, self.drop_last)
        return super()._index_sampler

    def state_dict(self) -> dict[str, Any]:
        """Empty, since Lightning counts the batches; this method marks the loader as resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""


class _BeginWorker:
    """Leaves signals to the training process, which stops after a batch.

    A terminal sends Ctrl-C, and batch systems send SIGTERM, to all processes. Without its workers,
    a run could neither finish the batch nor save.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_IGN)
        if hasattr(signal, "sigwaitinfo"):  # macOS lacks it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            Thread(target=_end_with_parent, args=(parent_process(),), daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _end_with_parent(parent: Any) -> None:
    """End this process when ``parent`` sends SIGTERM, as torch ends workers."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
        pass
    os._exit(0)
