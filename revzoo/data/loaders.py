"""The loaders for training and for evaluation: they start at any batch, and restart killed
workers.

Lightning's protocol (loaders with ``load_state_dict``) does not work here: Lightning 2.6 loads the
states when it builds the loaders, but a schedule that asks for the number of steps makes it build
the loaders before it restores the checkpoint.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.data import suggested_max_num_workers
from torch.utils.data import DataLoader, DistributedSampler

from revzoo._checks import at_most, cores
from revzoo.data.errors import DataError
from revzoo.data.images import Batch, ImageSet, as_is
from revzoo.data.order import EpochSampler, PoissonSampler, batches_of_epoch

log = logging.getLogger(__name__)

RESTARTS = 3  # consecutive restarts of the workers, without a batch between them
_MAX_WORKERS = 8  # per training process


def train_loader(
    images: ImageSet,
    *,
    batch_size: int,
    workers: int | None,
    seed: int,
    trainer: pl.Trainer | None,
    poisson: bool = False,
) -> Loader:
    """The loader for this process's share of the training images, in a new order every epoch.

    Args:
        images: the training images.
        batch_size: images per step and process; an incomplete last batch is dropped.
        workers: as in ``ImageData``.
        seed: decides the order, together with the number of the epoch.
        trainer: Lightning's trainer; None for your own loop in one process.
        poisson: draw batches independently, see ``PoissonSampler``.

    Raises:
        DataError: the share is smaller than a batch.
    """
    processes, rank = (1, 0) if trainer is None else (trainer.world_size, trainer.global_rank)
    check_batch_size(batch_size, len(images), processes)
    kind = PoissonSampler if poisson else EpochSampler
    sampler = kind(len(images), batch_size=batch_size, seed=seed, processes=processes, rank=rank)
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
    """Refuse a batch size above a process's share of the training images.

    Raises:
        DataError: states the largest valid size.
    """
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
    """A loader that can begin inside a pass, and restarts its workers after one was killed.

    Either way the order stays the same. It draws and loads nothing until the first batch is asked
    for: Lightning makes the iterator before it sets the epoch.

    Attributes:
        first_batch: returns the index of the batch to begin with; None for 0.

    Raises:
        DataError: a worker is killed again after :data:`RESTARTS` restarts without a batch.
    """

    dataset: ImageSet
    first_batch: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        done, restarts = 0 if self.first_batch is None else self.first_batch(), 0
        epoch = getattr(self.sampler, "epoch", 0)
        while True:
            try:
                for batch in self._batches_from(done):
                    yield batch
                    done, restarts = done + 1, 0
                return
            except (RuntimeError, OSError, EOFError) as error:
                if not self._lost_worker(error):
                    raise
                reason = " ".join(f"{type(error).__name__}: {error}".split())
            restarts += 1
            if restarts > RESTARTS:
                raise DataError(
                    f"workers were killed {restarts} times in a row at batch {done}, usually for "
                    f"lack of memory ({reason}); lower data.num_workers ({self.num_workers}; 0 "
                    "loads without worker processes)"
                )
            log.warning("%s: restarting the workers at batch %d", reason, done)
            self._iterator = None  # torch would reuse it with persistent workers
            if isinstance(self.sampler, DistributedSampler):
                self.sampler.epoch = epoch  # the aborted pass may have advanced it

    def _lost_worker(self, error: Exception) -> bool:
        """Whether a worker was killed, and did not raise the error itself."""
        if not self.num_workers or str(error).startswith("Caught "):
            return False
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker (pid")
        return isinstance(error, ConnectionError | EOFError | FileNotFoundError)  # its pipes

    def _batches_from(self, first: int) -> Iterator[Batch]:
        if not isinstance(self.sampler, EpochSampler):
            return islice(self._without_sigchld(), first, None)
        # the sampler skips them, so their images are not read
        self.sampler.start = first
        self.dataset.begin_epoch(self.sampler.epoch_seed)
        return self._without_sigchld()

    def _without_sigchld(self) -> Iterator[Batch]:
        """The batches, without torch's handler of SIGCHLD.

        When a worker dies, the handler raises anywhere in the main thread, such as in the middle of
        an optimiser step or a save. Without the handler the loader notices within 5 s.
        """
        before = signal.getsignal(signal.SIGCHLD)
        batches: Iterator[Batch] = super().__iter__()  # installs torch's handler
        # Python allows signal handlers in the main thread only; elsewhere torch installs none
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
        return batches

    @property
    def _index_sampler(self) -> Any:  # where torch takes the indices of a batch from
        if isinstance(self.sampler, PoissonSampler):
            return self.sampler
        return super()._index_sampler

    def state_dict(self) -> dict[str, Any]:
        """Empty, since Lightning counts the batches; this method marks the loader as resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
