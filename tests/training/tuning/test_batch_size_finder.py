import copy

import pytest
import torch
from small_task import TINY

import revzoo
from revzoo.data import Digits
from revzoo.training import Classifier, tuning
from revzoo.training.tuning import find_batch_size

TEN = {**TINY, "num_classes": 10, "memory": "invert"}
CPU = {"trainer": {"accelerator": "cpu"}}


@pytest.fixture
def data():
    data = Digits()
    data.setup("fit")
    return data


@pytest.mark.parametrize("mode", ["store", "invert"])
def test_a_step_of_the_largest_batch_takes_the_memory(data, mode):
    """Counted as ``audit`` does, with the momentum of SGD; one image more does not fit."""
    module = Classifier({**TEN, "memory": mode})

    def need(images):
        momentum = sum(p.nbytes for p in module.model.parameters())
        shape = (images, 1, 8, 8)
        return revzoo.audit(module.model, shape, modes=[], extra=momentum).peak_bytes

    found = find_batch_size(module, data, max_bytes=2 * need(8), **CPU)
    assert found.limited_by == "memory"
    assert need(found.batch_size) <= 2 * need(8) < need(found.batch_size + 1)


def test_half_precision_doubles_the_batch(data):
    module = Classifier({**TEN, "memory": "store"})
    options = [{**CPU["trainer"], "precision": p} for p in ("32-true", "bf16-mixed")]
    full, half = (find_batch_size(module, data, max_bytes=4e6, trainer=o) for o in options)
    assert 1.3 * full.batch_size < half.batch_size < 2.1 * full.batch_size


def test_other_limits(data, monkeypatch):
    found = find_batch_size(Classifier(TEN), data, max_size=3, **CPU)
    assert (found.batch_size, found.limited_by) == (3, "max_size")
    monkeypatch.setattr(Digits, "train_count", 70)
    found = find_batch_size(Classifier(TEN), data, **CPU)
    assert (found.batch_size, found.limited_by) == (70, "training images")


def test_no_room_raises(data, monkeypatch):
    with pytest.raises(ValueError, match=r"not even a batch of two .* raise tuner\.max_bytes"):
        find_batch_size(Classifier(TEN), data, max_bytes=1e3, **CPU)
    monkeypatch.setattr(tuning, "free_bytes", lambda device: None)
    with pytest.raises(ValueError, match=r"give tuner\.max_bytes"):
        find_batch_size(Classifier(TEN), data, **CPU)


def test_other_errors_pass(data, monkeypatch):
    def broken(*args):
        raise RuntimeError("shapes do not fit")

    module = Classifier(TEN)
    monkeypatch.setattr(type(module.model), "forward", broken)
    with pytest.raises(RuntimeError, match="shapes do not fit"):
        find_batch_size(module, data, **CPU)


def test_arguments_stay_unchanged(data):
    module = Classifier(TEN)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    find_batch_size(module, data, max_size=2, **CPU)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (data.batch_size, data._order_seed, data.trainer) == (64, None, None)
