"""``experiment=finetune``: from weights to a checkpoint, and its checks."""

import pytest
import torch
from model_checks import under_published_names
from pytorch_lightning.strategies import SingleDeviceStrategy
from resumed import resume
from small_images import image_folder
from small_run import NO_EXTRAS
from small_weights import small, write_entry

from revzoo.cli.run.build import build_trainer, check_parts
from revzoo.cli.run.train import train
from revzoo.models import create_model, pretrained
from revzoo.training import Classifier
from revzoo.weights.table import WeightsTable

SHORT = ("debug=smoke", "trainer=cpu", *NO_EXTRAS)
FINETUNE = ("experiment=finetune", "model.pretrained=true", *SHORT)


STATISTICS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


@pytest.fixture(autouse=True)
def weights(tmp_path, monkeypatch):
    """A folder with small weights of revnet38, added to the table during a test."""
    write_entry(tmp_path)
    monkeypatch.setattr(pretrained, "SHIPPED", WeightsTable(tmp_path))
    return tmp_path / "revnet38.small.safetensors"


@pytest.mark.parametrize("unfreeze", ["null", "[[0,stages.2],[1,stages.1]]"])
def test_the_experiment_trains_the_parts_of_each_epoch(compose, tmp_path, unfreeze):
    config = compose(*FINETUNE, f"callbacks.finetuning.unfreeze={unfreeze}")
    figures = train(config, run_dir=tmp_path / "run")
    assert 0 < figures["test/loss"] < 10
    module = Classifier.load_from_checkpoint(
        tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True
    )
    now, start = module.model.state_dict(), small().state_dict()
    kept = [name for name in start if not name.startswith(("fc.", "stem."))]
    changed = {".".join(n.split(".")[:2]) for n in kept if not torch.equal(now[n], start[n])}
    assert now["fc.weight"].shape == (10, 8)
    trained = {"stages.2", "norm.weight", "norm.bias", *STATISTICS}
    assert changed == (set() if unfreeze == "null" else trained)


@pytest.mark.parametrize("kind", ["lr", "batch_size"])
def test_a_value_is_searched_with_a_frozen_backbone(kind, compose, tmp_path):
    options = {"lr": "tuner.steps=15", "batch_size": "tuner.max_size=8"}[kind]
    assert train(compose(*FINETUNE, f"tuner={kind}", options), run_dir=tmp_path / "run") == {}
    assert (tmp_path / "run" / "config.yaml").exists()


def test_a_rate_of_no_parameter_is_not_searched(compose, tmp_path):
    muon = ("optim=muon", "tuner=lr", "tuner.steps=15")
    with pytest.raises(SystemExit, match=r"no trained parameter uses optim\.lr"):
        train(compose(*FINETUNE, *muon), run_dir=tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*FINETUNE, "model.pretrained=false"), "would freeze random weights: add model.pretr"),
        ((*FINETUNE, "callbacks.finetuning.unfreeze=[[2,stages.9]]"), "no part 'stages.9'"),
        ((*FINETUNE, "callbacks.finetuning.unfreeze=[4,2]"), "rising order"),
        (
            (*FINETUNE, "callbacks.finetuning.unfreeze=[1,2,3,4,5]"),
            "got 5 epochs, expected at most 4",
        ),
        ((*FINETUNE, "optim.layer_decay=0"), r"optim\.layer_decay=0"),
        ((*FINETUNE, "data.augment.mixup=-1"), r"augment\.mixup=-1"),
    ],
)
def test_wrong_options_are_refused(compose, overrides, message):
    with pytest.raises(ValueError, match=message):
        check_parts(compose(*overrides))


def test_a_file_of_weights_is_accepted(compose, weights):
    check_parts(compose(*FINETUNE, "model.pretrained=false", f"+model.checkpoint_path={weights}"))


SMALL_PYRAMID = {
    "channels": [48, 16],
    "head_channels": [16, 16],
    "features": 32,
    "fusions": 1,
    "blocks": 1,
}


@pytest.mark.parametrize("epochs", [1, 3])
def test_a_published_backbone_trains_its_classifier_first_then_all_at_falling_rates(
    compose, tmp_path, epochs
):
    network = create_model("revbifpn_s0", num_classes=7, **SMALL_PYRAMID)
    start = network.state_dict()
    torch.save({"epoch": 1, "state_dict": under_published_names(network)}, tmp_path / "s0.pth.tar")
    root = image_folder(tmp_path / "images", splits=("train",), side=16)
    small_images = ("data.image_size=16", "data.batch_size=2", "data.num_workers=0")
    config = compose(
        "experiment=finetune_backbone",
        *SHORT,
        f"data.root={root}",
        *small_images,
        f"+model.checkpoint_path={tmp_path / 's0.pth.tar'}",
        *(f"+model.{key}={str(value).replace(' ', '')}" for key, value in SMALL_PYRAMID.items()),
        "trainer.limit_train_batches=2",
        f"trainer.max_epochs={epochs}",
    )
    train(config, run_dir=tmp_path / "run")
    last = torch.load(tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True)
    now = Classifier.load_from_checkpoint(
        tmp_path / "run" / "checkpoints" / "last.ckpt", weights_only=True
    ).model.state_dict()
    kept = [name for name in start if not name.startswith("fc.")]
    changed = [name for name in kept if not torch.equal(now[name], start[name])]
    assert now["fc.weight"].shape == (2, 32)
    assert changed == ([] if epochs == 1 else kept), "the backbone thaws in epoch 3"
    (optimizer,) = last["optimizer_states"]
    rates = {g["name"].partition("/")[0]: g["initial_lr"] for g in optimizer["param_groups"]}
    names = ["fc", "stages.1", "stages.0"]
    expected = {name: 5e-4 * 0.7**depth for depth, name in enumerate(names)}
    assert rates == pytest.approx(expected)


PRETRAINED = ("model.checkpoint_path=a.safetensors",)


@pytest.mark.parametrize(
    ("trainer", "unused"),
    [
        (("trainer=cpu",), None),
        (("trainer.devices=auto",), None),
        (("trainer.devices='1'",), None),
        (("trainer.devices=2",), True),
        (("trainer.num_nodes=2",), True),
        (("trainer=ddp",), True),
        (("trainer.strategy=ddp_spawn",), True),
    ],
)
def test_frozen_parameters_may_be_unused_in_several_processes(compose, tmp_path, trainer, unused):
    config = compose("experiment=finetune", *trainer, *PRETRAINED, "trainer.accelerator=cpu")
    strategy = build_trainer(config, run_dir=tmp_path).strategy
    kept = getattr(strategy, "_ddp_kwargs", {}).get("find_unused_parameters")
    assert kept is unused


@pytest.mark.parametrize("devices", ["auto", "[0]", "'0,'", "1"])
def test_one_gpu_trains_without_distributed_data_parallel(compose, tmp_path, monkeypatch, devices):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    chosen = ("trainer=gpu", f"trainer.devices={devices}", "trainer.cuda_graph=false")
    config = compose("experiment=finetune", *chosen, *PRETRAINED)
    strategy = build_trainer(config, run_dir=tmp_path).strategy
    assert isinstance(strategy, SingleDeviceStrategy)


def test_a_resumed_run_names_its_checkpoint_and_no_random_classifier(compose, tmp_path, caplog):
    """It looked as if the training were lost: only the weights of its start were named."""
    caplog.set_level("INFO", logger="revzoo")
    run = tmp_path / "run"
    train(compose(*FINETUNE), run_dir=run)
    assert "the classifier starts from random weights" in caplog.text
    assert "parameters, from revnet38.small" in caplog.text
    caplog.clear()
    resume(run)
    assert "random weights" not in caplog.text
    assert f"parameters, from {run}/checkpoints/last.ckpt" in caplog.text
