"""Stratified split of a labelled set in two.

The split depends on the labels and ``split_seed``, never on the run's seed or the global generator:
runs with different seeds, and resumed runs, hold back the same images.
"""

import torch
from torch import Tensor


def stratified_split(labels: Tensor, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    """Split the indices of a set so that both parts have the class frequencies of the whole.

    A class with a single image goes to the first part, so that it can be learnt.

    Args:
        labels: class indices, int64 (N,).
        fraction: share of the images that goes to the second part, strictly between 0 and 1.
        seed: of the split.

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
