"""Hostile checkpoints: each reader refuses wrong content, by name and with its own error."""

import pytest
import torch
from small_task import TINY, TinyNet

from revzoo.models import create_model
from revzoo.training import Classifier
from revzoo.training.checkpoint.files import CheckpointError
from revzoo.training.checkpoint.restore import restore
from revzoo.weights.errors import WeightsError

FIRST, BIAS = "model.stem.steps.0.conv.weight", "model.fc.bias"
DATA = {"classes": ["left", "right"], "normalisation": {"mean": [0.0], "std": [1.0]}}


def from_zoo(path):
    return create_model(**TINY, checkpoint_path=path)


def save(path, hyper=None, **parts):
    """A checkpoint of :data:`TINY`, with some ``parts`` of it replaced."""
    whole = {"state_dict": Classifier(TINY).state_dict(), "Data": DATA}
    hyper = {"hyper_parameters": {"model": {**TINY, **(hyper or {})}}}
    torch.save({**whole, **hyper, **parts}, path)
    return path


READERS = {Classifier.load_from_checkpoint: CheckpointError, restore: CheckpointError}


@pytest.mark.filterwarnings("ignore:Validating sparse tensor:UserWarning")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop(FIRST), rf"1 missing: .*{FIRST[6:]}"),
        (lambda s: s.update({"model.z": torch.ones(1)}), r"1 unexpected: (model\.)?z"),
        (lambda s: s.update({FIRST: torch.ones(7)}), r"another shape.*conv.weight \(file: \(7,\)"),
        (lambda s: s.update({FIRST: s[FIRST].long()}), "int64.* float32"),
        (lambda s: s.update({FIRST: s[FIRST].to(torch.complex64)}), "complex64.* float32"),
        (lambda s: s.update({FIRST: torch.ones(4, 0, 3, 3)}), r"\(4, 0, 3, 3\)"),
        (lambda s: s.update({FIRST: "hello"}), "does not hold only tensors: .*conv.weight"),
        (lambda s: s.update({FIRST: s[FIRST].to_sparse()}), "expected a state_dict: a dense"),
        (lambda s: s.update({FIRST: s[FIRST].to("meta")}), "expected a state_dict: a dense"),
        (lambda s: (s.clear(), s.update({1: 2})), "expected (a state_dict|one)"),
        (lambda s: s[BIAS].fill_(float("nan")), r"NaN or Inf in .*fc.bias \(2 of 2 values\)"),
        (lambda s: s[BIAS][1:].fill_(float("inf")), r"NaN or Inf in .*fc.bias \(1 of 2 values\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, tmp_path):
    change(state := Classifier(TINY).state_dict())
    path = save(tmp_path / "a.ckpt", state_dict=state)
    for read, error in {**READERS, from_zoo: WeightsError}.items():
        with pytest.raises(error, match=rf"(?s)a\.ckpt.*{message}"):
            read(path)


@pytest.mark.parametrize("state", [None, 5, [torch.ones(1)]])
def test_no_state_dict_at_all_is_refused(state, tmp_path):
    path = save(tmp_path / "a.ckpt", state_dict=state)
    for read, error in {**READERS, from_zoo: WeightsError}.items():
        with pytest.raises(error, match=r"a\.ckpt .*state_dict"):
            read(path)


def test_without_strict_shapes_are_still_checked(tmp_path):
    state = Classifier(TINY).state_dict()
    bias = state.pop(BIAS) + 1
    path = save(tmp_path / "a.ckpt", state_dict={**state, "model.z": bias})
    loaded = Classifier.load_from_checkpoint(path, strict=False).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
    path = save(path, state_dict={**state, BIAS: torch.ones(7)})
    with pytest.raises(CheckpointError, match=r"fc.bias \(file: \(7,\)"):
        Classifier.load_from_checkpoint(path, strict=False)


def test_extra_state_is_left_to_its_module(tmp_path):
    class Net(TinyNet):
        word = "new"

        def get_extra_state(self):
            return {"word": self.word}

        def set_extra_state(self, state):
            self.word = state["word"]

    net = Net()
    net.word = "kept"
    path = save(tmp_path / "a.ckpt", state_dict=Classifier(net).state_dict())
    assert Classifier.load_from_checkpoint(path, model=Net()).model.word == "kept"


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        *[({"name": v}, "model.name is refused: got") for v in (["revnet38"], 3, None)],
        *[({"in_chans": v}, "in_chans=.* whole number") for v in ("x", 0, [1], 1.5)],
        *[({"num_classes": v}, "num_classes=.* whole number") for v in ("ten", -1)],
        ({"foo": 1}, "takes no keyword 'foo'"),
        ({"units": 5}, "expected whole numbers >= 1, one for each stage"),
        ({"stem_width": 10**15}, "cannot be created"),
    ],
)
def test_models_that_cannot_be_created_are_refused(hyper, message, tmp_path):
    path = save(tmp_path / "a.ckpt", hyper)
    for read in READERS:
        with pytest.raises(CheckpointError, match=message):
            read(path)


def test_a_wrong_argument_is_the_callers_error(tmp_path):
    path = save(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=r"optim\.lr"):
        Classifier.load_from_checkpoint(path, optim={"lr": "x"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"classes": ["a", "b", "c"]}, "for 2 classes and .*: classes is"),
        ({"classes": 5}, "classes is 5"),
        ({"normalisation": {"mean": "x"}}, "normalisation is .*x"),
        ({"normalisation": {"_target_": "os.system"}}, "normalisation is"),
        ({"normalisation": {"mean": [0.5], "std": [0.0]}}, "normalisation is .*0.0"),
        ({"normalisation": {"mean": [0.5] * 3, "std": [1.0] * 3}}, "1 channels: normalisation is"),
        ({"image_size": "big"}, "image_size is 'big'"),
        ({"in_chans": 3}, "1 channels: in_chans is 3"),
    ],
)
def test_impossible_data_states_are_refused(data, message, tmp_path):
    path = save(tmp_path / "a.ckpt")
    assert restore(path).data_state["classes"] == DATA["classes"]
    save(path, Data={**DATA, **data})
    with pytest.raises(CheckpointError, match=rf"a\.ckpt cannot be used: .*{message}"):
        restore(path)
