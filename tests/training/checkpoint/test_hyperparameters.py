"""Hostile checkpoints: their hyperparameters cannot import or call code."""

import sys

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, TinyNet

from revzoo.data import Digits
from revzoo.training import Classifier
from revzoo.training.checkpoint.files import CheckpointError, write_checkpoint
from revzoo.training.checkpoint.restore import restore

SHARED = {"name": "constant", "_target_": "hostile.act"}


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    """A module ``hostile`` that makes files when imported or called; returns their folder."""
    traces = tmp_path / "traces"
    traces.mkdir()
    (tmp_path / "hostile.py").write_text(
        "from pathlib import Path\n"
        f"folder = Path({str(traces)!r})\n"
        "(folder / 'imported').touch()\n"
        "def act(*args, **kwargs):\n"
        "    (folder / 'called').touch()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile", raising=False)
    return traces


def checkpoint(path, hyper, **others):
    version = {"pytorch-lightning_version": pl.__version__}
    state = {"state_dict": Classifier(TINY).state_dict(), "hyper_parameters": hyper}
    write_checkpoint({**version, **state, **others}, path)
    return path


@pytest.mark.parametrize(
    ("hyper", "message"),
    [
        ({"model": TINY, "_target_": "hostile.act"}, "hyperparameter _target_ is refused"),
        ({"model": TINY, "_instantiator": "hostile.act"}, "_instantiator is refused"),
        ({"model": {**TINY, "name": "hostile"}}, "model.name is refused"),
        ({"model": {**TINY, "name": "${oc.env:HOME}"}}, "model.name is refused"),
        ({"model": {**TINY, "checkpoint_path": "hostile"}}, "model.checkpoint_path is refused"),
        ({"model": {**TINY, "pretrained": True}}, "model.pretrained is refused"),
        ({"model": {**TINY, "norm": {"_target_": "hostile.act"}}}, "model.norm is refused"),
        ({"model": {**TINY, "units": [1, {"_target_": "x"}]}}, "model.units is refused"),
        ({"model": {**TINY, "_target_": "hostile.act"}}, "no keyword '_target_'"),
        ({"model": {**TINY, "norm": "hostile.act"}}, "cannot be created .*norm=hostile.act"),
        ({"model": {**TINY, "norm": "${hostile}"}}, "cannot be created .*norm="),
        ({"model": TINY, "optim": {"name": "hostile.act"}}, "cannot be created .*optim.name"),
        ({"model": TINY, "optim": {"_partial_": True}}, "optim._partial_"),
        ({"model": TINY, "optim": {"schedule": SHARED}}, "optim.schedule._target_"),
        ({"model": TINY, "optim": {"schedule": "hostile.act"}}, "schedule='hostile.act': expected"),
    ],
)
def test_references_are_refused_before_anything_is_imported(hyper, message, hostile, tmp_path):
    path = checkpoint(tmp_path / "a.ckpt", hyper)
    for read in (Classifier.load_from_checkpoint, restore):
        with pytest.raises(CheckpointError, match=message):
            read(path)
    assert "hostile" not in sys.modules
    assert list(hostile.iterdir()) == []


@pytest.mark.parametrize("key", ["hparams", "module_arguments", "hparams_name", "hparams_type"])
def test_lightnings_older_keys_are_ignored(key, hostile, tmp_path):
    content = {"_instantiator": "hostile.act"} if key[-1] == "s" else "hostile.act"
    path = checkpoint(tmp_path / "a.ckpt", {"model": TINY}, **{key: content})
    assert Classifier.load_from_checkpoint(path).model.num_classes == 2
    assert list(hostile.iterdir()) == []


def test_arguments_override_the_file(tmp_path):
    path = checkpoint(tmp_path / "a.ckpt", {"model": TINY, "optim": {"lr": 0.3}})
    assert Classifier.load_from_checkpoint(path).optim.lr == 0.3
    assert Classifier.load_from_checkpoint(path, optim={"lr": 0.1}).optim.lr == 0.1
    state = Classifier(net := TinyNet()).state_dict()
    write_checkpoint({"state_dict": state, "hyper_parameters": {"optim": {}}}, path)
    with pytest.raises(CheckpointError, match="no hyperparameters of a model"):
        Classifier.load_from_checkpoint(path)
    loaded = Classifier.load_from_checkpoint(path, model=TinyNet(), weights_only=True)
    assert torch.equal(loaded.model.head.weight, net.head.weight)


def test_data_modules_do_not_load_from_a_checkpoint(tmp_path, hostile):
    hyper = {"datamodule_hyper_parameters": {"_instantiator": "hostile.act"}}
    path = checkpoint(tmp_path / "a.ckpt", {"model": TINY}, **hyper)
    with pytest.raises(NotImplementedError, match=r"make Digits\(...\)"):
        Digits.load_from_checkpoint(path)
    assert list(hostile.iterdir()) == []


def test_a_name_of_weights_is_kept_as_its_architecture(tmp_path):
    module = Classifier({"name": "irevnet13.digits", "in_chans": 1})
    assert module.hparams["model"]["name"] == "irevnet13"
    write_checkpoint(
        {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)},
        tmp_path / "a.ckpt",
    )
    assert Classifier.load_from_checkpoint(tmp_path / "a.ckpt").model.num_classes == 10


def test_parameters_of_a_subclass_are_passed_again(tmp_path):
    class Own(Classifier):
        def __init__(self, model, alpha: float = 0.5, **options):
            super().__init__(model, **options)
            self.alpha = alpha

    path = checkpoint(tmp_path / "a.ckpt", {"model": TINY, "alpha": 0.7})
    with pytest.raises(CheckpointError, match=r"to load_from_checkpoint: alpha=\.\.\."):
        Own.load_from_checkpoint(path)
    assert Own.load_from_checkpoint(path, alpha=0.7).alpha == 0.7
