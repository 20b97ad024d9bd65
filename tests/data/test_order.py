from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from revzoo.data import Augment, Digits
from revzoo.data.errors import DataError
from revzoo.data.folders import Files
from revzoo.data.lazy import FileImages
from revzoo.data.order import EpochSampler, TrainLoader, mixed, once_each, seeded


def order(epoch: int, seed: int = 0) -> list[int]:
    sampler = EpochSampler(20, seed=seed)
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
    sampler = EpochSampler(20, seed=0)
    assert [list(sampler), list(sampler)] == [order(0), order(1)]


def test_processes_share_an_epoch() -> None:
    shares = [list(EpochSampler(21, seed=0, processes=2, rank=rank)) for rank in (0, 1)]
    assert len(shares[0]) == len(shares[1]) == 11
    assert set(shares[0]) | set(shares[1]) == set(range(21))


def test_random_numbers_are_borrowed() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    with seeded(mixed(1, 2)):
        inside = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(1)]), expected)
    with seeded(mixed(1, 2)):
        assert torch.equal(torch.rand(1), inside)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_begins_where_it_is_told_to(workers: int) -> None:
    def labels(first: int) -> list[torch.Tensor]:
        data = Digits(num_workers=workers)
        data.setup("fit")
        loader = data.train_dataloader()
        assert isinstance(loader, TrainLoader)
        loader.first_batch = lambda: first
        return [labels for _, labels in loader]

    torch.manual_seed(0)
    whole, rest = labels(0), labels(15)
    assert len(rest) == len(whole) - 15
    assert all(map(torch.equal, whole[15:], rest))


def test_loading_draws_nothing_from_the_models_generator() -> None:
    data = Digits()
    data.setup("fit")
    before = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader()):
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_files_are_augmented_by_epoch_and_image(tmp_path: Path) -> None:
    noise = torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).numpy()
    Image.fromarray(noise).save(tmp_path / "0.png")
    files = Files([str(tmp_path / "0.png")] * 2, [0, 0])
    images = FileImages(files, classes=["a"], channels=3, size=16, augment=Augment(), training=True)

    def drawn(seed: int) -> list[torch.Tensor]:
        images.begin_epoch(seed)
        return [images[0][0], images[1][0]]

    one, again, other = drawn(1), drawn(1), drawn(2)
    assert torch.equal(one[0], again[0])
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


def of_process(rank: int, processes: int) -> Any:
    return SimpleNamespace(world_size=processes, global_rank=rank)


def test_what_is_evaluated_is_shared_without_repetition() -> None:
    shares = [list(once_each(7, of_process(rank, 3)) or ()) for rank in range(3)]
    assert shares == [[0, 3, 6], [1, 4], [2, 5]]
    assert once_each(7, of_process(0, 1)) is None
    assert once_each(7, None) is None


def test_fewer_images_than_processes_are_refused() -> None:
    with pytest.raises(DataError, match=r"2 images .* 3 processes.*trainer.devices=2 or fewer"):
        once_each(2, of_process(0, 3))
