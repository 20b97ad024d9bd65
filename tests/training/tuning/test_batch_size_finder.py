from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small_task import TINY

from revzoo.data import Digits
from revzoo.training import Classifier
from revzoo.training.tuning import batch_size_finder
from revzoo.training.tuning.batch_size_finder import (
    FIXED_COPIES,
    NoRoomError,
    _Limit,
    find_batch_size,
)

TEN = {**TINY, "num_classes": 10, "memory": "invert"}
CPU: dict[str, Any] = {"trainer": {"accelerator": "cpu"}}


@pytest.fixture
def data() -> Digits:
    return digits()


def digits() -> Digits:
    data = Digits()
    data.setup("fit")
    return data


@pytest.fixture(scope="module")
def each() -> dict[str, float]:
    """The bytes of one image in each mode, counted once."""
    return batch_size_finder.counted(Classifier(TEN), digits(), {})


@pytest.fixture
def module() -> Classifier:
    return Classifier(TEN)


def with_room(monkeypatch: pytest.MonkeyPatch, room: int, taken: Any = None) -> None:
    monkeypatch.setattr(batch_size_finder, "room_on", lambda device, max_bytes: room)
    monkeypatch.setattr(_Limit, "taken", taken or (lambda self: None))


def count_quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the search ends for another reason, do not count each mode: it takes seconds."""
    monkeypatch.setattr(batch_size_finder, "counted", lambda *_: {"invert": 5000, "store": 9000})


def fixed(module: Classifier) -> int:
    return FIXED_COPIES * sum(p.nbytes for p in module.parameters())


def test_the_count_ends_the_search(
    data: Digits, module: Classifier, each: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert each["invert"] < each["store"]
    with_room(monkeypatch, fixed(module) + int(5.5 * each["invert"]))
    found = find_batch_size(module, data, **CPU)
    assert (found.batch_size, found.limited_by) == (5, "memory")
    assert found.largest["invert"] == 5
    assert found.largest["store"] == int(5.5 * each["invert"] // each["store"])


def test_the_memory_of_a_trial_ends_the_search(
    data: Digits, module: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the count all images fit, but the process grows more."""
    count_quickly(monkeypatch)
    monkeypatch.setattr(Digits, "train_count", 16)
    with_room(monkeypatch, 5 * 10**6, lambda limit: 10**6 * limit.tried)
    found = find_batch_size(module, data, **CPU)
    assert (found.batch_size, found.limited_by) == (5, "memory")


def test_other_limits(data: Digits, module: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    count_quickly(monkeypatch)
    with_room(monkeypatch, 2**34)
    found = find_batch_size(module, data, max_size=3, **CPU)
    assert (found.batch_size, found.limited_by) == (3, "max_size")
    monkeypatch.setattr(Digits, "train_count", 5)
    found = find_batch_size(module, data, **CPU)
    assert (found.batch_size, found.limited_by) == (5, "training images")


def test_no_room_raises(data: Digits, module: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    count_quickly(monkeypatch)
    with_room(monkeypatch, fixed(module))
    with pytest.raises(NoRoomError, match=r"raise tuner\.max_bytes \(8000000\) or"):
        find_batch_size(module, data, max_bytes=8_000_000, **CPU)
    monkeypatch.undo()
    monkeypatch.setattr(batch_size_finder, "free_bytes", lambda device: None)
    with pytest.raises(NoRoomError, match="needs Linux"):
        find_batch_size(module, data, **CPU)


def test_arguments_stay_unchanged(data: Digits, module: Classifier) -> None:
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    find_batch_size(module, data, max_size=2, **CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (data.batch_size, data._order_seed, data.trainer) == (64, None, None)


def test_float64_takes_twice_as_much(
    data: Digits, module: Classifier, each: dict[str, float]
) -> None:
    wide = batch_size_finder.counted(module, data, {"precision": "64-true"})
    assert wide == {mode: 2 * narrow for mode, narrow in each.items()}


def test_the_room_is_max_bytes_minus_present_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size_finder, "resident_bytes", lambda: 300)
    assert batch_size_finder.room_on(torch.device("cpu"), 1000) == 700
    assert batch_size_finder.room_on(torch.device("cpu"), 200) == 0
    monkeypatch.setattr(batch_size_finder, "free_bytes", lambda device: 1000)
    assert batch_size_finder.room_on(torch.device("cpu"), None) == 800
