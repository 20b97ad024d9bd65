import os
import signal

import pytest
import pytorch_lightning as pl
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier
from revzoo.training import resume as stop_module
from revzoo.training.resume import SIGNALS, GracefulStop, RunStopped


class SignalIn(pl.Callback):
    """Sends a signal to this process in a hook, once."""

    def __init__(self, hook, signum):
        self.batches, self.validated, self.sent, self.signum = 0, 0, False, signum
        setattr(self, hook, self._send)

    def _send(self, *args):
        if not self.sent:
            self.sent = True
            os.kill(os.getpid(), self.signum)

    def on_train_batch_end(self, *args):
        self.batches += 1

    def on_validation_batch_end(self, *args):
        self.validated += 1


def fit(tmp_path, hook, signum, **options):
    stop, sender = GracefulStop(), SignalIn(hook, signum)
    runner = trainer(tmp_path, callbacks=[sender, stop], **options)
    with stop.listening(), pytest.raises(RunStopped) as stopped:
        runner.fit(Classifier(TinyNet()), loader(), loader())
    return sender, stop, stopped.value.status


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_the_batch_is_finished(signum, status, tmp_path):
    sender, stop, ended = fit(tmp_path, "on_before_backward", signum)
    assert (sender.batches, ended) == (1, status)
    assert stop.requested == signum


@pytest.mark.parametrize(("patience", "validated"), [(60.0, 4), (0.0, 1)])
def test_a_validation_is_finished_unless_it_takes_too_long(
    patience, validated, tmp_path, monkeypatch
):
    monkeypatch.setattr(stop_module, "PATIENCE", patience)
    sender, _, ended = fit(tmp_path, "on_validation_batch_start", signal.SIGTERM)
    assert (sender.batches, sender.validated, ended) == (4, validated, 143)


def test_accumulated_gradients_are_dropped_after_a_while(tmp_path, monkeypatch):
    batches = []
    for patience in (60.0, 0.0):
        monkeypatch.setattr(stop_module, "PATIENCE", patience)
        sender, _, _ = fit(
            tmp_path, "on_before_backward", signal.SIGTERM, accumulate_grad_batches=3
        )
        batches.append(sender.batches)
    assert batches == [3, 1]


def test_outside_of_loops_the_run_stops_at_once():
    with GracefulStop().listening(), pytest.raises(RunStopped, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_interrupt_ends_at_once(monkeypatch, capfd):
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    stop = GracefulStop()
    stop.hint = lambda: "to resume: it"
    stop._in_loop = True
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)  # as batch systems do
        assert statuses == []
        os.kill(os.getpid(), signal.SIGINT)
    assert statuses == [130]
    assert capfd.readouterr().err.endswith("revzoo: stopped; to resume: it\n")


@pytest.mark.parametrize(("rank", "lines"), [("0", 1), ("1", 0)])
def test_one_process_says_that_it_stops(rank, lines, monkeypatch, caplog):
    """Ctrl-C in a terminal reaches all processes, and each said so."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    stop = GracefulStop()
    stop._in_loop = True
    with stop.listening():
        os.kill(os.getpid(), signal.SIGTERM)
    assert caplog.text.count("stopping after this batch") == lines


def test_the_old_handlers_are_restored():
    before = [signal.getsignal(s) for s in SIGNALS]
    with GracefulStop().listening():
        assert not {signal.getsignal(s) for s in SIGNALS} & set(before)
    assert [signal.getsignal(s) for s in SIGNALS] == before


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGUSR1])
def test_an_ignored_or_used_signal_is_left_alone(signum):
    """A run under nohup must not end with its terminal."""
    received = []
    for handler in (signal.SIG_IGN, lambda number, frame: received.append(number)):
        before = signal.signal(signum, handler)
        try:
            with GracefulStop().listening():
                assert signal.getsignal(signum) is handler
                os.kill(os.getpid(), signum)
        finally:
            signal.signal(signum, before)
    assert received == [signum]
