import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier, build_callbacks
from revzoo.training.checkpoint.files import PlainCheckpointIO
from revzoo.weights.source import LAST

pytestmark = pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")


class Figure(pl.Callback):
    """Logs a value in each epoch's validation; ends the program after ``kill_after`` epochs."""

    def __init__(self, *values, kill_after=0):
        self.values, self.kill_after = values, kill_after

    def on_validation_epoch_end(self, trainer, pl_module):
        pl_module.log("figure", self.values[trainer.current_epoch])

    def on_train_epoch_start(self, trainer, *args):
        if trainer.current_epoch == self.kill_after > 0:
            raise ZeroDivisionError


def stopping(folder, patience=1):
    options = {"monitor": "figure", "mode": "max", "patience": patience}
    return build_callbacks({"early_stopping": options, "last_checkpoint": {}}, run_dir=folder)


def fit(folder, figure, *, resume=False, **options):
    runner = trainer(
        folder,
        enable_checkpointing=True,
        plugins=[PlainCheckpointIO()],
        **{"callbacks": [figure, *stopping(folder)], "max_epochs": 6, **options},
    )
    torch.manual_seed(0)
    module = Classifier(TinyNet())
    path = folder / "checkpoints" / LAST if resume else None
    runner.fit(module, loader(), loader(), ckpt_path=path, weights_only=True)
    return runner, module.state_dict()


@pytest.mark.parametrize("values", [(0.5, 0.4), (0.5, float("nan"))])
def test_a_run_that_stopped_early_does_not_train_again(values, tmp_path, caplog):
    """The resumed run used to train until the next validation."""
    figure = Figure(*values, 0.9, 0.9, 0.9, 0.9)
    with caplog.at_level("INFO"):
        ended, weights = fit(tmp_path, figure)
    assert "early stopping: Monitored metric" in caplog.text
    again, found = fit(tmp_path, figure, resume=True)
    for runner in (ended, again):
        assert (runner.current_epoch, runner.global_step) == (2, 8)
        assert runner.state.finished
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_min_epochs_still_apply_to_a_run_that_stopped_early(tmp_path):
    values = (0.5, 0.4, 0.6, 0.7, 0.8, 0.9)
    whole, weights = fit(tmp_path / "whole", Figure(*values), min_epochs=4)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "killed", Figure(*values, kill_after=3), min_epochs=4)
    again, found = fit(tmp_path / "killed", Figure(*values), resume=True, min_epochs=4)
    assert whole.current_epoch == again.current_epoch == 4
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_run_that_did_not_stop_early_trains_on(tmp_path):
    values = (0.5, 0.6, 0.7, 0.6, 0.8, 0.8)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, Figure(*values, kill_after=2))
    assert fit(tmp_path, Figure(*values), resume=True)[0].current_epoch == 4


def test_a_second_fit_ignores_the_state_loaded_for_the_first(tmp_path):
    figure = Figure(0.5, 0.4, 0.9, 0.9, 0.9, 0.9)
    fit(tmp_path, figure)
    callbacks = [figure, *stopping(tmp_path)]
    fit(tmp_path, figure, resume=True, callbacks=callbacks)
    again, _ = fit(tmp_path, Figure(0.9, 0.9), callbacks=callbacks, max_epochs=1)
    assert again.global_step == 4
