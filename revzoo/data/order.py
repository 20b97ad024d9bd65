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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, DistributedSampler

from revzoo.data.images import Batch, ImageSet


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


class TrainLoader(DataLoader[Batch]):
    """A loader whose pass over an epoch begins at the batch that ``first_batch`` names.

    Nothing is drawn or loaded before the first batch, as Lightning makes the iterator before it
    sets the epoch.

    Attributes:
        first_batch: the number of the batch that the next pass begins with; None for 0.
    """

    dataset: ImageSet  # type: ignore[assignment]
    first_batch: Callable[[], int] | None = None

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        skipped = self.first_batch() if self.first_batch is not None else 0
        if not isinstance(self.sampler, EpochSampler):
            yield from islice(super().__iter__(), skipped, None)
            return
        assert self.batch_size is not None
        self.sampler.start = skipped * self.batch_size
        if self.dataset.augments_itself:
            self.dataset.begin_epoch(self.sampler.epoch_seed)
        yield from super().__iter__()

    def state_dict(self) -> dict[str, Any]:
        """Empty: the position is Lightning's count of batches. Says that a pass can be resumed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load."""
