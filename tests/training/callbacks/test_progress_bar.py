"""The bar fits its terminal; without a terminal, log lines appear at intervals."""

import logging
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier
from revzoo.training.callbacks import progress_bar
from revzoo.training.callbacks.progress_bar import (
    EpochLog,
    Progress,
    batches_in_all,
    clock,
    epoch_of,
)
from revzoo.training.lightning_compat import batches_of_run
from revzoo.training.metrics import so_far


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (252, "4:12"), (3852, "1:04:12"), (176652, "49:04:12")]
)
def test_times_are_written_as_on_a_clock(seconds, text):
    assert clock(seconds) == text


def fit(tmp_path, bar, **options):
    runner = trainer(tmp_path, callbacks=[bar], enable_progress_bar=True, **options)
    runner.fit(Classifier(TinyNet()), loader(), loader())
    return runner


def test_a_log_file_gets_lines_and_no_bar(tmp_path, caplog, capsys):
    with caplog.at_level(logging.INFO, logger="revzoo"):
        fit(tmp_path, Progress(log_seconds=1e-9))
    lines = [r.getMessage() for r in caplog.records if r.name == progress_bar.__name__]
    batch = r"epoch 2/2, batch \d/4, [\d.]+ img/s, loss \d.\d{3}, acc \d.\d{3}, \d+:\d\d left"
    assert any(re.fullmatch(batch, line) for line in lines), lines
    # the line of the epoch follows its last batch
    assert not any(re.match(r"epoch ./2, batch 4/4", line) for line in lines)
    assert any(re.fullmatch(r"epoch 1/2 validation, batch 1/\d", line) for line in lines), lines
    assert capsys.readouterr().out == ""


def test_the_line_of_an_epoch_has_the_monitored_figure(tmp_path, caplog):
    """It had the accuracy alone, which is high for a network that finds only background."""
    model = Classifier(TinyNet())
    model.monitor = "val/balanced_acc"
    with caplog.at_level(logging.INFO, logger="revzoo"):
        trainer(tmp_path, callbacks=[EpochLog()]).fit(model, loader(), loader())
    line = r"epoch 1/\d  loss .*acc \d.\d{3}, val \d.\d{3}  val balanced_acc \d.\d{3}"
    assert re.search(line, caplog.text), caplog.text


def test_the_memory_of_a_plan_is_shown(tmp_path, caplog, monkeypatch):
    bar = Progress(log_seconds=1e-9)
    bar.planned, bar.limit = 2**24, 2**33
    with caplog.at_level(logging.INFO, logger="revzoo"):
        fit(tmp_path, bar)
    assert "batch 1/4, planned 16 MiB, limit 8 GiB, " in caplog.text
    monkeypatch.setattr(progress_bar, "peak_bytes", lambda device: 2**23)
    on_gpu = SimpleNamespace(device=torch.device("cuda"))
    assert bar._memory(on_gpu) == ["memory 8 MiB, planned 16 MiB, limit 8 GiB"]


def test_log_lines_are_log_seconds_apart(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="revzoo"):
        runner = fit(tmp_path, Progress(log_seconds=60))
        runner.validate(runner.model, loader())
    assert [r for r in caplog.records if r.name == progress_bar.__name__] == []


@pytest.mark.parametrize(("columns", "widest"), [(50, 50), (80, 80), (200, 110)])
def test_a_terminal_gets_a_bar_that_fits(columns, widest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(progress_bar, "REDRAW_SECONDS", 0)
    monkeypatch.setenv("COLUMNS", str(columns))
    fit(tmp_path, Progress())
    drawn = [part for part in re.split(r"[\r\n]", capsys.readouterr().out) if part.strip()]
    last = next(p for p in drawn if " 4/4" in p and p.startswith("epoch 2") and "val" not in p)
    assert last.rstrip().endswith(" left"), "the time left stays longest"
    assert ("img/s" in last) is (columns >= 80)
    assert all(len(part) < widest for part in drawn)
    assert all(part.startswith("epoch ") for part in drawn), "a new bar began with 0it"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_epochs": 2}, "2/2"),
        ({"max_epochs": -1, "max_steps": 6}, "2/2"),
        # an epoch has four batches, so a step cannot sum 64
        ({"max_epochs": -1, "max_steps": 2, "accumulate_grad_batches": 64}, "2/2"),
        ({"max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 3}, "2/2"),
    ],
)
def test_the_epoch_and_the_number_of_epochs(tmp_path, options, text):
    seen, left = [], []

    class Seen(Progress):
        def on_train_epoch_end(self, runner, module):
            seen.append(epoch_of(runner))
            left.append(batches_in_all(runner) - batches_of_run(runner))

    fit(tmp_path, Seen(), **options)
    assert seen[-1] == text
    assert left[-1] == 0


def test_figures_so_far_leave_the_metrics_alone(tmp_path):
    """torchmetrics caches computed values: the epoch's figure would come from its first batches."""
    torch.manual_seed(0)
    plain = fit(tmp_path / "a", Progress(log_seconds=60)).callback_metrics
    torch.manual_seed(0)
    watched = fit(tmp_path / "b", Progress(log_seconds=1e-9)).callback_metrics
    assert {k: float(v) for k, v in plain.items()} == {k: float(v) for k, v in watched.items()}


def test_figures_so_far_wait_for_no_other_process():
    """A distributed run hung at the first line inside an epoch, which only process 0 writes."""

    def refuse(*args, **kwargs):
        raise AssertionError("waits for the other processes")

    metrics = Classifier(TinyNet()).metrics_of("train")
    labels = torch.tensor([0, 1])
    metrics.update(value=torch.tensor([0.5, 0.5]), preds=torch.randn(2, 10), target=labels)
    for metric in metrics.values():
        metric.distributed_available_fn = lambda: True
        metric.dist_sync_fn = refuse
    assert so_far(metrics)["train/loss"] == 0.5


def test_a_run_resumed_inside_an_epoch_has_a_rate(tmp_path):
    """Lightning skips on_train_epoch_start, so the epoch began when the machine did."""
    bar, module = Progress(), Classifier(TinyNet())
    bar.on_train_start(trainer(tmp_path), module)
    assert bar.seconds(module) < 10
