"""The moving average equals its formula at every step."""

import itertools

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier
from revzoo.training.callbacks.ema import AveragedWeights
from revzoo.training.lightning_compat import average_of


class States(pl.Callback):
    """Records the state after every optimiser step, and the average at the end."""

    def __init__(self):
        self.after = []

    def on_train_batch_end(self, trainer, pl_module, *arguments):
        self.after.append({k: v.clone() for k, v in pl_module.state_dict().items()})


def averaged(states, decays):
    average = states[0]
    for state, decay in zip(states[1:], decays, strict=True):
        average = {k: decay * v + (1 - decay) * state[k] for k, v in average.items()}
    return average


@pytest.mark.parametrize("warmup", [True, False])
def test_weights_and_statistics_follow_the_formula_and_counts_are_copied(tmp_path, warmup):
    states, average = States(), AveragedWeights(decay=0.3, warmup=warmup)
    module = Classifier(TinyNet(), optim={"lr": 0.5, "schedule": {"name": "constant"}})
    trainer(tmp_path, callbacks=[states, average]).fit(module, loader(), loader())
    found = module.state_dict()
    assert len(states.after) == 8
    warm = [2 / 11, 3 / 12, 0.3, 0.3, 0.3, 0.3, 0.3]
    expected = averaged(states.after, warm if warmup else [0.3] * 7)
    moved = 0
    for name, value in found.items():
        if value.is_floating_point():
            assert torch.allclose(value, expected[name], rtol=1e-5, atol=1e-6), name
            moved += not torch.allclose(value, states.after[-1][name])
        else:
            assert torch.equal(value, states.after[-1][name]), name
    assert found["model.body.1.num_batches_tracked"] == 8
    assert moved >= 4


def test_the_decay_warms_up():
    average = AveragedWeights(decay=0.99)
    decays = [float(average.decay_after(t)) for t in range(2000)]
    assert decays[:2] == pytest.approx([0.1, 2 / 11])
    assert all(a <= b for a, b in itertools.pairwise(decays))
    assert decays[889] < 0.99
    assert decays[-1] == pytest.approx(0.99)
    constant = AveragedWeights(decay=0.99, warmup=False)
    assert float(constant.decay_after(torch.tensor(1))) == pytest.approx(0.99)


class OnDevice(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, *args):
        (average,) = [c for c in trainer.callbacks if isinstance(c, AveragedWeights)]
        assert {t.device for t in average_of(average).parameters()} == {pl_module.device}
        self.seen = pl_module.device.type


@pytest.mark.gpu
def test_the_average_is_on_the_device_of_the_weights(tmp_path):
    """Lightning kept it on the CPU."""
    check = OnDevice()
    runner = trainer(tmp_path, callbacks=[AveragedWeights(), check], accelerator="gpu")
    runner.fit(Classifier(TinyNet(), optim={"lr": 0.1}), loader())
    assert check.seen == "cuda"


def vector(module):
    return torch.cat([value.flatten().double() for value in module.state_dict().values()])


def fast(seed=0):
    torch.manual_seed(seed)
    return Classifier(TinyNet(), optim={"lr": 0.5, "schedule": {"name": "constant"}})


class Validated(pl.Callback):
    """Records the weights of the last validation; can end it with an exception."""

    def __init__(self, *, fails=False):
        self.fails = fails

    def on_validation_batch_end(self, trainer, pl_module, *args):
        self.of = vector(pl_module)
        if self.fails:
            raise ZeroDivisionError


@pytest.mark.parametrize("how", ["module", "checkpoint"])
def test_after_training_the_module_itself_is_validated_and_saved(tmp_path, how):
    """Lightning validated the average of the earlier training for any module."""
    validated, module, other = Validated(), fast(), fast(1)
    runner = trainer(tmp_path, callbacks=[AveragedWeights(), validated])
    runner.fit(module, loader(), loader())
    path = tmp_path / "other.ckpt"
    saved = {"state_dict": other.state_dict(), "pytorch-lightning_version": pl.__version__}
    torch.save(saved, path)
    given = {"module": {"model": other}, "checkpoint": {"ckpt_path": path}}[how]
    runner.validate(dataloaders=loader(), weights_only=True, verbose=False, **given)
    assert torch.equal(validated.of, vector(other))
    runner.save_checkpoint(path)
    state = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(state[name], value) for name, value in other.state_dict().items())


def test_a_second_training_is_averaged_from_its_start(tmp_path):
    """Lightning did not average before the second fit passed the steps of the first."""
    found = []
    average = AveragedWeights(decay=0.5)
    for callback in (average, average, AveragedWeights(decay=0.5)):
        module = fast()
        trainer(tmp_path, callbacks=[callback]).fit(module, loader())
        found.append(vector(module))
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[2])
    assert not torch.equal(found[1], vector(fast()))


def test_a_validation_that_fails_leaves_the_weights_of_training(tmp_path):
    states, validated, module = States(), Validated(fails=True), fast()
    runner = trainer(tmp_path, callbacks=[AveragedWeights(), states, validated])
    with pytest.raises(ZeroDivisionError):
        runner.fit(module, loader(), loader())
    assert not torch.equal(validated.of, vector(module))
    for name, value in module.state_dict().items():
        assert torch.equal(value, states.after[-1][name]), name
    validated.fails = False
    runner.validate(module, loader(), verbose=False)
    assert torch.equal(validated.of, vector(module))


def test_a_finished_run_that_resumes_ends_with_the_average(tmp_path):
    """Lightning skips the end of a training loop that has no step left."""
    path = tmp_path / "last.ckpt"

    class Save(pl.Callback):
        def on_train_epoch_end(self, trainer, *args):
            trainer.save_checkpoint(path)

    module, again = fast(), fast(1)
    trainer(tmp_path, callbacks=[AveragedWeights(), Save()]).fit(module, loader())
    runner = trainer(tmp_path, callbacks=[AveragedWeights(), Save()])
    runner.fit(again, loader(), ckpt_path=path, weights_only=True)
    assert runner.global_step == 8
    assert torch.equal(vector(again), vector(module))
