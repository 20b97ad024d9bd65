import re

import pytest
import torch
from small_task import TINY, loader, trainer

import revzoo
from revzoo.data import Digits
from revzoo.models import create_model
from revzoo.training import Classifier
from revzoo.training.checkpoint.files import (
    CheckpointError,
    PlainCheckpointIO,
)
from revzoo.training.checkpoint.restore import restore
from revzoo.weights.errors import EntryError

NET = {**TINY, "num_classes": 10}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    runner = trainer(folder, max_epochs=1, limit_train_batches=1, plugins=[PlainCheckpointIO()])
    module, data = Classifier(NET), Digits()
    runner.fit(module, datamodule=data)
    runner.save_checkpoint(folder / "a.ckpt", weights_only=False)
    return folder / "a.ckpt", module, data


def test_model_classes_and_normalisation_come_back(saved):
    path, module, data = saved
    restored = restore(path)
    assert restored.data_state["classes"] == data.classes
    assert restored.data_state["normalisation"] == data.normalisation.state_dict()
    assert (restored.image_size, restored.in_chans) == (8, 1)
    images = torch.randn(2, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(restored.module(images), module.eval()(images))


def test_the_message_for_a_checkpoint_of_another_data_module_shows_how_to_use_it(tmp_path):
    """No message named the way from a training with one's own data to revzoo predict."""
    runner = trainer(tmp_path, max_epochs=1, plugins=[PlainCheckpointIO()])
    runner.fit(Classifier(TINY), loader(16))
    runner.save_checkpoint(path := tmp_path / "own.ckpt", weights_only=False)
    with pytest.raises(CheckpointError, match="your own DataModule") as caught:
        restore(path)
    names = {"Classifier": Classifier, "FOLDER": tmp_path / "net"}
    run_message(caught.value, names, classes=["left", "right"], mean=[0.5], std=[0.25])
    restored = restore(tmp_path / "net")
    assert restored.data_state["classes"] == ["left", "right"]
    assert restored.data_state["normalisation"] == {"mean": [0.5], "std": [0.25]}


def test_the_message_for_weights_without_facts_adds_them(tmp_path):
    """The message asked for fields in NAME.json, but the folder holds config.json."""
    create_model(**TINY).save_pretrained(tmp_path / "bare", mean=[0.5])
    with pytest.raises(EntryError, match="bare lacks classes, std: add") as caught:
        restore(tmp_path / "bare")
    names = {"revzoo": revzoo, "FOLDER": tmp_path / "net"}
    run_message(caught.value, names, classes=["left", "right"], std=[0.25])
    facts = restore(tmp_path / "net").facts
    assert (facts["classes"], facts["mean"], facts["std"]) == (("left", "right"), (0.5,), (0.25,))


def run_message(error, names, **facts):
    """Run the Python of a message, with these facts for its ``[...]``."""
    found = re.search(r"(model = .*), then (model\.save_pretrained\(.*\)), and give", str(error))
    assert found, error
    assert re.findall(r"(\w+)=\[\.\.\.\]", found[2]) == list(facts)
    call = re.sub(r"(\w+)=\[\.\.\.\]", lambda m: f"{m[1]}={facts[m[1]]}", found[2])
    exec(f"{found[1]}\n{call}", names)
