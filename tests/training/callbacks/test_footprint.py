import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer
from torch import nn

from revzoo.training import Classifier, Footprint, peak_host_bytes


class Slow(pl.Callback):
    """On a simulated clock, a training batch takes 5 ms and a validation 0.4 s."""

    now = 0.0

    def on_train_batch_end(self, *args):
        self.now += 0.005

    def on_validation_epoch_end(self, *args):
        self.now += 0.4


def test_figures_of_an_epoch(tmp_path, monkeypatch):
    slow = Slow()
    monkeypatch.setattr(Footprint, "now", lambda self, module: slow.now)
    runner = trainer(tmp_path, max_epochs=2, callbacks=[slow, Footprint()])
    runner.fit(Classifier(TinyNet()), loader(128), loader(16))
    figures = runner.callback_metrics
    seconds = float(figures["footprint/epoch_seconds"])
    assert seconds == pytest.approx(8 * 0.005)
    assert float(figures["footprint/images_per_second"]) == pytest.approx(128 / seconds)
    peak = peak_host_bytes()
    if peak is not None:
        assert peak / 2 < float(figures["footprint/peak_bytes"]) <= peak


@pytest.mark.filterwarnings("ignore")  # about callbacks and data that cannot resume
def test_a_resumed_epoch_counts_from_the_resume(tmp_path, monkeypatch):
    saving = pl.callbacks.ModelCheckpoint(tmp_path / "saved", "{step}", every_n_train_steps=5)
    first = trainer(tmp_path, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    first.fit(Classifier(TinyNet()), loader(128), loader(16))
    slow = Slow()
    monkeypatch.setattr(Footprint, "now", lambda self, module: slow.now)
    runner = trainer(tmp_path, max_epochs=1, callbacks=[slow, Footprint()])
    runner.fit(Classifier(TinyNet()), loader(128), loader(16), ckpt_path=saving.best_model_path)
    seconds = float(runner.callback_metrics["footprint/epoch_seconds"])
    images = seconds * float(runner.callback_metrics["footprint/images_per_second"])
    assert seconds == pytest.approx(3 * 0.005)
    assert images == pytest.approx(3 * 16)


def test_without_a_source_no_memory_is_logged(tmp_path, monkeypatch):
    monkeypatch.setattr("revzoo.training.memory.peak_host_bytes", lambda: None)
    runner = trainer(tmp_path, max_epochs=1, callbacks=[Footprint()])
    runner.fit(Classifier(TinyNet()), loader())
    assert "footprint/epoch_seconds" in runner.callback_metrics
    assert "footprint/peak_bytes" not in runner.callback_metrics


@pytest.mark.gpu
def test_gpu_peak_is_per_epoch(tmp_path):
    ballast = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del ballast
    runner = trainer(tmp_path, max_epochs=1, accelerator="gpu", devices=1, callbacks=[Footprint()])
    runner.fit(Classifier(TinyNet()), loader())
    assert 0 < runner.callback_metrics["footprint/peak_bytes"] < 2**30


class Sized(nn.Module):
    """Works on 500 copies of its images, so that activations outweigh all other memory."""

    num_classes = 4

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.head = nn.Linear(64, 4)

    def forward(self, x):
        copies = torch.tanh(self.scale * x.flatten(1).repeat(500, 1, 1))
        return self.head(copies.mean(0))


class Looking(Sized):
    """Reads values, which fake tensors lack."""

    def forward(self, x):
        return super().forward(x) * bool(x.sum() != 7)


def test_activations_are_counted_as_well(tmp_path):
    runner = trainer(tmp_path, max_epochs=1, callbacks=[Footprint()])
    runner.fit(Classifier(Sized()), loader(128), loader(16))
    found = float(runner.callback_metrics["footprint/activation_bytes"])
    batch = len(next(iter(loader(128)))[0])
    # the copies, their tanh, one gradient and its result
    assert found == pytest.approx(4 * 500 * batch * 64 * 4, rel=0.05)


def test_a_model_that_cannot_be_counted_still_trains(tmp_path):
    runner = trainer(tmp_path, max_epochs=1, callbacks=[Footprint()])
    runner.fit(Classifier(Looking()), loader(128), loader(16))
    assert "footprint/activation_bytes" not in runner.callback_metrics
    assert "footprint/epoch_seconds" in runner.callback_metrics
