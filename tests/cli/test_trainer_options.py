"""Options that Lightning implements work in our runs."""

import json
from pathlib import Path

import pytest
import torch
from resumed import resume
from small_run import QUICK
from small_task import TinyNet, loader

from revzoo.cli.config import check_machine
from revzoo.cli.run import train as train_module
from revzoo.cli.run.build import build_trainer
from revzoo.cli.run.train import train
from revzoo.cli.terminal import ConfigError
from revzoo.training import Classifier
from revzoo.training.callbacks.cuda_graph import CudaGraph
from revzoo.training.resume import GracefulStop

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = (*QUICK[1:], "trainer.log_every_n_steps=1", "model.norm=none", "test=false")
PLAIN = {
    "lr": 1.0,
    "momentum": 0.0,
    "nesterov": False,
    "weight_decay": 0.0,
    "schedule": {"name": "constant"},
}


def test_a_cuda_graph(compose, tmp_path, monkeypatch):
    """Not on a CPU, and not if it is switched off."""
    for value, count in (("true", 1), ("auto", 1), ("false", 0)):
        config = compose("trainer=cpu", f"trainer.cuda_graph={value}")
        for device, expected in (("cpu", 0), ("cuda", count)):
            monkeypatch.setattr("revzoo.cli.run.build.device_kind", lambda _: device)  # noqa: B023
            callbacks = build_trainer(config, run_dir=tmp_path).callbacks
            assert sum(isinstance(c, CudaGraph) for c in callbacks) == expected
        if value == "true":
            remedy = "this run is on cpu: use trainer.cuda_graph=auto"
            with pytest.raises(ConfigError, match=f"needs an NVIDIA GPU, {remedy}"):
                check_machine(config)
        else:
            check_machine(config)


def trained(run_dir):
    state = torch.load(run_dir / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {name: value for name, value in state.items() if name.startswith("model.")}


def test_accumulated_batches_are_one_large_batch(compose, tmp_path):
    """Without norms, which depend on the batch, and without augmentation."""
    common = (*SMALL, "precision=fp64", "data.augment.crop_padding=0", "trainer.max_epochs=1")
    for name, size, parts in (("whole", 16, 1), ("parts", 8, 2), ("small", 8, 1)):
        own = (f"data.batch_size={size}", f"trainer.accumulate_grad_batches={parts}")
        batches = 3 if size == 16 else 6
        config = compose(*common, *own, f"trainer.limit_train_batches={batches}")
        train(config, run_dir=tmp_path / name)
    steps = [
        json.loads((tmp_path / name / "summary.json").read_text())["steps"]
        for name in ("whole", "parts", "small")
    ]
    assert steps == [3, 3, 6]
    whole, parts, small = (trained(tmp_path / name) for name in ("whole", "parts", "small"))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-12)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(whole, small, rtol=1e-9, atol=1e-12)


def changes(config, run_dir):
    """The change of the weights in one step of plain gradient descent with rate 1."""
    torch.manual_seed(0)
    module = Classifier(TinyNet(), optim=PLAIN)
    before = torch.nn.utils.parameters_to_vector(module.parameters()).detach().clone()
    build_trainer(config, run_dir=run_dir).fit(module, loader())
    return before - torch.nn.utils.parameters_to_vector(module.parameters()).detach()


def test_gradients_are_clipped(compose, tmp_path):
    def changed(*overrides):
        quiet = ("callbacks=none", "logger=none", "trainer.max_steps=1")
        return changes(compose("trainer=cpu", *quiet, *overrides), tmp_path)

    free = changed()
    assert free.norm() > 0.1
    clipped = changed("trainer.gradient_clip_val=0.01")
    assert clipped.norm() == pytest.approx(0.01, rel=1e-3)
    torch.testing.assert_close(clipped / clipped.norm(), free / free.norm(), rtol=1e-3, atol=1e-5)
    by_value = ("trainer.gradient_clip_val=0.01", "trainer.gradient_clip_algorithm=value")
    torch.testing.assert_close(changed(*by_value), free.clamp(-0.01, 0.01), rtol=1e-4, atol=1e-7)


def test_early_stopping_ends_a_run_without_progress(compose, tmp_path):
    stopping = "callbacks.early_stopping={monitor: val/loss, mode: min, patience: 2}"
    short = ("trainer.max_epochs=5", "trainer.limit_train_batches=1", "trainer.limit_val_batches=1")
    still = ("optim=step", "optim.lr=1.0e-30")  # no weight changes, and there are no statistics
    train(compose(*SMALL, *short, *still, stopping), run_dir=tmp_path / "with")
    train(compose(*SMALL, *short, *still), run_dir=tmp_path / "without")
    epochs = [
        json.loads((tmp_path / name / "summary.json").read_text())["epochs"]
        for name in ("with", "without")
    ]
    assert epochs == [3, 5]


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_a_resumed_run_that_stopped_early_is_tested_but_not_trained(compose, tmp_path, monkeypatch):
    class StopsInTest(GracefulStop):
        def on_test_batch_start(self, *args):
            self.requested = 15

    stopping = "callbacks.early_stopping={monitor: val/loss, mode: min, patience: 1}"
    short = ("trainer.max_epochs=5", "trainer.limit_train_batches=1", "trainer.limit_val_batches=1")
    config = compose(*SMALL, *short, "optim=step", "optim.lr=1.0e-30", "test=true", stopping)
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "GracefulStop", StopsInTest)
        with pytest.raises(SystemExit):
            train(config, run_dir=tmp_path)
    before = json.loads((tmp_path / "summary.json").read_text())
    figures = resume(tmp_path)
    after = json.loads((tmp_path / "summary.json").read_text())
    assert [(s["epochs"], s["steps"]) for s in (before, after)] == [(2, 2)] * 2
    assert (before["stopped"], after["stopped"]) == ("stopped by SIGTERM", None)
    assert "test/acc" in figures


@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
@pytest.mark.filterwarnings("ignore:.*profiler.*:UserWarning")
def test_profiles_are_written_into_the_runs_folder(name, compose, tmp_path):
    small = ("debug=smoke", *SMALL, "trainer.limit_val_batches=0", f"trainer.profiler={name}")
    train(compose(*small, "callbacks.best_checkpoint=null"), run_dir=tmp_path)
    assert "run_training_batch" in (tmp_path / "fit-profile.txt").read_text()
    if name == "pytorch":
        (trace,) = tmp_path.glob("fit-profile*.pt.trace.json")
        names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
        assert "revzoo.replay stages.0.steps.0.steps.0 AdditiveCoupling" in names


@pytest.mark.parametrize("limit", ["limit_train_batches", "limit_val_batches", "overfit_batches"])
def test_a_fraction_without_a_batch_ends_with_a_message(limit, compose, tmp_path):
    config = compose(*SMALL, "debug=smoke", f"trainer.{limit}=0.01", "test=false")
    with pytest.raises(SystemExit, match=r"0\.01 \* \d+ < 1"):
        train(config, run_dir=tmp_path)
