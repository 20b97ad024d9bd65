"""The order of training images and their augmentation, as functions of only (seed, epoch, batch).

A ``DataLoader`` with ``shuffle=True`` draws from torch's global generator: the order of an epoch
then depends on everything drawn before, and an epoch can only begin at its first batch. Here each
epoch's permutation has its own generator, and so has the augmentation of each batch (or of each
image, in sets that augment themselves). If a run stops in the middle of an epoch, it resumes with
the same images and the same crops.

Lightning's protocol (loaders with ``load_state_dict``) does not work here: Lightning 2.6 loads the
states when it builds the loaders, but a schedule that asks for the number of steps makes it build
the loaders before it restores the checkpoint.
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

RESTARTS = 3  # consecutive restarts of the workers, without a batch between them


def hash_seed(*numbers: int) -> int:
    """Hash a sequence of integers >= 0 to a seed below 2**63."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def batches_of_epoch(trainer: pl.Trainer) -> int:
    """Training batches of this epoch so far; the trainer has no public count."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def batch_seed(seed: int, trainer: pl.Trainer) -> int:
    """The seed of this process's current training batch, in a run with ``seed``."""
    return hash_seed(seed, trainer.current_epoch, batches_of_epoch(trainer), trainer.global_rank)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's random numbers on the CPU inside; restore their state after."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed every GPU
    try:
        yield
    finally:
        torch.set_rng_state(before)


class EpochSampler(DistributedSampler[int]):
    """This process's share of a permutation of ``count`` images, which changes every epoch.

    It subclasses ``DistributedSampler``, so Lightning keeps it and sets its epoch. In your own loop
    each pass is the next epoch.

    Args:
        count: images in all.
        seed: decides the order, together with the epoch.
        processes: processes that train together.
        rank: index of this process.

    Attributes:
        start: number of images that the next pass skips; the pass after it skips none.
    """

    def __init__(self, count: int, *, seed: int, processes: int = 1, rank: int = 0) -> None:
        super().__init__(range(count), num_replicas=processes, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.start = 0

    @property
    def epoch_seed(self) -> int:
        """The seed of this epoch's permutation."""
        return hash_seed(self.seed, self.epoch)

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start, 0
        # a separate generator: draws elsewhere cannot change the order
        generator = torch.Generator().manual_seed(self.epoch_seed)
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        # as DistributedSampler does: all processes get equally many images
        padded = order.repeat(-(-self.total_size // len(order)))[: self.total_size]
        yield from padded[self.rank :: self.num_replicas][start:].tolist()
        self.epoch += 1


class PoissonSampler(EpochSampler):
    """Batches that contain each image with the same probability, independent of other images.

    Such batches amplify differential privacy; their sizes vary. All processes draw the same batch
    and divide it. An epoch has as many batches as an epoch that shows each image once.

    Args:
        count: images in all.
        batch_size: average number of images in a batch of one process.
        seed, processes, rank: as in ``EpochSampler``.

    Attributes:
        rate: probability that an image is in a batch.
        start: number of batches that the next pass skips.
    """

    def __init__(
        self, count: int, *, batch_size: int, seed: int, processes: int = 1, rank: int = 0
    ) -> None:
        super().__init__(count, seed=seed, processes=processes, rank=rank)
        self.batches = count // (batch_size * processes)
        self.rate = batch_size * processes / count

    def __len__(self) -> int:
        return self.batches

    def batch(self, epoch: int, index: int) -> list[int]:
        """This process's share of a batch; it may be empty."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, epoch, index))
        # all processes draw the whole batch, so that their shares are disjoint
        drawn = torch.rand(len(self.dataset), generator=generator) < self.rate  # type: ignore[arg-type]
        mine: list[int] = drawn.nonzero().flatten()[self.rank :: self.num_replicas].tolist()
        return mine

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        start, self.start = self.start, 0
        for index in range(start, self.batches):
            # layers and losses need an image; gradient clipping gives this one zero weight
            yield self.batch(self.epoch, index) or [0]
        self.epoch += 1


class RestartingLoader(DataLoader[Batch]):
    """A loader that restarts its workers after one was killed.

    The pass continues with the first missing batch, so the order stays the same.

    Raises:
        DataError: a worker is killed again after :data:`RESTARTS` restarts without a batch.
    """

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from self._batches_from(0)

    def _batches_from(self, done: int) -> Iterator[Batch]:
        epoch = getattr(self.sampler, "epoch", 0)
        restarts = 0
        while True:
            try:
                # the sampler repeats the whole order; _start skips the delivered batches
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
                    f"workers were killed {restarts} times in a row at batch {done}, usually for "
                    f"lack of memory ({reason}); lower data.num_workers ({self.num_workers}; 0 "
                    "loads without worker processes)"
                )
            log.warning("%s: restarting the workers at batch %d", reason, done)
            self._iterator = None  # torch would reuse it with persistent workers
            if hasattr(self.sampler, "epoch"):
                self.sampler.epoch = epoch  # the aborted pass may have advanced it

    def _lost_worker(self, error: Exception) -> bool:
        """Whether a worker was killed, and did not raise the error itself."""
        if not self.num_workers or str(error).startswith("Caught "):
            return False
        if isinstance(error, RuntimeError):
            return str(error).startswith("DataLoader worker (pid")
        return isinstance(error, ConnectionError | EOFError | FileNotFoundError)  # its pipes

    def _start(self, first: int) -> Iterator[Batch]:
        """The batches from number ``first`` on."""
        return islice(self._without_sigchld(), first, None)

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


class TrainLoader(RestartingLoader):
    """A loader that can begin in the middle of an epoch.

    It draws and loads nothing until the first batch is asked for: Lightning makes the iterator
    before it sets the epoch.

    Attributes:
        first_batch: returns the index of the batch to begin with; None for 0.
    """

    dataset: ImageSet  # type: ignore[assignment]
    first_batch: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        yield from self._batches_from(self.first_batch() if self.first_batch is not None else 0)

    def _start(self, first: int) -> Iterator[Batch]:
        if not isinstance(self.sampler, EpochSampler):
            return super()._start(first)
        assert self.batch_size is not None
        # the sampler skips them, so their images are not read
        poisson = isinstance(self.sampler, PoissonSampler)
        self.sampler.start = first if poisson else first * self.batch_size
        if self.dataset.augments_itself:
            self.dataset.begin_epoch(self.sampler.epoch_seed)
        return self._without_sigchld()

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
