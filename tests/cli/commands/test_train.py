import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from small_images import image_folder
from small_run import QUICK, SMALL

from revzoo.cli import schema
from revzoo.cli.main import main
from revzoo.cli.run import multirun
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import Saved, train
from revzoo.data import DataError, Digits, ImageData
from revzoo.training import Classifier
from revzoo.training.callbacks.checkpoints import LastCheckpoint

CONFIGS = Path(__file__).parents[3] / "configs"


def test_a_run_writes_its_configuration_and_figures(compose, tmp_path):
    config = compose(*SMALL, "memory=balanced")
    figures = train(config, run_dir=tmp_path)
    assert {"train/loss", "val/acc", "test/acc", "test/acc5", "test/loss"} <= set(figures)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["metrics"] == figures
    assert (summary["epochs"], summary["steps"]) == (1, 3)
    assert summary["train_seconds"] > 0
    assert (tmp_path / summary["checkpoint"]).name == "best.ckpt"
    assert (tmp_path / summary["checkpoint"]).exists()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert list(tmp_path.glob("*-digits/events.out.tfevents.*"))
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    modes = set(written["memory"].pop("plan").values())  # as it was planned
    assert "store" in modes
    assert modes & {"recompute", "exact"}
    assert written["memory"].pop("planned_for")["input"] == [64, 1, 8, 8]
    config["task"] = "classification"  # of the data
    config["callbacks"]["best_checkpoint"]["monitor"] = "val/acc"
    assert written == config


def test_the_resolved_configuration_repeats_the_run(compose, tmp_path):
    first = train(compose(*QUICK), run_dir=tmp_path / "a")
    config = yaml.safe_load((tmp_path / "a" / "config.yaml").read_text())
    again = train(config, run_dir=tmp_path / "b")
    other = train({**config, "seed": 1}, run_dir=tmp_path / "c")
    for name in ("train/loss_step", "val/loss", "test/loss"):
        assert again[name] == first[name]
        assert other[name] != first[name]


@pytest.mark.parametrize(
    "option",
    [
        "precision=bf16",
        "precision=fp64",
        "optim=cosine",
        "+trainer.fast_dev_run=true",
    ],
)
def test_options_run(option, compose, tmp_path):
    figures = train(compose(*QUICK, option), run_dir=tmp_path)
    assert 0 < figures["test/loss"] < 10


def test_memory_modes_give_the_same_run(compose, tmp_path):
    runs = [
        train(compose(*QUICK, "precision=fp64", f"memory={mode}"), run_dir=tmp_path / mode)
        for mode in ("store", "invert")
    ]
    for name in ("train/loss", "val/loss", "test/loss"):
        assert runs[0][name] == pytest.approx(runs[1][name], abs=1e-6)


def loss_of(checkpoint):
    """The test loss of a checkpoint, in a plain loop."""
    data = Digits()
    data.setup("test")
    module = Classifier.load_from_checkpoint(checkpoint, weights_only=True).eval()
    ((images, labels),) = data.test_dataloader()
    with torch.no_grad():
        logits = module(data.transform(images, training=False))
    return float(torch.nn.functional.cross_entropy(logits, labels))


def test_the_best_checkpoint_is_tested(compose, tmp_path, monkeypatch):
    differ = []
    for mode in ("min", "max"):  # the last epoch cannot be both the minimum and the maximum
        monkeypatch.setitem(schema.MONITORED, "val/loss", mode)
        monitor = (
            "callbacks.best_checkpoint.monitor=val/loss",
            f"callbacks.best_checkpoint.mode={mode}",
        )
        lengths = ("trainer.max_epochs=3", "trainer.limit_test_batches=null")
        run_dir = tmp_path / mode
        figures = train(compose(*QUICK, *monitor, *lengths), run_dir=run_dir)
        best, last = (loss_of(run_dir / "checkpoints" / f"{n}.ckpt") for n in ("best", "last"))
        assert figures["test/loss"] == pytest.approx(best, rel=1e-6)
        differ.append(abs(best - last) > 1e-4)
    assert any(differ)


def ending(config, run_dir):
    """The message of a refused run."""
    message = failing(config, run_dir)
    assert not (run_dir / "summary.json").exists()
    return message


def failing(config, run_dir):
    """The message of a run that is refused or fails."""
    with pytest.raises(SystemExit) as end:
        train(config, run_dir=run_dir)
    assert str(end.value).startswith("revzoo: ")
    return str(end.value)


def test_batches_larger_than_the_set_leave_no_run(compose, tmp_path):
    config = compose(*QUICK, "data.batch_size=2000")
    assert "is more than the 1293 training images" in ending(config, tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.parametrize("weights", ["[1,2]", "balanced"])
def test_weights_that_do_not_fit_the_classes_leave_no_run(weights, compose, tmp_path, monkeypatch):
    def without_nines(self):
        return torch.arange(9)

    monkeypatch.setattr(Digits, "train_labels", property(without_nines))
    expected = {"[1,2]": "expected 10 numbers", "balanced": "no training images of 9: add some"}
    with pytest.raises(SystemExit, match=expected[weights]):
        train(compose(*QUICK, f"optim.class_weights={weights}"), run_dir=tmp_path)
    assert not (tmp_path / "config.yaml").exists()


def test_images_the_model_cannot_take_end_with_its_message(compose, tmp_path):
    root = image_folder(tmp_path / "images", side=7)
    config = compose(*QUICK, "data=imagefolder", f"data.root={root}", "data.batch_size=8")
    assert "7" in ending(config, tmp_path)


def test_divergence_ends_with_advice(compose, tmp_path):
    config = compose(*QUICK, "memory=store", "optim.lr=1e30", "optim.schedule.start=1.0")
    message = failing(config, tmp_path)
    assert "lower optim.lr" in message
    assert "at step 1, in epoch 1" in message
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert message == f"revzoo: {summary['stopped']}"
    assert summary["steps"] == 1


def test_a_run_whose_validations_are_not_finite_fails(compose, tmp_path, monkeypatch):
    """The accuracy of the first class became the best."""

    def loss(self, logits, labels):
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return loss if self.training else loss * float("nan")

    monkeypatch.setattr(Classifier, "loss", loss)
    message = failing(compose(*QUICK), tmp_path)
    assert "val/loss is nan" in message
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert message == f"revzoo: {summary['stopped']}"
    assert summary["checkpoint"] is None
    assert not (tmp_path / "checkpoints" / "best.ckpt").exists()
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()


def test_a_run_that_could_not_write_a_checkpoint_fails(compose, tmp_path, monkeypatch):
    """It ended with status 0."""

    def full(state, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    message = failing(compose(*QUICK), tmp_path)
    assert "No space left on device" in message
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert message == f"revzoo: {summary['stopped']}"
    assert "test/acc" in summary["metrics"]


@pytest.mark.parametrize(("callbacks", "fails"), [("none", False), ("default", True)])
def test_a_run_without_checkpoints_is_a_choice(callbacks, fails, compose, tmp_path):
    """Of a run that keeps only its best checkpoint and does not validate, nothing is left."""
    options = [f"callbacks={callbacks}", "trainer.limit_val_batches=0"]
    if fails:
        options.append("callbacks.last_checkpoint=null")
        assert "callbacks.last_checkpoint" in failing(compose(*QUICK, *options), tmp_path)
    else:
        assert "test/acc" in train(compose(*QUICK, *options), run_dir=tmp_path)


def test_a_run_without_validation_ends_with_commands_for_its_last_checkpoint(
    compose, tmp_path, caplog
):
    with caplog.at_level("INFO", logger="revzoo"):
        train(compose(*QUICK, "trainer.limit_val_batches=0"), run_dir=tmp_path)
    last = str(tmp_path / "checkpoints" / "last.ckpt")
    commands = [m for m in caplog.messages if m.startswith(("predict", "evaluate"))]
    assert [last in command for command in commands] == [True, True]


# the thread of TensorBoard's writer
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_run_whose_folder_is_removed_ends_with_a_whole_one(compose, tmp_path, monkeypatch):
    """TensorBoard's writer ended it with a traceback, and left metrics.csv and summary.json."""
    save = LastCheckpoint.on_train_epoch_end

    def removed(callback, trainer, module):
        if trainer.current_epoch == 0:
            shutil.rmtree(tmp_path / "run")
        save(callback, trainer, module)

    monkeypatch.setattr(LastCheckpoint, "on_train_epoch_end", removed)
    run_dir = tmp_path / "run"
    train(compose(*SMALL, "trainer.max_epochs=2", "test=false"), run_dir=run_dir)
    made_again = {"checkpoints", "metrics.csv", "summary.json"}
    assert made_again <= {path.name for path in run_dir.iterdir()}


def test_a_refused_run_writes_no_summary(compose, tmp_path, monkeypatch):
    config = compose(*QUICK)
    train(config, run_dir=tmp_path)
    before = (tmp_path / "summary.json").read_bytes()
    last = tmp_path / "checkpoints" / "last.ckpt"
    state = torch.load(last, weights_only=True)
    saved = Saved(last, state["global_step"], state["Digits"], state["callbacks"]["RunState"])

    def refuse(*args):
        raise DataError("other classes")

    monkeypatch.setattr(ImageData, "load_state_dict", refuse)
    with pytest.raises(SystemExit, match="other classes"):
        train(config, run_dir=tmp_path, resume=saved)
    assert (tmp_path / "summary.json").read_bytes() == before


def test_exclusive_trainer_options_end_with_lightnings_message(compose, tmp_path):
    config = compose(*QUICK, "trainer.strategy=ddpp")
    assert "ddpp" in ending(config, tmp_path)


def test_full_errors_on_demand(compose, tmp_path, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(ValueError, match="seed=-1"):
        train(compose("seed=-1"), run_dir=tmp_path)


def test_overfit_learns_two_batches_by_heart(compose, tmp_path):
    quick = ("memory=store", "data.batch_size=16", "callbacks=none", "trainer.limit_val_batches=0")
    figures = train(compose("debug=overfit", *QUICK[1:], *quick), run_dir=tmp_path)
    assert figures["train/acc"] == 1.0
    assert "test/acc" not in figures


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["data=cifar10"],
        ["-m", "seed=0,1"],
        ["--help"],
        ["--cfg=job"],
        ["hydra.run.dir=a"],
    ],
)
def test_good_command_lines_pass(arguments, monkeypatch):
    for module, name in ((train_module, "begin"), (multirun, "multirun")):
        monkeypatch.setattr(module, name, lambda *given, **more: None)
    with suppress(SystemExit):
        main(["train", *arguments])


@pytest.mark.slow
def test_the_embedded_default_reaches_97_percent(compose, tmp_path):
    assert train(compose("trainer=cpu"), run_dir=tmp_path)["test/acc"] >= 0.97
