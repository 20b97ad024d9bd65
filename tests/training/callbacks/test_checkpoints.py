import time

import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier, build_callbacks
from revzoo.training.callbacks.checkpoints import (
    BestCheckpoint,
    LastCheckpoint,
    best_checkpoint_path,
)
from revzoo.training.checkpoint import files
from revzoo.training.checkpoint.files import (
    PlainCheckpointIO,
    UnwritableCheckpointError,
    read_checkpoint,
)
from revzoo.training.lightning_compat import callbacks_of
from revzoo.training.resume import RunState

NAN, INF = float("nan"), float("inf")


def saved_steps(tmp_path, *, minutes, seconds_a_step, **options):
    """The steps at which a run saves: two epochs of four batches, with a simulated clock."""
    clock, steps = [0.0], []

    class Tick(pl.Callback):
        def on_before_backward(self, *args):
            clock[0] += seconds_a_step

    class Spy(PlainCheckpointIO):
        def save_checkpoint(self, checkpoint, *args, **kwargs):
            steps.append(checkpoint["global_step"])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", lambda: clock[0])
        runner = trainer(
            tmp_path,
            callbacks=[Tick(), LastCheckpoint(tmp_path, minutes=minutes)],
            plugins=[Spy()],
            enable_checkpointing=True,
            **options,
        )
        runner.fit(Classifier(TinyNet()), loader(), loader())
    return steps


@pytest.mark.parametrize(
    ("minutes", "seconds", "expected"),
    [
        (10, 1, [4, 8]),  # short epochs: at their ends
        (1, 45, [2, 4, 6, 8]),  # every minute; 3 and 7 come 45 s after a save
        (0.5, 31, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_the_steps_that_are_saved(minutes, seconds, expected, tmp_path):
    assert saved_steps(tmp_path, minutes=minutes, seconds_a_step=seconds) == expected


def test_zero_minutes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="minutes=0"):
        LastCheckpoint(tmp_path, minutes=0)


def test_a_moved_folder_keeps_its_best_checkpoint(tmp_path):
    callback = BestCheckpoint(tmp_path / "a")
    runner = trainer(
        tmp_path, callbacks=[callback], plugins=[PlainCheckpointIO()], enable_checkpointing=True
    )
    runner.fit(Classifier(TinyNet()), loader(), loader())
    state = callback.state_dict()
    assert str(tmp_path) not in repr(state)
    (tmp_path / "a").rename(tmp_path / "b")
    moved = BestCheckpoint(tmp_path / "b")
    moved.load_state_dict(state)
    assert moved.best_model_score == callback.best_model_score
    assert read_checkpoint(moved.best_model_path)["global_step"] > 0


class Scripted(pl.LightningModule):
    """Logs the given figures and losses, one of each per validation."""

    def __init__(self, figures, losses):
        super().__init__()
        self.body, self.figures, self.losses = TinyNet(), figures, losses

    def training_step(self, batch, batch_idx):
        return self.body(batch[0]).sum()

    def validation_step(self, batch, batch_idx):
        self.log("val/acc", self.figures[self.current_epoch])
        self.log("val/loss", self.losses[self.current_epoch])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit_with_best(module, folder, epochs, resumed):
    """Train with ``best_checkpoint``; writes ``last.ckpt`` at the end."""
    runner, best = trainer_with_best(folder, epochs)
    runner.fit(module, loader(), loader(), ckpt_path=resumed, weights_only=True)
    runner.save_checkpoint(folder / "last.ckpt")
    return best


def trainer_with_best(folder, epochs):
    (best,) = build_callbacks({"best_checkpoint": {}}, run_dir=folder)
    assert isinstance(best, BestCheckpoint)
    runner = trainer(
        folder,
        callbacks=[best],
        plugins=[PlainCheckpointIO()],
        enable_checkpointing=True,
        max_epochs=epochs,
    )
    return runner, best


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
@pytest.mark.filterwarnings("ignore:`weights_only` was not set:UserWarning")
@pytest.mark.parametrize(
    ("figures", "losses", "expected"),
    [
        ([0.5, 0.9, 0.9, 0.9, 0.8], [1.0, 0.5, 0.3, 0.4, 0.1], 2),
        ([0.5, 0.9, 0.9, 0.9, 0.9], [1.0, 0.5, 0.5, 0.6, 0.7], 1),
        ([0.9, 0.5, 0.95, 0.95, 0.9], [0.1, 0.2, 0.8, 0.7, 0.0], 3),
        # NaN counts as the first class, which may be most images
        ([0.9, 0.5, 0.6, 0.6, 0.9], [NAN, 0.9, 0.8, 0.7, INF], 3),
        ([NAN, 0.5, 0.6, NAN, 0.4], [0.1, 0.2, 0.8, 0.0, 0.0], 2),
    ],
)
def test_ties_go_to_the_lowest_loss(figures, losses, expected, tmp_path):
    def fit(epochs, path=None):
        best = fit_with_best(Scripted(figures, losses), tmp_path, epochs, path)
        return int(read_checkpoint(best.best_model_path)["epoch"])

    assert fit(5) == expected
    fit(2)  # a resumed run still knows it
    assert fit(5, tmp_path / "last.ckpt") == expected


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
@pytest.mark.filterwarnings("ignore:`weights_only` was not set:UserWarning")
def test_the_figures_of_the_best_checkpoint_are_kept(tmp_path):
    """A run ended with the figures of its last validation."""

    def fit(epochs, path=None):
        module = Scripted([0.5, 0.9, 0.8], [1.0, 0.5, 0.4])
        return fit_with_best(module, tmp_path, epochs, path)

    expected = pytest.approx({"val/acc": 0.9, "val/loss": 0.5})
    assert fit(3).figures == expected
    fit(2)
    assert fit(3, tmp_path / "last.ckpt").figures == expected  # a resumed run still knows them


def test_without_a_finite_validation_there_is_no_best_checkpoint(tmp_path):
    best = fit_with_best(Scripted([0.9, 0.9], [NAN, INF]), tmp_path, 2, None)
    assert (best.best_model_path, best.figures) == ("", {})
    assert not (tmp_path / "checkpoints" / "best.ckpt").exists()


def test_without_a_validation_the_last_checkpoint_is_named(tmp_path, caplog):
    """Lightning warned that it could not find the monitored key."""
    runner, _ = trainer_with_best(tmp_path, 2)
    with caplog.at_level("INFO"):
        runner.fit(Scripted([], []), loader())
    (line,) = [r for r in caplog.messages if "best.ckpt" in r or "monitored key" in r]
    assert "last.ckpt" in line
    assert best_checkpoint_path(runner) is None


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_a_best_checkpoint_that_was_not_written_does_not_count(tmp_path, monkeypatch):
    """The run ended without a best.ckpt."""
    write = files.write_checkpoint

    def full_in_epoch_1(state, path):
        if state["epoch"] == 1:
            raise UnwritableCheckpointError("No space left on device")
        write(state, path)

    monkeypatch.setattr(files, "write_checkpoint", full_in_epoch_1)
    runner, _ = trainer_with_best(tmp_path, 4)
    module = Scripted([0.5, 0.9, 0.7, 0.6], [1.0, 1.0, 1.0, 1.0])
    runner.fit(module, loader(), loader(), weights_only=True)
    assert best_checkpoint_path(runner) == tmp_path / "checkpoints" / "best.ckpt"
    assert read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")["epoch"] == 2
    (tmp_path / "checkpoints" / "best.ckpt").unlink()
    assert best_checkpoint_path(runner) is None


def test_a_run_continues_if_its_last_checkpoint_cannot_be_written(tmp_path):
    """A read-only or deleted checkpoint folder ended the run with a traceback."""
    (tmp_path / "checkpoints").write_text("no folder")
    (last,) = build_callbacks({"last_checkpoint": {}}, run_dir=tmp_path)
    runner = trainer(
        tmp_path, callbacks=[last], plugins=[PlainCheckpointIO()], enable_checkpointing=True
    )
    runner.fit(Classifier(TinyNet()), loader(), weights_only=True)
    assert runner.global_step == 8
    (state,) = callbacks_of(runner, RunState)
    assert state.notes == {"last.ckpt": "last.ckpt could not be written at step 8"}
