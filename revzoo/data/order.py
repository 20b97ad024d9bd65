"""The order of training images and their augmentation, as functions of (seed, epoch, batch) alone.

A ``DataLoader`` with ``shuffle=True`` draws from torch's global generator: the order of an epoch
then depends on everything drawn before, and an epoch can only begin at its first batch. Here each
epoch's permutation has its own generator, and so has the augmentation of each batch (or of each
image, in sets that augment themselves). A run that stopped in the middle of an epoch resumes with
the same images and the same crops.

Lightning's own protocol, loaders with ``load_state_dict``, does not work here: Lightning 2.6 hands
the states over while it builds the loaders, and a schedule that asks for the number of steps lets
it build them before it restores the checkpoint.
"""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

from revzoo.data.errors import DataError
from revzoo.data.images import Batch, ImageSet

log = logging.getLogger(__name__)

RESTARTS = 3  # in a row


def mixed(*numbers: int) -> int:
    """A seed below 2**63 from whole numbers >= 0; other numbers or another order: another seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def batch_seed(seed: int, trainer: pl.Trainer) -> int:
    """The seed of the batch that this process of ``trainer`` trains on, in a run of ``seed``."""
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    return mixed(seed, trainer.current_epoch, batch, trainer.global_rank)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU inside; restore their state after."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class EpochSampler(DistributedSampler[int]):
    """A permutation of ``count`` images for each epoch; this process's share of it.

    A ``DistributedSampler`` by type, so that Lightning keeps it and sets its epoch.
    In your own loop each pass is the next epoch.

    Args:
        count: images in all.
        seed: decides the order, together with the epoch.
        processes: processes that train together.
        rank: the number of this one.

    Attributes:
        start: images of this process's share that are left out of the next pass, once.
    """

    def __init__(self, count: int, *, seed: int, processes: int = 1, rank: int = 0) -> None:
        super().__init__(range(count), num_replicas=processes, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.start = 0

    @property
    def epoch_seed(self) -> int:
        """The seed of this epoch's permutation."""
        return mixed(self.seed, self.epoch)

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        generator = torch.Generator().manual_seed(self.epoch_seed)
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        padded = order.repeat(-(-self.total_size // len(order)))[: self.total_size]
        yield from padded[self.rank :: self.num_replicas][start:].tolist()
        self.epoch += 1


class SteadyLoader(DataLoader[Batch]):
    """A loader that starts its workers again where one was killed.

    The pass continues with the batch that the workers owed, so its order stays the same. Workers
    that are killed :data:`RESTARTS` times in a row, without a batch in between, end the pass.

    Raises:
        DataError: at that end.
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from self._steadily(0)

    def _steadily(self, done: int) -> Iterator[Batch]:
        epoch = getattr(self.sampler, "epoch", 0)
        restarts = 0
        while True:
            try:
                for batch in self._start(done):
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
                    f"workers were killed {restarts} times in a row at batch {done}, mostly for "
                    f"lack of memory ({reason}); lower data.num_workers ({self.num_workers}; 0 "
                    "loads without worker processes)"
                )
            log.warning("%s: starting the workers again, at batch %d", reason, done)
            self._iterator = None  # a persistent one would be asked again
            if hasattr(self.sampler, "epoch"):
                self.sampler.epoch = epoch  # which the pass so far may have left behind

    def _lost_worker(self, error: Exception) -> bool:
        """Whether a worker was killed, and did not raise the error itself."""
        if not self.num_workers or str(error).startswith("Caught "):
            return False
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker (pid")
        return isinstance(error, ConnectionError | EOFError | FileNotFoundError)  # its pipes

    def _start(self, first: int) -> Iterator[Batch]:
        """The batches from number ``first`` on."""
        return islice(self._unwatched(), first, None)

    def _unwatched(self) -> Iterator[Batch]:
        """The batches, without torch's handler of SIGCHLD.

        The handler raises wherever the main thread is when a worker dies, such as in the middle of
        an optimiser step or of a save. Without it the loader itself finds out, within 5 s.
        """
        before = signal.getsignal(signal.SIGCHLD)
        batches: Iterator[Batch] = super().__iter__()
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, before)
        return batches


class TrainLoader(SteadyLoader):
    """A loader whose pass over an epoch begins at the batch that ``first_batch`` names.

    Nothing is drawn or loaded before the first batch, as Lightning makes the iterator before it
    sets the epoch.

    Attributes:
        first_batch: the number of the batch that the next pass begins with; None for 0.
    """

    dataset: ImageSet  # type: ignore[assignment]
    first_batch: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from self._steadily(self.first_batch() if self.first_batch is not None else 0)

    def _start(self, first: int) -> Iterator[Batch]:
        if not isinstance(self.sampler, EpochSampler):
            return super()._start(first)
        assert self.batch_size is not None
        self.sampler.start = first * self.batch_size
        if self.dataset.augments_itself:
            self.dataset.begin_epoch(self.sampler.epoch_seed)
        return self._unwatched()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is Lightning's count of batches. Says that a pass can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
