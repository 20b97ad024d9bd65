"""Threads that share torch's random state or a model."""

import threading
import time

import pytest
import torch
from compare import conv_net, error, images, twin
from torch import nn

from revzoo import AdditiveCoupling, ReversibleSequence, is_replaying, set_memory
from revzoo.core.replay.entry import TapeEntry
from revzoo.core.restore import threads

MODES = ["recompute", "invert"]


def run(*functions):
    """Run each in its own thread; raises the error of any of them."""
    failures = []

    def guarded(function):
        try:
            function()
        except BaseException as e:
            failures.append(e)

    workers = [threading.Thread(target=guarded, args=(f,), daemon=True) for f in functions]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
    if failures:
        raise failures[0]


class Slow(nn.Module):
    """Draws after a pause; notes what it drew in forward and replay."""

    def __init__(self, forward=0.0, replay=0.0, begun=None):
        super().__init__()
        self.pauses, self.begun, self.drawn = (forward, replay), begun, ([], [])

    def forward(self, x):
        if self.begun is not None and is_replaying():
            self.begun.set()
        time.sleep(self.pauses[is_replaying()])
        noise = torch.rand(3)
        self.drawn[is_replaying()].append(noise)
        return x * noise.sum()


def inputs():
    return torch.ones(3, 4, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("mode", MODES)
def test_a_replay_beside_a_forward_pass_that_draws(mode):
    """The replay swapped the process's random state while the other thread was drawing."""
    begun = threading.Event()
    first, second = Slow(replay=0.3, begun=begun), Slow(forward=0.05)
    nets = [ReversibleSequence([AdditiveCoupling(b)], memory=mode) for b in (first, second)]

    def other():
        begun.wait(10)
        nets[1](inputs()).sum().backward()

    loss = nets[0](inputs()).sum()
    run(loss.backward, other)
    for branch in (first, second):
        assert all(map(torch.equal, *branch.drawn))
    assert not torch.equal(first.drawn[0][0], second.drawn[0][0])


@pytest.mark.parametrize("mode", MODES)
def test_forward_passes_that_draw_beside_each_other(mode):
    branches = [Slow(forward=0.01 * (i + 1)) for i in range(3)]

    def train(branch):
        net = ReversibleSequence([AdditiveCoupling(branch)] * 3, memory=mode)
        for _ in range(3):
            net(inputs()).sum().backward()

    run(*(lambda b=b: train(b) for b in branches))
    for branch in branches:
        assert len(branch.drawn[0]) == 9
        for i in range(0, 9, 3):  # replays come in reverse
            forward, replay = branch.drawn[0][i : i + 3], branch.drawn[1][i : i + 3]
            assert all(map(torch.equal, forward, reversed(replay)))


class Meeting(nn.Module):
    """Waits for the same branch in another thread, as synchronised statistics do."""

    def __init__(self, barrier, draws):
        super().__init__()
        self.barrier, self.draws = barrier, draws

    def forward(self, x):
        noise = torch.rand(()) if self.draws and not is_replaying() else 0
        self.barrier.wait(20)
        noise = torch.rand(()) if self.draws else noise
        return x * (1 + noise)


@pytest.mark.parametrize("mode", MODES)
def test_branches_that_wait_for_each_other(mode, monkeypatch):
    """A lock held while a branch runs must not make it wait forever."""
    monkeypatch.setattr(threads.random_lock, "patience", 0.2)
    barrier = threading.Barrier(2)

    def train():
        net = ReversibleSequence([AdditiveCoupling(Meeting(barrier, False))], memory=mode)
        for _ in range(3):
            net(inputs()).sum().backward()

    run(train, train)


def test_numbers_drawn_by_several_threads_at_once_are_refused(monkeypatch):
    monkeypatch.setattr(threads.random_lock, "patience", 0.01)
    barrier = threading.Barrier(2)

    def train():
        x = inputs()
        net = ReversibleSequence([AdditiveCoupling(Meeting(barrier, True))], memory="recompute")
        net(x).sum().backward()

    # Which of the two checks sees it first depends on how the threads take turns.
    named = r"If several threads drew at once: put a lock|a recomputed stream is off by"
    with pytest.raises(RuntimeError, match=named):
        run(train, train)


class Statistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x):
        y = self.norm(x)
        if is_replaying():
            time.sleep(0.02)
        return y


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_one_model_in_several_threads(mode, recorded):
    """Throw-away copies of the statistics stayed in the model, and updates were lost."""
    net = ReversibleSequence([AdditiveCoupling(Statistics()) for _ in range(2)], memory=mode)
    before = list(net.buffers())
    x = torch.randn(2, 5, 4, dtype=torch.float64)

    def train():
        for _ in range(4):
            net(*x.clone().requires_grad_())[1].sum().backward()

    def watch():
        for _ in range(40):
            time.sleep(0.005)
            with torch.no_grad():
                net(*x)

    run(train, *([train, train] if recorded else [watch]))
    assert all(a is b for a, b in zip(net.buffers(), before, strict=True))
    assert net[0].branch.norm.num_batches_tracked == (12 if recorded else 44)


@pytest.mark.parametrize("mode", MODES)
def test_another_forward_pass_between_capture_and_forward_pass(mode, monkeypatch):
    """The replay started from statistics that its forward pass had not read."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4).double()

        def forward(self, x):
            mean = self.norm.running_mean.clone()
            if not is_replaying():
                read.mean = mean
            elif not torch.equal(mean, read.mean):
                raise AssertionError
            return self.norm(x)

    def pausing(*args):
        if not captured.is_set():
            captured.set()
            time.sleep(0.3)
        return packer(*args)

    captured, packer, read = threading.Event(), TapeEntry.packer, threading.local()
    monkeypatch.setattr(TapeEntry, "packer", pausing)
    net = ReversibleSequence([AdditiveCoupling(Reader())], memory=mode)

    def train():
        net(torch.randn(5, 8, dtype=torch.float64, requires_grad=True)).sum().backward()

    def train_later():
        assert captured.wait(5)
        train()

    run(train, train_later)


def test_independent_models_in_threads_train_as_one_after_the_other():
    nets = [conv_net(depth=2, seed=i) for i in range(3)]
    expected = [twin(net, "store") for net in nets]

    def train(net):
        for seed in range(4):
            net(images(seed=seed)).square().sum().backward()

    for net in expected:
        train(net)
    for net in nets:
        set_memory(net, "invert")
    run(*(lambda n=n: train(n) for n in nets))
    for a, e in zip(nets, expected, strict=True):
        assert error([p.grad for p in a.parameters()], [p.grad for p in e.parameters()]) < 1e-10
        assert error(list(a.buffers()), list(e.buffers())) < 1e-12
