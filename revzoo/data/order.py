"""The order of training images and their augmentation, as functions of (seed, epoch, batch) alone.

A ``DataLoader`` with ``shuffle=True`` draws from torch's global generator: what an epoch holds
then depends on everything drawn before, and an epoch can only be begun at its first batch. Here
each epoch's permutation has a generator of its own, and so has each batch's (or, in sets that
augment themselves, each image's) augmentation. A run that was stopped in the middle of an epoch
goes on with the images, and the crops of them, that it would have seen.

Lightning's own protocol for this, loaders with ``load_state_dict``, is not relied on: Lightning
2.6 hands the states over while it builds the loaders, and a schedule that asks for the number of
steps has them built before the checkpoint is restored.
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
    """Torch's random numbers on the CPU from ``seed`` inside, from where they were after."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


class EpochSampler(DistributedSampler[int]):
    """A permutation of ``count`` images for each epoch; this process's share of it.

    A ``DistributedSampler`` by type, so that Lightning leaves it in place and tells it the epoch.
    In a loop of one's own each pass is the next epoch.

    Args:
        count: images in all.
        seed: with the epoch, the only source of chance.
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

    Nothing is drawn or loaded before the first batch is asked for, as Lightning makes the iterator
    before it says which epoch it is for.

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
