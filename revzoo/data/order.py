"""The split, order and augmentation of training images, functions of only (seed, epoch, batch).

A ``DataLoader`` with ``shuffle=True`` draws from torch's global generator: the order of an epoch
then depends on everything drawn before. Here each epoch's permutation has its own generator, and so
has the augmentation of each batch (or of each image, in sets that augment themselves). So a run
that stops in the middle of an epoch resumes with the same images and the same crops.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from math import gcd
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, Sampler

from revzoo.data.images import ImageSet


def hash_seed(*numbers: int) -> int:
    """Hash a sequence of integers >= 0 to a seed below 2**63."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def batches_of_epoch(trainer: pl.Trainer) -> int:
    """Training batches of this epoch so far; the trainer has no public count."""
    return trainer.fit_loop.epoch_loop.batch_progress.current.ready


def batch_seed(seed: int, trainer: pl.Trainer, batch: int | None = None) -> int:
    """The seed of this process's training batch ``batch`` of this epoch, in a run with ``seed``.

    None for the current batch.
    """
    batch = batches_of_epoch(trainer) if batch is None else batch
    return hash_seed(seed, trainer.current_epoch, batch, trainer.global_rank)


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
    each pass is the next epoch, even after one that ended early.

    Attributes:
        start: number of batches that the next pass skips; the pass after it skips none.
    """

    def __init__(
        self, count: int, *, batch_size: int, seed: int, processes: int = 1, rank: int = 0
    ) -> None:
        super().__init__(range(count), num_replicas=processes, rank=rank, seed=seed)  # type: ignore[arg-type]
        self.batch_size, self.start = batch_size, 0

    @property
    def epoch_seed(self) -> int:
        """The seed of this epoch's permutation."""
        return hash_seed(self.seed, self.epoch)

    def __iter__(self) -> Iterator[int]:
        start, self.start = self.start * self.batch_size, 0
        # a separate generator: draws elsewhere cannot change the order
        generator = torch.Generator().manual_seed(self.epoch_seed)
        self.epoch += 1
        yield from self._share(generator)[start:].tolist()

    def _share(self, generator: torch.Generator) -> Tensor:
        order = torch.randperm(len(self.dataset), generator=generator)  # type: ignore[arg-type]
        # as DistributedSampler does: all processes get equally many images
        padded = order.repeat(-(-self.total_size // len(order)))[: self.total_size]
        return padded[self.rank :: self.num_replicas]


class FetchingSampler(Sampler[int]):
    """The order of another sampler, for images in shards.

    Before the first image of a shard is read, the ``prefetch`` shards after it are fetched.
    """

    def __init__(self, sampler: Any, images: ImageSet) -> None:
        self._sampler, self._images = sampler, images

    def __iter__(self) -> Iterator[int]:
        order, images = torch.tensor([*self._sampler], dtype=torch.long), self._images
        assert images.shards is not None
        shards, starts = np.unique(images.shards[order].numpy(), return_index=True)
        shards = shards[starts.argsort()]
        known = 0
        for rank, (start, end) in enumerate(pairwise([*sorted(starts), len(order)]), 1):
            images.fetch(shards[known : rank + images.prefetch].tolist())
            known = rank + images.prefetch
            yield from order[start:end].tolist()

    def __len__(self) -> int:
        return len(self._sampler)


class ShardSampler(EpochSampler):
    """An order of images in shards in which each process reads few shards at a time.

    The shards come in random order; the images of ``window`` shards are shuffled together. The
    epoch is cut into as many stretches as the run began with processes; a step of all processes
    takes equally many images from each stretch. So a process reads one stretch. If the run resumes
    with another number of processes and as many images a step in all, each step still has the same
    images: an epoch visits each of them once.

    Args:
        shards: int64 (N,), the shard of each image.
        window: number of shards.
        stretches: processes with which the run began.
        **options: see :class:`EpochSampler`.
    """

    def __init__(self, shards: Tensor, *, window: int, stretches: int, **options: Any) -> None:
        super().__init__(len(shards), **options)
        _, self.shards = torch.unique(shards, return_inverse=True)  # a subset lacks some numbers
        self.window = window
        # other processes and images a step without a checkpoint of ours: any number that divides
        self.stretches = gcd(stretches, self.batch_size * self.num_replicas)

    def __len__(self) -> int:
        return len(self.shards) // (self.batch_size * self.num_replicas) * self.batch_size

    def _share(self, generator: torch.Generator) -> Tensor:
        place = torch.randperm(int(self.shards.max()) + 1, generator=generator)[self.shards]
        # whole part: the window; fraction: the place in it
        mixed = torch.rand(len(place), generator=generator, dtype=torch.double)
        order = torch.argsort(place // self.window + mixed)
        whole = self.batch_size * self.num_replicas
        steps = len(order) // whole
        stretches = order[: steps * whole].view(self.stretches, steps, -1)
        batches = stretches.transpose(0, 1).reshape(steps, self.num_replicas, self.batch_size)
        return batches[:, self.rank].flatten()


class PoissonSampler(EpochSampler):
    """Batches that contain each image with the same probability, independent of other images.

    Such batches amplify differential privacy; their sizes vary. All processes draw the same batch
    and divide it. An epoch has as many batches as an epoch that shows each image once.

    ``batch_size`` is the average number of images in a batch of one process.
    """

    @property
    def rate(self) -> float:
        """The probability that an image is in a batch."""
        return self.batch_size * self.num_replicas / len(self.dataset)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.dataset) // (self.batch_size * self.num_replicas)  # type: ignore[arg-type]

    def batch(self, epoch: int, index: int) -> list[int]:
        """This process's share of a batch; it may be empty."""
        generator = torch.Generator().manual_seed(hash_seed(self.seed, epoch, index))
        # all processes draw the whole batch, so that their shares are disjoint
        drawn = torch.rand(len(self.dataset), generator=generator) < self.rate  # type: ignore[arg-type]
        return drawn.nonzero().flatten()[self.rank :: self.num_replicas].tolist()

    def __iter__(self) -> Iterator[list[int]]:  # type: ignore[override]
        epoch, start = self.epoch, self.start
        self.epoch, self.start = epoch + 1, 0
        for index in range(start, len(self)):
            # layers and losses need an image; gradient clipping gives this one zero weight
            yield self.batch(epoch, index) or [0]


def held_back(
    labels: Tensor, groups: Tensor | None, fraction: float, seed: int, *, folds: int, fold: int
) -> tuple[Tensor, Tensor]:
    """The indices to train with and those held back, each with the class frequencies of the whole.

    Args:
        labels: class indices, int64 (N,).
        groups: int64 (N,): images of one group stay together. None if each is its own.
        fraction: share of the images that is held back, if there are no folds.
        seed: of the split; it never depends on the run's seed or the global generator.
        folds: number of folds; 1 for a share.
        fold: the fold to hold back, from 0.
    """
    if folds == 1 and groups is None:
        return stratified_split(labels, fraction, seed)
    shares = [1 - fraction, fraction] if folds == 1 else [1 / folds] * folds
    single = torch.arange(len(labels)) if groups is None else groups
    part = _parts(labels, single, torch.tensor(shares, dtype=torch.double), seed)
    held = part == (1 if folds == 1 else fold)
    return torch.nonzero(~held).flatten(), torch.nonzero(held).flatten()


def _parts(labels: Tensor, groups: Tensor, shares: Tensor, seed: int) -> Tensor:
    """The part of each image, int64 (N,): whole groups, with equal frequencies of the classes.

    Large groups first, each to the part whose load it raises least: the squares of the images of
    each class over the part's share of them, added up. scikit-learn's ``StratifiedGroupKFold``
    works like this, with equal shares only.
    """
    _, groups = torch.unique(groups, return_inverse=True)
    counts = torch.zeros(int(groups.max()) + 1, int(labels.max()) + 1, dtype=torch.double)
    counts.index_put_((groups, labels), torch.ones(len(labels), dtype=torch.double), True)
    counts = torch.cat([counts, counts.sum(1, keepdim=True)], 1)  # and parts of the right size
    scaled = (counts / counts.sum(0).clamp(min=1)).numpy()
    share, load = shares.numpy()[:, None], np.zeros((len(shares), scaled.shape[1]))
    order = torch.randperm(len(counts), generator=torch.Generator().manual_seed(seed))
    order = order[torch.argsort(counts[order, -1], descending=True, stable=True)]
    part = torch.empty(len(counts), dtype=torch.long)
    for group in order.tolist():
        more = scaled[group] / share
        chosen = int((share * more * (2 * load + more)).sum(1).argmin())
        part[group] = chosen
        load[chosen] += more[chosen]
    return part[groups]


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the indices of a set so that both parts have the class frequencies of the whole.

    A class with a single image goes to the first part, so that it can be learnt. The split never
    depends on the run's seed or the global generator.

    Returns:
        Ascending int64 indices of the first and of the held-back part, together all N. The latter
        has round(fraction * N) elements unless tiny classes prevent it.
    """
    generator = torch.Generator().manual_seed(seed)
    held_back = torch.zeros(len(labels), dtype=torch.bool)
    # quotas, not rounding by class: rounded numbers would not add up to the fraction
    for label, quota in enumerate(_quotas(torch.bincount(labels), fraction)):
        members = torch.nonzero(labels == label).flatten()
        chosen = torch.randperm(len(members), generator=generator)[:quota]
        held_back[members[chosen]] = True
    return torch.nonzero(~held_back).flatten(), torch.nonzero(held_back).flatten()


def _quotas(counts: Tensor, fraction: float) -> list[int]:
    """Images held back per class, by the method of largest remainders."""
    exact = counts.double() * fraction
    quotas = exact.floor().long()
    # rounding down leaves these over; the classes with the largest remainders get one each
    missing = round(float(exact.sum())) - int(quotas.sum())
    can_spare = quotas + 1 < counts  # training keeps at least one image of every class
    remainders = torch.where(can_spare, exact - quotas, -1.0)
    winners = torch.argsort(remainders, descending=True, stable=True)[:missing]
    quotas[winners] += can_spare[winners].long()
    return quotas.tolist()
