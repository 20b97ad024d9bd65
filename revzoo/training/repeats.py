"""Images that are evaluated twice, so that every process has as many; figures leave them out.

A ``DistributedSampler``, which Lightning gives to loaders of validation and test, fills up the last
round with images from the beginning.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler


def count_own(loaders: Any, batch_idx: int, size: int) -> int:
    """How many of a batch's images, the first ones, are no repetitions.

    Args:
        loaders: a trainer's for validation or test; the first one counts.
        batch_idx: the number of the batch in this process.
        size: images in it.
    """
    loader = loaders[0] if isinstance(loaders, list | tuple) else loaders
    sampler = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):
        return size
    share = range(sampler.rank, len(sampler.dataset), sampler.num_replicas)  # type: ignore[arg-type]
    return max(0, min(size, len(share) - batch_idx * loader.batch_size))
