from __future__ import annotations

import pytest
import torch

from revzoo.data.order import EpochSampler, PoissonSampler, hash_seed, seeded


def order(epoch: int, seed: int = 0) -> list[int]:
    sampler = EpochSampler(20, batch_size=4, seed=seed)
    sampler.set_epoch(epoch)
    return list(sampler)


def test_an_epochs_order_follows_from_seed_and_epoch_alone() -> None:
    first = order(3)
    torch.manual_seed(5)
    assert order(3) == first
    assert sorted(first) == list(range(20))
    assert order(4) != first
    assert order(3, seed=1) != first
    assert order(1, seed=0) != order(0, seed=1)  # not the sum of both


def test_each_pass_is_the_next_epoch() -> None:
    sampler = EpochSampler(20, batch_size=4, seed=0)
    assert [list(sampler), list(sampler)] == [order(0), order(1)]


def test_processes_share_an_epoch() -> None:
    shares = [
        list(EpochSampler(21, batch_size=4, seed=0, processes=2, rank=rank)) for rank in (0, 1)
    ]
    assert len(shares[0]) == len(shares[1]) == 11
    assert set(shares[0]) | set(shares[1]) == set(range(21))


def test_random_numbers_are_borrowed() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    with seeded(hash_seed(1, 2)):
        inside = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    with seeded(hash_seed(1, 2)):
        assert torch.equal(torch.rand(1), inside)


@pytest.mark.parametrize("kind", [EpochSampler, PoissonSampler])
def test_the_start_of_a_pass_counts_batches(kind: type[EpochSampler]) -> None:
    """It counted images in one sampler and batches in the other."""
    whole, rest = (kind(20, batch_size=4, seed=0) for _ in range(2))
    rest.start = 2
    skipped = 2 if kind is PoissonSampler else 8  # its items are batches
    assert list(rest) == list(whole)[skipped:]
    assert rest.start == 0
