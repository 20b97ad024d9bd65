import csv
import signal
from contextlib import nullcontext

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint
from small_task import trainer

from revzoo.data import Digits
from revzoo.training import Classifier, Reconstructions, build_callbacks
from revzoo.training.checkpoint.files import PlainCheckpointIO, read_checkpoint
from revzoo.training.loggers import MetricsCSV
from revzoo.training.resume import RunStopped
from revzoo.weights.source import LAST


def rows(path):
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def write(path, *metrics, first_step=None):
    logger = MetricsCSV(path, first_step=first_step)
    for step, figures in metrics:
        logger.log_metrics(figures, step)
        logger.save()
    logger.finalize("success")


def test_new_figures_add_columns(tmp_path):
    path = tmp_path / "run" / "metrics.csv"
    write(path, (0, {"a": 1.0}), (1, {"a": 0.5, "b": 2.0}))
    assert rows(path) == [{"step": "0", "a": "1.0"}, {"step": "1", "a": "0.5", "b": "2.0"}]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.csv"]


def test_a_resumed_run_keeps_earlier_rows(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, *((step, {"a": float(step)}) for step in range(4)))
    with path.open("a") as file:
        file.write("4")  # cut off by a kill
    write(path, (2, {"b": 9.0}), first_step=2)
    assert rows(path) == [
        {"step": "0", "a": "0.0"},
        {"step": "1", "a": "1.0"},
        {"step": "2", "b": "9.0"},
    ]


def test_a_resumed_run_drops_later_rows_although_it_logs_none(tmp_path):
    """An i-RevNet stopped twice within log_every_n_steps kept the row of its first stop."""
    path = tmp_path / "metrics.csv"
    write(path, (3, {"a": 3.0}), (4, {"reconstruction/error": 0.0}))
    MetricsCSV(path, first_step=4).save()  # before its checkpoint at step 5
    write(path, (9, {"a": 9.0}), first_step=5)
    assert rows(path) == [{"step": "3", "a": "3.0"}, {"step": "9", "a": "9.0"}]


def test_a_new_run_empties_the_file(tmp_path):
    path = tmp_path / "metrics.csv"
    write(path, (0, {"a": 1.0}))
    write(path, (0, {"a": 2.0}))
    assert rows(path) == [{"step": "0", "a": "2.0"}]


IREVNET = {
    "name": "irevnet13",
    "num_classes": 10,
    "in_chans": 1,
    "units": [1, 1],
    "memory": "invert",
}


class Stopped(Checkpoint):
    """A signal ends the run in its third epoch."""

    def __init__(self, stops):
        self.stops = stops

    def on_train_batch_start(self, trainer, *args):
        if self.stops and trainer.global_step == 4:
            raise RunStopped(signal.SIGTERM)


def fit(folder, *, stops=False, resume=False):
    """The rows of a run of three epochs, each of two steps."""
    pl.seed_everything(0, verbose=False)
    path = folder / "checkpoints" / LAST
    first = read_checkpoint(path)["global_step"] if resume else None
    names = {"last_checkpoint": {}, "drift": {"every_n_steps": 1}}
    callbacks = build_callbacks(names, run_dir=folder)
    callbacks += [Reconstructions(count=2, every_n_epochs=5), Stopped(stops)]
    runner = trainer(
        folder,
        max_epochs=3,
        limit_train_batches=2,
        callbacks=callbacks,
        plugins=[PlainCheckpointIO()],
        enable_checkpointing=True,
        logger=MetricsCSV(folder / "metrics.csv", first_step=first),
    )
    module = Classifier(IREVNET, optim={"lr": 0.01})
    data, ckpt = Digits(batch_size=32), path if resume else None
    with pytest.raises(RunStopped) if stops else nullcontext():
        runner.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return rows(folder / "metrics.csv")


def test_a_stop_leaves_no_trace(tmp_path):
    """Each stop of an i-RevNet added a row."""
    whole = fit(tmp_path / "whole")
    fit(tmp_path / "broken", stops=True)
    assert fit(tmp_path / "broken", resume=True) == whole
    assert len([row for row in whole if "train/loss" in row]) == 3


def test_a_disk_that_refuses_rows_does_not_end_the_run(tmp_path, caplog):
    """A read-only folder, metrics.csv or checkpoint folder ended the run with a traceback."""
    path = tmp_path / "run" / "metrics.csv"
    (tmp_path / "run").write_text("no folder")
    logger = MetricsCSV(path)
    for step in range(2):
        logger.log_metrics({"a": float(step)}, step)
        logger.save()
    assert [m.startswith(f"cannot write {path}") for m in caplog.messages] == [True]
    (tmp_path / "run").unlink()
    logger.save()
    assert [row["a"] for row in rows(path)] == ["0.0", "1.0"]
    path.unlink()  # and written again
    logger.log_metrics({"a": 2.0}, 2)
    logger.save()
    assert [row["a"] for row in rows(path)] == ["2.0"]


def test_figures_without_a_step_belong_to_the_newest(tmp_path):
    """Their row was lost when the next column came."""
    path = tmp_path / "metrics.csv"
    write(path, (3, {"a": 1.0}), (None, {"b": 2.0}), (4, {"c": 3.0}))
    assert rows(path)[1] == {"step": "3", "b": "2.0"}
