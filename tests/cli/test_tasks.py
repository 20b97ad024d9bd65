"""The tasks of a table from training to prediction: of digits, the value and some properties."""

from __future__ import annotations

import csv
import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from PIL import Image
from resumed import resume
from small_run import QUICK

from revzoo.cli.main import main
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.data import Digits
from revzoo.training import MultilabelClassifier, Regressor
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.training.checkpoint.restore import restore
from revzoo.training.predict import predict
from revzoo.training.resume import GracefulStop

LABELS = ("even", "above 4", "round")
COMMON = (
    *("data=table", "data.split_column=split", "data.in_chans=1", "data.batch_size=32"),
    *("data.augment.crop_padding=0", "data.augment.flip=false", "data.num_workers=0"),
    *("trainer=cpu", "+model.units=[1,1,1]", "memory=exact", "trainer.max_epochs=8"),
    *("optim.lr=0.1", "logger=csv", "callbacks.samples.every_n_epochs=8"),
)
TASKS: Mapping[str, tuple[str, ...]] = {
    "multilabel": (f"data.label_column=[{','.join(LABELS)}]",),
    "regression": ("data.label_column=value", "task=regression"),
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, data = tmp_path_factory.mktemp("digits"), Digits(batch_size=800, val_fraction=0.1)
    data.setup("fit")
    images, labels = data._images("train").__getitems__(range(700))
    rows = []
    for i, (image, value) in enumerate(zip(images, labels.tolist(), strict=True)):
        Image.fromarray((image[0] * 15).numpy()).save(folder / f"{i}.png")
        flags = (value % 2 == 0, value > 4, value in (0, 6, 8, 9))
        named = "; ".join(n for n, there in zip(LABELS, flags, strict=True) if there)
        split = ("train", "train", "train", "train", "val", "test", "train")[i % 7]
        rows.append([f"{i}.png", split, value, *map(int, flags), named])
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "split", "value", *LABELS, "named"])
        writer.writerows(rows)
    return folder / "labels.csv"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return [*csv.DictReader(file)]


def best_of(run: Path, figure: str) -> tuple[float, list[float]]:
    """A figure of the best checkpoint, and of all validations."""
    summary = json.loads((run / "summary.json").read_text())
    values = [float(r[figure]) for r in rows_of(run / "metrics.csv") if r[figure]]
    return pytest.approx(summary["best"][figure]), values


def run_of(task: str, table: Path, compose: Any, folder: Path, *more: str) -> dict[str, float]:
    overrides = (*COMMON, f"data.table={table}", *TASKS[task], *more)
    return train(compose(*overrides), run_dir=folder, overrides=overrides)


def test_several_labels(
    table: Path, compose: Any, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    caplog.set_level(logging.INFO, logger="revzoo")
    figures = run_of("multilabel", table, compose, run)
    assert figures["test/auroc"] > 0.9  # chance: 0.5
    assert figures["test/acc"] > 0.8
    best, values = best_of(run, "val/auroc")
    assert max(values) == best  # the monitor of the task
    of_each = rows_of(run / "per_class.csv")
    assert [row["class"] for row in of_each] == [*LABELS]
    mean = sum(float(row["auroc"]) for row in of_each) / 3
    assert mean == pytest.approx(figures["test/auroc"], abs=1e-5)
    assert "3 labels" in caplog.text
    assert "above 4" in caplog.text
    caplog.clear()
    main(["eval", str(run), "trainer=cpu"])
    assert f"reading the test images of Table in {table}" in caplog.text
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(printed["test/f1"]) == pytest.approx(figures["test/f1"], abs=1e-4)
    images = [str(table.parent / f"{i}.png") for i in (5, 12)]
    main(["predict", str(run), *images, "--csv", "--device", "cpu"])
    head, *found = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["path", "labels", *sorted(LABELS)]
    for row in found:
        above = [name for name, p in zip(head[2:], row[2:], strict=True) if float(p) > 0.5]
        assert sorted(filter(None, row[1].split(";"))) == above
    main(["predict", str(run), images[0], "--json", "--device", "cpu"])
    (shown,) = json.loads(capsys.readouterr().out)
    assert set(shown) == {"path", "labels", "probabilities"}
    # weights without their run still know the task
    network = restore(run).network
    network.save_pretrained(tmp_path / "weights")
    again = restore(tmp_path / "weights")
    assert isinstance(again.module, MultilabelClassifier)
    assert predict(images[0], again.network) == pytest.approx(shown["probabilities"], abs=1e-5)


def test_a_number(
    table: Path, compose: Any, tmp_path: Path, capsys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    caplog.set_level(logging.INFO, logger="revzoo")
    figures = run_of("regression", table, compose, run)
    assert "1 target, images" in caplog.text
    assert figures["test/mae"] < 1.5  # the mean as the answer: 2.5
    assert figures["test/r2"] > 0.5
    best, values = best_of(run, "val/mae")
    assert min(values) == best
    main(["eval", str(run), "trainer=cpu"])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert float(printed["test/mae"]) == pytest.approx(figures["test/mae"], abs=1e-4)
    main(["predict", str(run), str(table.parent), "--csv", "--device", "cpu"])
    printed_rows = csv.DictReader(capsys.readouterr().out.splitlines())
    found = {Path(row["path"]).stem: float(row["value"]) for row in printed_rows}
    tested = [row for row in rows_of(table) if row["split"] == "test"]
    errors = [abs(found[Path(row["path"]).stem] - float(row["value"])) for row in tested]
    assert sum(errors) / len(errors) == pytest.approx(figures["test/mae"], abs=1e-3)
    main(["predict", str(run), str(table.parent / "5.png"), "--device", "cpu"])
    assert float(capsys.readouterr().out.split()[-1]) == pytest.approx(found["5"], abs=1e-3)
    restore(run).network.save_pretrained(tmp_path / "weights")
    again = restore(tmp_path / "weights")
    assert isinstance(again.module, Regressor)
    value = predict(str(table.parent / "5.png"), again.network)["value"]
    assert value == pytest.approx(found["5"], abs=1e-3)
    assert float(again.module.target_mean) == pytest.approx(4.5, abs=0.5)


@pytest.mark.parametrize(("task", "mode"), [("multilabel", "exact"), ("regression", "store")])
def test_a_resumed_run_equals_one_that_was_not_stopped(
    task: str, mode: str, table: Path, compose: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopsInStep9(GracefulStop):
        def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
            if trainer.global_step == 9:
                self.requested = 15

    short = (f"memory={mode}", "trainer.max_epochs=2", "trainer.limit_train_batches=6")
    with monkeypatch.context() as patch:
        patch.setattr(train_module, "GracefulStop", StopsInStep9)
        with pytest.raises(SystemExit):
            run_of(task, table, compose, tmp_path / "stopped", *short)
    figures = resume(tmp_path / "stopped")
    whole = run_of(task, table, compose, tmp_path / "whole", *short)
    same = [name for name in whole if not name.startswith("footprint")]
    assert {n: figures[n] for n in same} == {n: whole[n] for n in same}
    states = [
        read_checkpoint(tmp_path / run / "checkpoints" / "last.ckpt")["state_dict"]
        for run in ("stopped", "whole")
    ]
    assert all(map(torch.equal, states[0].values(), states[1].values()))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.label_column=split", "task=regression"],
            "line 2 .* in column 'split': expected a",
        ),
        (
            ["data.label_column=[even,value]"],
            "line .* in column 'value': expected 0 or 1.*task=r",
        ),
        (["data.label_column=[even,value]", "task=classification"], "expected one column"),
        (
            ["data.label_column=value", "task=segmentation"],
            "expected one of classification",
        ),
        (
            ["data.label_column=[even]", "optim.loss=mse"],
            "optim.loss=mse with task=multilabel",
        ),
        (["data=digits", "task=regression"], "labels of Digits are for task=classification: leave"),
        (
            ["data.label_column=[even]", "callbacks.best_checkpoint.mode=min"],
            "best val/auroc is",
        ),
        (["data.label_column=[even,evn]"], "no column 'evn'; .*did you mean 'even'"),
    ],
)
def test_contradictions_are_one_error(
    overrides: list[str], message: str, table: Path, compose: Any, tmp_path: Path
) -> None:
    words = [*COMMON, f"data.table={table}", *overrides]
    if "data=digits" in overrides:
        words = ["trainer=cpu", *overrides]
    with pytest.raises(SystemExit, match=message):
        train(compose(*words), run_dir=tmp_path / "run")


def test_names_in_one_column(table: Path, compose: Any, tmp_path: Path) -> None:
    words = ["data.label_column=named", "task=multilabel", "trainer.max_epochs=1"]
    options = (
        *COMMON,
        f"data.table={table}",
        *words,
        "optim.loss=focal",
        "optim.class_weights=balanced",
    )
    train(compose(*options), run_dir=tmp_path / "run")
    assert restore(tmp_path / "run").data_state["classes"] == sorted(LABELS)


def test_one_option_is_the_monitor_of_both_and_classes_may_be_ordinal(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="revzoo")
    options = ("monitor=val/ece", "callbacks.early_stopping.patience=3", "optim.loss=ordinal")
    run = tmp_path / "run"
    assert 0 < train(compose(*QUICK, *options), run_dir=run)["train/loss"] < 1
    callbacks = read_checkpoint(run / "checkpoints" / "last.ckpt")["callbacks"]
    for name in ("EarlyStopping", "BestCheckpoint"):
        (key,) = [key for key in callbacks if key.startswith(name)]
        assert "val/ece" in key
        assert "min" in key
    assert any(re.match(r"val .* ece 0\.", line) for line in caplog.messages)
