import copy
from dataclasses import replace

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY
from torch.nn import functional

from revzoo.data import Digits
from revzoo.training import Classifier
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.optim.optimizers import build_optimizer
from revzoo.training.tuning import LRCurve, _Sweep, find_lr, rates_at

CPU = {"accelerator": "cpu"}
TEN = {**TINY, "num_classes": 10, "memory": "invert"}


@pytest.fixture
def data():
    digits = Digits(augment={"crop_padding": 0, "flip": False})
    digits.setup("fit")
    return digits


def test_arguments_stay_unchanged(data):
    module = Classifier(TEN, optim={"lr": 0.3})
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    curve = find_lr(module, data, steps=15, trainer=CPU)
    assert len(curve.rates) == 15
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert module.optim.lr == 0.3
    assert (data._order_seed, data.trainer) == (None, None)


def test_gradients_are_clipped_as_in_the_run(data):
    module, clipped = Classifier(TEN), {**CPU, "gradient_clip_val": 1e-3}
    norm, again, value = (
        find_lr(module, data, steps=15, trainer={**clipped, "gradient_clip_algorithm": kind})
        for kind in ("norm", "norm", "value")
    )
    assert norm.losses == again.losses
    assert norm.losses != value.losses


def test_a_step_of_more_batches_than_an_epoch_has_is_swept(data):
    """The curve was empty, and ended in a traceback."""
    data.batch_size = 512  # two batches
    module, trainer = Classifier(TEN), {**CPU, "accumulate_grad_batches": 64}
    assert len(find_lr(module, data, steps=15, trainer=trainer).rates) == 15


def test_the_curve_begins_with_the_first_loss(data):
    module = Classifier(TEN)
    images, labels = next(iter(copy.copy(data).train_dataloader()))
    model = copy.deepcopy(module.model).train()
    loss = functional.cross_entropy(model(data.transform(images, training=True)), labels)
    curve = find_lr(module, data, steps=15, trainer=CPU)
    assert curve.losses[0] == pytest.approx(loss.item(), rel=1e-5)


def test_the_rates_span_the_sweep(data):
    curve = find_lr(Classifier(TEN), data, min_lr=1e-3, max_lr=1.0, steps=20, trainer=CPU)
    assert curve.rates[0] == pytest.approx(1e-3)
    assert curve.rates[-1] == pytest.approx(1.0)


def test_a_sweep_ends_where_training_diverges(data):
    curve = find_lr(Classifier(TEN), data, max_lr=1e30, steps=30, trainer=CPU)
    assert len(curve.rates) < 30
    assert all(loss < float("inf") for loss in curve.losses)


@pytest.mark.parametrize(
    "optim",
    [
        {"name": "muon", "lr": 0.03, "sgd_lr": 0.1},
        {"lr": 0.2, "layer_decay": 0.5},
    ],
)
def test_each_group_follows_the_recipe(optim):
    """Lightning gave all groups one rate: sgd_lr and layer_decay had no effect in the sweep."""
    module, sweep = Classifier(TEN, optim=optim), _Sweep([0.7])
    runner = None
    optimizer = build_optimizer(module.model, module.optim)
    sweep.on_before_optimizer_step(runner, module, optimizer)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert rates == rates_at(module, replace(module.optim, lr=0.7))
    assert len(set(rates)) > 1
    assert min(rates) < 0.7
    assert 0.1 in rates or "layer_decay" in optim


def curve_of(losses):
    return LRCurve(tuple(10.0**i for i in range(len(losses))), tuple(losses))


def test_the_steepest_fall_is_suggested():
    # per rate, not per its logarithm, the small fall after the skipped steps would win
    losses = [9.0] * 11 + [8.9, 8.8, 7.0, 5.0, 4.0, 3.9, 6.0]
    assert curve_of(losses).suggestion == pytest.approx(10.0**13)
    assert curve_of([1.0 + i for i in range(18)]).suggestion is None
    assert curve_of([1.0, 0.5]).suggestion is None


def test_a_curve_is_written(tmp_path):
    table, picture = curve_of([2.0 - 0.1 * i for i in range(15)]).write(tmp_path)
    lines = table.read_text().splitlines()
    assert lines[:2] == ["lr,loss", "1.0,2.0"]
    assert len(lines) == 16
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("options", [{"min_lr": 0.0}, {"max_lr": 1e-9}, {"steps": 5}])
def test_a_wrong_range_is_refused(data, options):
    with pytest.raises(ValueError, match="expected"):
        find_lr(Classifier(TEN), data, **options)


MUON = {"name": "muon", "lr": 0.03, "sgd_lr": 0.1}


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_a_sweep_that_moves_no_rate_is_refused(data):
    """With Muon, a classifier trains at sgd_lr: the sweep suggested a random rate."""
    module = Classifier(TEN, optim=MUON)
    finetuning = Finetuning(unfreeze=[1])
    finetuning.freeze(module.model, epoch=0)
    with pytest.raises(ValueError, match=r"no trained parameter uses .* optim\.sgd_lr=0\.1\."):
        find_lr(module, data, steps=15, trainer=CPU)
    finetuning.freeze(module.model, epoch=1)
    assert len(find_lr(module, data, steps=15, trainer=CPU).rates) == 15


def test_a_sweep_without_a_range_is_refused(data):
    with pytest.raises(ValueError, match=r"max_lr=0\.1: expected a number in \(0\.1"):
        find_lr(Classifier(TEN), data, min_lr=0.1, max_lr=0.1)


def test_a_training_step_of_ones_own_is_swept(data):
    """The finder trained a plain classifier instead."""

    class Own(Classifier):
        def training_step(self, batch, batch_idx):
            return 2 * super().training_step(batch, batch_idx)

    module = Own(TEN)
    module.trainer = runner = pl.Trainer(logger=False)
    plain = Classifier(copy.deepcopy(module.model))
    double, single = (find_lr(m, data, steps=15, trainer=CPU) for m in (module, plain))
    assert double.losses[0] == pytest.approx(2 * single.losses[0])
    assert module.trainer is runner
