"""The drift logger writes the curve over depth."""

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger
from small_task import TINY, loader
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from revzoo.core.guard import drift
from revzoo.training import Classifier, DriftLogger


def train(folder, memory, **options):
    module = Classifier({**TINY, "units": [2, 2, 2], "memory": memory})
    trainer = pl.Trainer(
        max_steps=4,
        max_epochs=-1,
        accelerator="cpu",
        logger=TensorBoardLogger(folder, name="", version=memory),
        callbacks=[DriftLogger(every_n_steps=2)],
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader())
    events = EventAccumulator(str(folder / memory))
    events.Reload()
    tags = events.Tags()["scalars"]
    return module, {t: [e.step for e in events.Scalars(t)] for t in tags if t.startswith("drift/")}


def test_every_replayed_step_has_a_curve(tmp_path):
    module, curves = train(tmp_path, "invert")
    figures = drift(module)
    assert len(figures) >= 6
    assert max(figures.values()) > 0
    assert curves == {f"drift/{name}": [1, 3] for name in [*figures, "max"]}
    assert all(name.startswith(("model.stem.", "model.stages.")) for name in figures)


def test_a_step_of_several_batches_is_logged_once(tmp_path):
    _, curves = train(tmp_path, "invert", accumulate_grad_batches=2)
    assert curves["drift/max"] == [1, 3]


def test_stored_steps_log_no_drift(tmp_path):
    assert train(tmp_path, "store")[1] == {}


def test_a_wrong_interval_is_refused():
    with pytest.raises(ValueError, match="every_n_steps=0: expected a whole number >= 1"):
        DriftLogger(every_n_steps=0)
