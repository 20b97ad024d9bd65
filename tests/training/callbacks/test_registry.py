import logging
import re

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, TinyNet, loader, trainer

import revzoo
from revzoo.training import Classifier, Footprint, build_callbacks
from revzoo.training.callbacks import registry
from revzoo.training.callbacks.checkpoints import best_checkpoint_path
from revzoo.training.callbacks.early_stopping import EarlyStopping
from revzoo.training.callbacks.registry import CALLBACKS
from revzoo.training.loggers import MetricsCSV
from revzoo.training.resume import GracefulStop

ALL = {name: {} for name in CALLBACKS} | {"side_bits": {"epochs": 1}}

# (first, later, why): all constraints on the order of callbacks
ORDER = (
    ("Footprint", "EpochLog", "the log line shows the figures that Footprint logs"),
    ("GracefulStop", "LastCheckpoint", "all processes agree on a stop before they save"),
    ("FiniteLoss", "LastCheckpoint", "a loss that is not finite ends the run before the save"),
    ("Footprint", "LastCheckpoint", "a checkpoint at the end of an epoch has the epoch's figures"),
    ("BestCheckpoint", "LastCheckpoint", "last.ckpt holds the path of the best checkpoint"),
)


def test_every_name_builds_its_callback(tmp_path):
    built = build_callbacks(ALL, run_dir=tmp_path)
    assert len({type(callback) for callback in built}) == len(CALLBACKS)


def test_none_removes_a_callback(tmp_path):
    assert build_callbacks(dict.fromkeys(CALLBACKS), run_dir=tmp_path) == []


def test_options_reach_the_callback(tmp_path):
    specs = {"early_stopping": {"patience": 3, "monitor": "val/loss", "mode": "min"}}
    (stopping,) = build_callbacks(specs, run_dir=tmp_path)
    assert isinstance(stopping, EarlyStopping)
    assert (stopping.patience, stopping.monitor, stopping.mode) == (3, "val/loss", "min")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ({"best_chekpoint": {}}, r"callbacks\.best_chekpoint: .*did you mean 'best_checkpoint'"),
        (
            {"best_checkpoint": {"mod": "max"}},
            r"callbacks\.best_checkpoint\.mod: .*did you mean 'mode'",
        ),
        ({"footprint": {"x": 1}}, "there is none"),
    ],
)
def test_unknown_names_are_refused(tmp_path, specs, message):
    with pytest.raises(ValueError, match=message):
        build_callbacks(specs, run_dir=tmp_path)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_and_last_are_kept(tmp_path, mode):
    specs = {"best_checkpoint": {"monitor": "val/loss", "mode": mode}, "last_checkpoint": {}}
    callbacks = build_callbacks(specs, run_dir=tmp_path)
    losses = []

    class Losses(pl.Callback):
        def on_validation_end(self, trainer, pl_module):
            losses.append(float(trainer.callback_metrics["val/loss"]))

    runner = trainer(
        tmp_path, enable_checkpointing=True, callbacks=[*callbacks, Losses()], max_epochs=4
    )
    runner.fit(Classifier(TinyNet()), loader(), loader())
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    best = best_checkpoint_path(runner)
    assert best == (tmp_path / "checkpoints" / "best.ckpt").resolve()
    choose = min if mode == "min" else max
    assert torch.load(best, weights_only=True)["epoch"] == losses.index(choose(losses))
    last = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert (last["epoch"], last["global_step"]) == (3, 16)


def test_without_a_monitor_there_is_no_best_checkpoint(tmp_path):
    callbacks = build_callbacks({"last_checkpoint": {}}, run_dir=tmp_path)
    runner = trainer(tmp_path, enable_checkpointing=True, callbacks=callbacks, max_epochs=1)
    runner.fit(Classifier(TinyNet()), loader(), loader())
    assert best_checkpoint_path(runner) is None


def test_one_line_per_epoch(tmp_path, caplog):
    callbacks = build_callbacks({"epoch_log": {}, "footprint": {}}, run_dir=tmp_path)
    with caplog.at_level(logging.INFO, logger="revzoo"):
        trainer(tmp_path, callbacks=callbacks).fit(Classifier(TinyNet()), loader(), loader())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("revzoo")]
    figures = r"loss \d.\d{3}, val \d.\d{3}  acc \d.\d{3}, val \d.\d{3}  [\d.]+ img/s"
    assert [re.sub(figures, "...", line) for line in lines] == ["epoch 1/2  ...", "epoch 2/2  ..."]


def test_figures_of_an_earlier_validation_are_not_logged_again(tmp_path, caplog):
    callbacks = build_callbacks({"epoch_log": {}}, run_dir=tmp_path)
    runner = trainer(tmp_path, callbacks=callbacks, max_epochs=4, check_val_every_n_epoch=2)
    with caplog.at_level(logging.INFO, logger="revzoo"):
        runner.fit(Classifier(TinyNet()), loader(), loader())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("revzoo")]
    assert all("  acc " in line for line in lines)
    assert [", val " in line for line in lines] == [False, True, False, True]


def test_the_order_of_callbacks_holds_in_a_run(tmp_path):
    refuse = {"private", "gradient_noise_scale", "hard_samples", "side_bits"}  # this network
    specs = {name: {} for name in ALL if name not in refuse}
    callbacks = [*build_callbacks(specs, run_dir=tmp_path), GracefulStop()]
    runner = trainer(
        tmp_path,
        callbacks=callbacks,
        enable_checkpointing=True,
        enable_progress_bar=True,
        logger=MetricsCSV(tmp_path / "metrics.csv"),
        fast_dev_run=1,
        limit_train_batches=1,
    )
    seen = []

    class Seen(Classifier):
        def on_fit_start(self):
            seen.extend(self.trainer.callbacks)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        runner.fit(Seen({**TINY, "units": [1, 1, 1]}), loader())
    kinds = [type(callback).__name__ for callback in seen]
    for first, later, why in ORDER:
        assert kinds.index(first) < kinds.index(later), why


def test_a_registered_callback_is_selected_by_name(tmp_path, monkeypatch):
    def confetti(run_dir, *, every=1):
        return Footprint()

    monkeypatch.setattr(registry, "CALLBACKS", dict(CALLBACKS))
    revzoo.register_callback("confetti", confetti)
    (built,) = build_callbacks({"confetti": {"every": 2}}, run_dir=tmp_path)
    assert isinstance(built, Footprint)
    with pytest.raises(ValueError, match=r"confetti\.evry: .*did you mean 'every'"):
        build_callbacks({"confetti": {"evry": 2}}, run_dir=tmp_path)
    with pytest.raises(
        ValueError, match="callback 'ema' is already registered: choose another name"
    ):
        revzoo.register_callback("ema", confetti)
    with pytest.raises(TypeError, match="callback 'lights' is 'on': expected the class, or a"):
        revzoo.register_callback("lights", "on")


@pytest.mark.parametrize("name", ["best_checkpoint", "early_stopping"])
def test_the_direction_follows_from_the_figure(name, tmp_path):
    """The best loss was the largest unless mode=min was given, too."""
    for monitor, mode in (("val/loss", "min"), ("val/acc", "max")):
        (callback,) = build_callbacks({name: {"monitor": monitor}}, run_dir=tmp_path)
        assert callback.mode == mode
