from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from revzoo.data.order import (
    EpochSampler,
    FetchingSampler,
    PoissonSampler,
    ShardSampler,
    hash_seed,
    seeded,
)


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
    assert [list(sampler), next(iter(sampler))] == [order(0), order(1)[0]]
    assert list(sampler) == order(2), "after a pass that ended early"


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


def _shares(processes: int, *, batch_size: int, **options: int) -> torch.Tensor:
    """The images of an epoch by step and process, int64 (steps, processes, batch_size)."""
    shards = torch.arange(1000) // 10
    shares = [
        list(ShardSampler(shards, processes=processes, rank=r, batch_size=batch_size, **options))
        for r in range(processes)
    ]
    return torch.tensor(shares).view(processes, -1, batch_size).transpose(0, 1)


def test_shards_are_shuffled_in_windows() -> None:
    options = {"batch_size": 10, "window": 5, "stretches": 1}
    order = _shares(1, **options, seed=0).flatten()
    assert sorted(order.tolist()) == [*range(1000)]
    for window in order.view(-1, 50):
        shards = window // 10
        assert len(torch.unique(shards)) == 5
        assert len(torch.unique(shards[:10])) > 1
    assert not torch.equal(order, _shares(1, **options, seed=1).flatten())


def test_shards_are_fetched_before_they_are_read() -> None:
    fetched: list[int] = []
    shards = torch.arange(40) // 4 * 7  # the numbers of a part of a set have gaps
    images: Any = SimpleNamespace(shards=shards, fetch=fetched.extend, prefetch=3)
    sampler = ShardSampler(shards, window=2, stretches=1, batch_size=4, seed=0)
    expected = [*sampler]
    sampler.epoch = 0
    read: list[int] = []
    for index, same in zip(FetchingSampler(sampler, images), expected, strict=True):
        assert index == same
        read += [int(shards[index])] * (int(shards[index]) not in read)
        assert len(fetched) == min(len(read) + 3, 10)
        assert fetched[: len(read)] == read
    assert sorted(fetched) == torch.unique(shards).tolist()


def test_a_step_has_the_same_images_with_any_number_of_processes() -> None:
    shares = {
        n: _shares(n, batch_size=24 // n, window=5, stretches=4, seed=0) for n in (1, 2, 4, 8)
    }
    for n, share in shares.items():
        assert share.shape == (41, n, 24 // n)
        assert torch.equal(share.reshape(41, 24), shares[1].reshape(41, 24))
    assert len(torch.unique(shares[1])) == 41 * 24  # each once, 16 are left out
    # as many processes as stretches: each reads a quarter of the shards, and parts of two windows
    for rank in range(4):
        assert len(torch.unique(shares[4][:, rank] // 10)) <= 25 + 2 * 5


def test_a_pass_over_shards_starts_at_any_batch() -> None:
    sampler = ShardSampler(torch.arange(20) // 4, batch_size=4, window=2, stretches=1, seed=0)
    whole = list(sampler)
    sampler.epoch, sampler.start = 0, 3
    assert list(sampler) == whole[12:]
