import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer
from torch import nn

import revzoo
from revzoo.layers.side_bits import SideBits
from revzoo.training import BatchNormMomentum, Classifier
from revzoo.training.callbacks.side_bits import AnnealedBits
from revzoo.training.checkpoint.files import read_checkpoint

OPTIM = {"lr": 0.01, "schedule": {"name": "constant"}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        return x + self.conv(x).tanh()


class Net(TinyNet):
    def __init__(self):
        super().__init__()
        self.body.extend([nn.Sequential(*(Block() for _ in range(3)))])


class Bits(pl.Callback):
    def __init__(self):
        self.values = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.values.append({m.bits for m in pl_module.modules() if isinstance(m, SideBits)})


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"epochs": 2, "most": 8}, [4, 4, 6, 8]), ({"epochs": 9, "most": 6}, [5, 6, 6, 6])],
)
def test_bits_rise_over_the_last_epochs(tmp_path, options, expected):
    module = Classifier(revzoo.make_reversible(Net(), 4), optim=OPTIM)
    callbacks = [AnnealedBits(**options), seen := Bits()]
    trainer(tmp_path, max_epochs=4, callbacks=callbacks).fit(module, loader(16))
    assert seen.values == [{bits} for bits in expected]


def test_checkpoints_say_the_bits_of_their_weights(tmp_path):
    spec = {"name": "torchvision:resnet18", "num_classes": 2, "in_chans": 1}
    module = Classifier({**spec, "reversible_bits": 2}, optim=OPTIM)
    fit = trainer(tmp_path, max_epochs=1, callbacks=[AnnealedBits(epochs=1, most=5)])
    fit.fit(module, loader(16))
    fit.save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    assert {m.bits for m in again.modules() if isinstance(m, SideBits)} == {5}
    other = Classifier({**spec, "reversible_bits": 2}, optim=OPTIM)
    other.on_load_checkpoint(read_checkpoint(tmp_path / "last.ckpt"))
    assert {m.bits for m in other.modules() if isinstance(m, SideBits)} == {5}


def test_a_checkpoint_has_the_bits_that_the_module_has_when_it_is_saved(tmp_path):
    """Only the callback recorded them, so a run without it saved the bits of its start."""
    spec = {"name": "torchvision:resnet18", "num_classes": 2, "in_chans": 1, "reversible_bits": 2}
    module = Classifier(spec, optim=OPTIM)
    fit = trainer(tmp_path, max_epochs=1)
    fit.fit(module, loader(16))
    for step in module.modules():
        if isinstance(step, SideBits):
            step.bits = 7
    fit.save_checkpoint(tmp_path / "last.ckpt")
    again = Classifier.load_from_checkpoint(tmp_path / "last.ckpt")
    assert {m.bits for m in again.modules() if isinstance(m, SideBits)} == {7}
    assert again.hparams["model"]["reversible_bits"] == 7
    assert module.hparams["model"]["reversible_bits"] == 2


def test_what_cannot_be_annealed(tmp_path):
    for options in ({"epochs": 0}, {"epochs": 1, "most": 9}, {"epochs": 1, "most": 0}):
        with pytest.raises(ValueError, match="expected"):
            AnnealedBits(**options)
    fit = trainer(tmp_path, callbacks=[AnnealedBits(epochs=1)])
    with pytest.raises(ValueError, match=r"no blocks with side bits: give model.reversible_bits"):
        fit.fit(Classifier(TinyNet(), optim=OPTIM), loader(16))


def norms_of(module):
    return [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]


def test_statistics_are_the_average_over_the_batches():
    net = nn.Sequential(nn.BatchNorm2d(2), nn.Dropout(0.5), nn.BatchNorm2d(2))
    net[0].momentum = 0.3
    net[2].eval()
    batches = [torch.randn(4, 2, 5, 5) + k for k in range(3)]
    revzoo.recalibrate_batch_norm(net, batches)
    expected = torch.stack([b.mean((0, 2, 3)) for b in batches]).mean(0)
    assert torch.allclose(net[0].running_mean, expected, atol=1e-6)
    assert (net[2].running_mean.abs() < 1e-5).all()  # of what dropout left as it is
    assert (net[0].momentum, net[0].training, net[2].training) == (0.3, True, False)
    before = net[0].running_mean.clone()
    revzoo.recalibrate_batch_norm(net, [(images, torch.zeros(4)) for images in batches])
    assert torch.equal(net[0].running_mean, before)
    with pytest.raises(ValueError, match="batches is empty"):
        revzoo.recalibrate_batch_norm(net, [])
    assert torch.equal(net[0].running_mean, before)  # an error changes nothing


def test_a_run_may_begin_with_new_statistics(tmp_path):
    found = []
    for batches in (0, 2):
        torch.manual_seed(0)
        module = Classifier(Net(), optim={**OPTIM, "lr": 1e-9})
        callbacks = [BatchNormMomentum(momentum=1e-6, warmup=False, recalibrate=batches)]
        trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader(32))
        found.append(norms_of(module)[0].running_mean)
    assert found[0].abs().max() < 1e-5
    assert found[1].abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint")
def test_a_run_resumed_inside_an_epoch_has_the_bits_of_the_epoch(tmp_path):
    """Lightning skips on_train_epoch_start, so an instance of a module had the first bits."""

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 6:
                trainer.save_checkpoint(tmp_path / "middle.ckpt")

    def fit(**options):
        module = Classifier(revzoo.make_reversible(Net(), 4), optim=OPTIM)
        callbacks = [AnnealedBits(epochs=2, most=8), seen := Bits(), Save()]
        trainer(tmp_path, max_epochs=2, callbacks=callbacks).fit(module, loader(), **options)
        return seen.values

    assert fit() == [{6}, {8}]
    assert fit(ckpt_path=tmp_path / "middle.ckpt", weights_only=False) == [{8}]
