"""A resumed run equals an uninterrupted run, bit for bit."""

import random

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, trainer

from revzoo.data import Digits
from revzoo.training import Classifier, build_callbacks
from revzoo.training import resume as stop_module
from revzoo.training.checkpoint.files import (
    CheckpointError,
    PlainCheckpointIO,
    read_checkpoint,
)
from revzoo.training.resume import (
    GracefulStop,
    RunState,
    RunStopped,
    generator_states,
    set_generator_states,
)
from revzoo.weights.source import LAST

NET = {**TINY, "num_classes": 10, "dropout": 0.1}
BATCHES = 4  # of an epoch; three epochs
STEPS = {"max_epochs": -1, "max_steps": 10}
SIGTERM = 15
pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")


class StopIn(pl.Callback):
    """Requests a stop during optimiser step ``step``."""

    def __init__(self, stop, step):
        self.stop, self.step = stop, step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            self.stop.requested = SIGTERM


class Rates(pl.Callback):
    """Keeps the rate of each step."""

    def __init__(self, rates):
        self.rates = rates

    def on_train_batch_start(self, trainer, *args):
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(folder, *, stop_in=None, resume=False, rates=None, **options):
    """Weights and figures of a run, or None if it was stopped."""
    pl.seed_everything(99 if resume else 0, workers=True, verbose=False)
    random.seed(1 if resume else 0)
    stop = GracefulStop()
    names = {"best_checkpoint": {}, "last_checkpoint": {}, "ema": options.pop("ema", None)}
    callbacks = build_callbacks(names, run_dir=folder)
    callbacks.append(stop)
    if rates is not None:
        callbacks.append(Rates(rates))
    if stop_in is not None:
        callbacks.insert(0, StopIn(stop, stop_in))
    schedule = {"name": options.pop("schedule", "onecycle")}
    data = Digits(batch_size=32, on_device=options.pop("on_device", "auto"))
    options = {"max_epochs": 3, "limit_train_batches": BATCHES, **options}
    runner = trainer(
        folder,
        enable_checkpointing=True,
        callbacks=callbacks,
        plugins=[PlainCheckpointIO()],
        **options,
    )
    module = Classifier(NET, optim={"lr": 0.1, "schedule": schedule})
    path = folder / "checkpoints" / LAST if resume else None
    try:
        runner.fit(module, datamodule=data, ckpt_path=path, weights_only=True)
    except RunStopped:
        return None
    (state,) = [c for c in runner.callbacks if isinstance(c, RunState)]
    figures = {name: float(v) for name, v in runner.callback_metrics.items()}
    return module.state_dict(), {**state.figures, **figures}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    with torch.random.fork_rng():
        return fit(tmp_path_factory.mktemp("unbroken"))


def assert_same(found, expected):
    assert found is not None
    assert found[1] == expected[1]
    for name, value in expected[0].items():
        assert torch.equal(found[0][name], value), name


@pytest.mark.parametrize(
    ("stop_in", "saved", "patience"),
    [
        (0, 1, 15.0),  # after the first batch
        (5, 6, 15.0),  # in the middle of the second epoch
        (4, 5, 15.0),  # after the first batch of an epoch
        (7, 8, 15.0),  # in an epoch's last batch: its validation is finished
        (7, 4, 0.0),  # its validation is cut off
        (11, 12, 15.0),  # in the last batch of the run
        (11, 8, 0.0),
    ],
)
def test_a_resumed_run_is_bit_equal(stop_in, saved, patience, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(stop_module, "PATIENCE", patience)
    assert fit(tmp_path, stop_in=stop_in) is None
    last = read_checkpoint(tmp_path / "checkpoints" / LAST)
    assert last["global_step"] == saved
    assert_same(fit(tmp_path, resume=True), unbroken)


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_run_with_its_images_on_the_device_is_bit_equal(before, after, unbroken, tmp_path):
    """``auto`` asks what is free, so it may decide otherwise when the run resumes."""
    assert fit(tmp_path, stop_in=5, on_device=before) is None
    assert_same(fit(tmp_path, resume=True, on_device=after), unbroken)


@pytest.mark.filterwarnings("ignore:.*could not find the monitored key:UserWarning")
@pytest.mark.parametrize(
    ("options", "stop_in", "saved"),
    [
        # gradients of half a step are not saved: the step is finished first
        ({"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, 2, 3),
        ({"accumulate_grad_batches": 3}, 2, 3),  # and the last step of an epoch has one batch
        # a validation inside an epoch is finished, and one step after it
        ({"val_check_interval": 2}, 1, 3),
        ({"ema": {"decay": 0.5}}, 5, 6),
        ({"limit_val_batches": 0}, 3, 4),  # after an epoch without a validation
        # a run of max_steps, which ends with a validation inside an epoch
        (STEPS, 5, 6),
        (STEPS, 7, 8),  # in an epoch's last batch
        (STEPS, 9, 10),  # in the last batch of the run
    ],
)
def test_other_intervals_of_validation_are_bit_equal(options, stop_in, saved, tmp_path):
    whole = fit(tmp_path / "whole", **options)
    folder = tmp_path / "broken"
    assert fit(folder, stop_in=stop_in, **options) is None
    last = read_checkpoint(folder / "checkpoints" / LAST)
    assert last["global_step"] == saved
    assert_same(fit(folder, resume=True, **options), whole)


SHORT = {"max_epochs": 1, "limit_train_batches": 2}


def change_saved(folder, change):
    """Change the :class:`RunState` in the checkpoint of a run in ``folder``."""
    path = folder / "checkpoints" / LAST
    state = read_checkpoint(path)
    change(state["callbacks"]["RunState"])
    torch.save(state, path)


@pytest.mark.parametrize(
    ("schedule", "options", "steps"),
    [
        ("onecycle", {"limit_train_batches": 1}, 1),
        ("cosine", {"max_epochs": 2, "limit_train_batches": 3}, 6),
        ("step", {"max_epochs": 3, "accumulate_grad_batches": 2}, 3),
    ],
)
def test_another_number_of_steps_is_refused(schedule, options, steps, tmp_path):
    fit(tmp_path, **SHORT, schedule=schedule)
    path = tmp_path / "checkpoints" / LAST
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match=f"of 2 optimiser steps, this run has {steps}") as got:
        fit(tmp_path, resume=True, schedule=schedule, **{**SHORT, **options})
    assert str(path) in str(got.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize("stop_in", [None, 2])
@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "step"])
def test_a_longer_run_has_the_rates_of_a_run_of_that_length(schedule, stop_in, tmp_path, caplog):
    whole, longer = [], []
    fit(tmp_path / "whole", schedule=schedule, rates=whole, max_epochs=3)
    fit(tmp_path, schedule=schedule, stop_in=stop_in, max_epochs=1)
    with caplog.at_level("INFO"):
        fit(tmp_path, resume=True, schedule=schedule, rates=longer, max_epochs=3)
    assert longer == pytest.approx(whole[-len(longer) :])
    assert len(longer) == 12 - (4 if stop_in is None else stop_in + 1)
    assert f"stretched from 4 to 12 steps, lr is now {longer[0]:.3g}" in caplog.text


def test_with_a_constant_rate_the_number_of_steps_may_change(tmp_path):
    constant = {**SHORT, "schedule": "constant"}
    fit(tmp_path, **constant)
    found = fit(tmp_path, resume=True, **{**constant, "max_epochs": 2})
    assert_same(found, fit(tmp_path / "whole", **{**constant, "max_epochs": 2}))


def test_another_number_of_processes_is_refused_with_other_data(tmp_path):
    fit(tmp_path, **SHORT)
    change_saved(tmp_path, lambda state: state.update(random=state["random"] * 2))
    change_saved(tmp_path, lambda state: state.update(step_images=None))
    with pytest.raises(CheckpointError, match=r"num_nodes = 2, this run has 1: use 2, because"):
        fit(tmp_path, resume=True, **SHORT)


def test_a_checkpoint_without_planned_steps_resumes(unbroken, tmp_path):
    assert fit(tmp_path, stop_in=5) is None
    change_saved(tmp_path, lambda state: state.pop("planned_steps"))
    assert_same(fit(tmp_path, resume=True), unbroken)


def test_random_states_are_restored():
    states = generator_states()
    drawn = (torch.rand(1), np.random.rand(), np.random.randn(), random.random())
    assert (torch.rand(1), random.random()) != (drawn[0], drawn[3])
    set_generator_states(states)
    assert (torch.rand(1), np.random.rand(), np.random.randn(), random.random()) == drawn
