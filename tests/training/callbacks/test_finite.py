from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier, build_callbacks
from revzoo.training.checkpoint.files import PlainCheckpointIO, read_checkpoint
from revzoo.training.lightning_compat import callbacks_of
from revzoo.training.resume import RunState
from revzoo.training.step_retry import FiniteLoss
from revzoo.weights.source import LAST


class Spoil(pl.Callback):
    """Makes the loss of one step NaN, or a weight after it."""

    def __init__(self, step, *, weight=False):
        self.step, self.weight = step, weight

    def on_train_batch_start(self, trainer, module, *args):
        bias = module.model.head.bias
        if trainer.global_step == self.step and not self.weight:
            bias.data[0] = float("nan")

    def on_train_batch_end(self, trainer, module, *args):
        if trainer.global_step == self.step and self.weight:
            module.model.head.bias.data[0] = float("inf")


def fit(tmp_path, spoil):
    callbacks = build_callbacks({"last_checkpoint": {}}, run_dir=tmp_path)
    runner = trainer(
        tmp_path,
        max_epochs=3,
        callbacks=[spoil, *callbacks],
        plugins=[PlainCheckpointIO()],
        enable_checkpointing=True,
    )
    runner.fit(Classifier(TinyNet()), loader())


@pytest.mark.parametrize(("step", "epoch"), [(4, 1), (6, 1), (9, 2)])
def test_the_error_names_the_step_and_the_last_checkpoint_stays(step, epoch, tmp_path):
    message = (
        rf"loss is not finite at step {step}, in epoch {epoch + 1}: .*lower optim\.lr"
        ".*Earlier checkpoints are intact$"
    )
    with pytest.raises(FloatingPointError, match=message):
        fit(tmp_path, Spoil(step))
    last = read_checkpoint(tmp_path / "checkpoints" / LAST)
    assert last["global_step"] == 4 * epoch
    assert all(v.isfinite().all() for v in last["state_dict"].values())


def test_the_error_says_that_no_checkpoint_was_written(tmp_path):
    """It said that earlier ones are intact, and a resumed run ended in the same way."""
    with pytest.raises(FloatingPointError, match=r"No checkpoint was written, .*: start a new"):
        fit(tmp_path, Spoil(2))


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(FloatingPointError, match=r"parameter model\.head\.bias .* step 8"):
        fit(tmp_path, Spoil(8, weight=True))  # the last step of an epoch: no later loss shows it
    assert read_checkpoint(tmp_path / "checkpoints" / LAST)["global_step"] == 4


def test_the_losses_of_a_device_are_read_together(tmp_path, monkeypatch):
    """The code for a GPU, run on the device ``meta`` and on flags of the CPU."""
    module, check = Classifier(TinyNet()), FiniteLoss()
    runner = SimpleNamespace(world_size=1, current_epoch=7, callbacks=[])
    module.trainer = runner
    flags = iter([True, True, False, True, False])
    monkeypatch.setattr(torch, "isfinite", lambda loss: torch.tensor(next(flags)))
    for step in range(1, 6):
        runner.global_step = step
        check.on_before_backward(runner, module, torch.ones((), device="meta"))
    with pytest.raises(FloatingPointError, match="at step 3, in epoch 8"):
        check.on_train_end(runner, module)
    check.on_train_end(runner, module)


@pytest.mark.gpu
def test_on_a_gpu_no_step_waits(tmp_path):
    runner = trainer(tmp_path, accelerator="gpu", max_epochs=8, callbacks=[Spoil(13)])
    with pytest.raises(FloatingPointError, match="at step 13, in epoch 4"):
        runner.fit(Classifier(TinyNet()), loader())
    check, module = FiniteLoss(), Classifier(TinyNet())
    loss = torch.ones((), device="cuda")
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(1, 5):
            state = SimpleNamespace(world_size=1, global_step=step, current_epoch=0)
            check.on_before_backward(state, module, loss)
    finally:
        torch.cuda.set_sync_debug_mode(mode)


@pytest.mark.parametrize(("factor", "warned"), [(1e16, True), (1.0, False)])
def test_a_diverged_loss_is_warned_of_once(factor, warned, tmp_path, caplog):
    """A loss of 1e16 for three epochs ended with status 0 and no warning."""
    module = Classifier(TinyNet(), optim={"lr": 1e-12 / factor})
    with torch.no_grad():
        module.model.head.weight.mul_(factor)
    runner = trainer(tmp_path, max_epochs=3)
    runner.fit(module, loader())
    warnings = [
        m for m in caplog.messages if "more than 10 times the loss of uniform guessing" in m
    ]
    assert len(warnings) == warned
    (state,) = callbacks_of(runner, RunState)
    assert ("loss" in state.notes) == warned
    assert [m for m in warnings if "training loss of epoch 1 is" not in m] == []
