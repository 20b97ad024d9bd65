import pytest
import pytorch_lightning as pl
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier, build_callbacks
from revzoo.training.checkpoint.files import read_checkpoint

BATCHES = 4  # of an epoch


class Validated(pl.Callback):
    """Records the steps after which a validation ran."""

    def __init__(self):
        self.steps = []

    def on_validation_end(self, trainer, pl_module):
        self.steps.append(trainer.global_step)


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 6}, [4, 6]),  # in the middle of an epoch
        ({"max_steps": 2}, [2]),  # of the first
        ({"max_steps": 8}, [4, 8]),  # at the end of one: once
        ({"max_steps": 6, "max_epochs": 1}, [4]),  # the epochs end it
        ({"max_steps": 3, "accumulate_grad_batches": 2}, [2, 3]),
        ({"max_steps": 6, "val_check_interval": 2}, [2, 4, 6]),
        ({"max_steps": 6, "check_val_every_n_epoch": 2}, [6]),
        ({"max_steps": 10, "check_val_every_n_epoch": 2}, [8]),
        ({"max_steps": 6, "limit_val_batches": 0}, []),
    ],
)
def test_a_run_of_max_steps_ends_with_a_validation(options, steps, tmp_path):
    validated = Validated()
    runner = trainer(tmp_path, callbacks=[validated], **{"max_epochs": -1, **options})
    runner.fit(Classifier(TinyNet()), loader(16 * BATCHES), loader())
    assert validated.steps == steps


def test_the_last_weights_may_be_the_best(tmp_path):
    specs = {"best_checkpoint": {"monitor": "val/loss", "mode": "min"}}
    runner = trainer(
        tmp_path,
        enable_checkpointing=True,
        callbacks=build_callbacks(specs, run_dir=tmp_path),
        max_epochs=-1,
        max_steps=6,
    )
    module = Classifier(TinyNet(), optim={"lr": 0.01})
    runner.fit(module, loader(16 * BATCHES), loader())
    best = read_checkpoint(tmp_path / "checkpoints" / "best.ckpt")
    assert best["global_step"] == 6
    for name, value in module.state_dict().items():
        assert torch.equal(best["state_dict"][name], value), name
