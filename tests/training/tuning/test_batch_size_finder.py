from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_task import TINY

from revzoo.data import Digits
from revzoo.training import Classifier
from revzoo.training.process_memory import release_memory, status_bytes
from revzoo.training.tuning import batch_size_finder
from revzoo.training.tuning.batch_size_finder import find_batch_size

TEN = {**TINY, "num_classes": 10, "memory": "invert"}
CPU: dict[str, Any] = {"trainer": {"accelerator": "cpu"}}


@pytest.fixture
def data() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


def test_memory_ends_the_search_on_the_cpu(data: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process grows by what a trial takes, so 8 MB an image leave room for 50."""
    sizes = []

    class Heavy(batch_size_finder.Trial):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            ballast = torch.ones(len(batch[0]), 8 * 10**6, dtype=torch.uint8)
            return super().training_step(batch, batch_idx) + 0 * ballast[0, 0]

    monkeypatch.setattr(batch_size_finder, "Trial", Heavy)
    release_memory()
    limit = (status_bytes("VmRSS") or 0) + 400 * 10**6
    found = find_batch_size(Classifier(TEN), data, max_bytes=limit, **CPU)
    assert found.limited_by == "memory"
    assert 25 <= found.batch_size <= 50
    assert max(sizes) < 64  # extrapolated, not tried: the system might kill the process


@pytest.mark.parametrize("largest", [5, 64, 100, 1000])
def test_an_error_ends_the_search(
    data: Digits, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found within a sixteenth: the last few images are not worth the time."""
    sizes = []

    class Greedy(batch_size_finder.Trial):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            sizes.append(len(batch[0]))
            if sizes[-1] > largest:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return super().training_step(batch, batch_idx)

    monkeypatch.setattr(batch_size_finder, "Trial", Greedy)
    found = find_batch_size(Classifier(TEN), data, **CPU)
    assert largest * 15 / 16 <= found.batch_size <= largest
    assert found.limited_by == "memory"
    assert found.batch_size in sizes


def test_other_limits(data: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_batch_size(Classifier(TEN), data, max_size=3, **CPU)
    assert (found.batch_size, found.limited_by) == (3, "max_size")
    monkeypatch.setattr(Digits, "train_count", 70)
    found = find_batch_size(Classifier(TEN), data, **CPU)
    assert (found.batch_size, found.limited_by) == (70, "training images")


def test_no_room_raises(data: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"not even a batch of two .* raise tuner\.max_bytes"):
        find_batch_size(Classifier(TEN), data, max_bytes=1e6, **CPU)
    monkeypatch.setattr(batch_size_finder, "free_bytes", lambda: None)
    with pytest.raises(ValueError, match="needs Linux"):
        find_batch_size(Classifier(TEN), data, **CPU)


def test_other_errors_pass(data: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise RuntimeError("shapes do not fit")

    module = Classifier(TEN)
    monkeypatch.setattr(type(module.model), "forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        find_batch_size(module, data, **CPU)


def test_arguments_stay_unchanged(data: Digits) -> None:
    module = Classifier(TEN)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    find_batch_size(module, data, max_size=2, **CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (data.batch_size, data._order_seed, data.trainer) == (64, None, None)
