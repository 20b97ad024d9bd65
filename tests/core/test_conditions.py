"""Replays see the conditions of their forward pass and do not change the caller's."""

import contextlib
import copy
import itertools
import random
from random import uniform

import numpy as np
import pytest
import torch
from compare import assert_same_training, conv_net, error, images, twin
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    Invertible,
    ReversibleBlock,
    ReversibleSequence,
    is_replaying,
    set_memory,
)
from revzoo.core import conditions
from revzoo.profiling.live import LiveMemory

pytestmark = pytest.mark.usefixtures("couplings_alone_or_together")

MODES = ["recompute", "invert"]


class Probe(nn.Module):
    """Notes what it sees at each evaluation."""

    def __init__(self, look):
        super().__init__()
        self.look = look
        self.seen = []

    def forward(self, x):
        self.seen.append((is_replaying(), self.look(self)))
        return x.tanh()


def probed(look, mode):
    probe = Probe(look)
    return ReversibleSequence([AdditiveCoupling(probe)], memory=mode), probe


def inputs():
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_is_replaying():
    net, probe = probed(lambda _: None, "invert")
    net(inputs()).sum().backward()
    assert [replaying for replaying, _ in probe.seen] == [False, True]
    assert not is_replaying()


@pytest.mark.parametrize("mode", MODES)
def test_train_and_eval_are_those_of_the_forward(mode):
    net, probe = probed(lambda m: m.training, mode)
    y = net(inputs())
    net.eval()
    y.sum().backward()
    assert [training for _, training in probe.seen] == [True, True]
    assert not probe.training


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("around_backward", [True, False])
def test_autocast_is_that_of_the_forward(mode, around_backward):
    def look(_):
        return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    net, probe = probed(look, mode)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not around_backward):
        y = net(inputs())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around_backward):
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu") == around_backward
    (_, forward), (_, replay) = probe.seen
    assert forward == replay


@pytest.mark.parametrize("mode", MODES)
def test_autocast_training_repeats_store(mode):
    # Streams stay in float32, so their reconstruction is off by float32 noise, which bf16 branches
    # amplify; a recomputation starts from the very inputs.
    torch.manual_seed(0)
    net = conv_net().float()
    grads = []
    for m in (mode, "store"):
        other = twin(net, m)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = other(images().float()).square().mean()
        loss.backward()
        grads.append([p.grad for p in other.parameters()])
    assert error(*grads) <= (0 if mode == "recompute" else 0.05)


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_random_numbers_are_those_of_store(mode):
    draws = []
    for m in (mode, "store"):
        net = twin(conv_net(dropout=0.5), m)
        torch.manual_seed(4)
        y = net(images())
        between = torch.rand(3)
        y.sum().backward()
        draws.append((between, torch.rand(3)))
    assert torch.equal(draws[0][0], draws[1][0])
    assert torch.equal(draws[0][1], draws[1][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_count_each_batch_once(mode, momentum, norm):
    def build():
        torch.manual_seed(0)
        branch = nn.Sequential(
            norm(4, momentum=momentum, track_running_stats=True), nn.Conv2d(4, 4, 1)
        )
        return ReversibleSequence([AdditiveCoupling(branch)]).double()

    nets = [build(), build()]
    set_memory(nets[0], mode)
    set_memory(nets[1], "store")
    for net in nets:
        for seed in range(4):
            net(images(seed=seed)).square().sum().backward()
    for a, e in zip(nets[0].buffers(), nets[1].buffers(), strict=True):
        assert torch.equal(a, e)
    if norm is nn.BatchNorm2d:  # InstanceNorm never counts
        assert nets[0][0].branch[0].num_batches_tracked == 4


@pytest.mark.parametrize("mode", MODES)
def test_statistics_survive_two_forwards_before_one_backward(mode):
    net = conv_net()
    grads, buffers = [], []
    for m in (mode, "store"):
        other = twin(net, m)
        (other(images()).square().sum() + other(images(seed=9)).square().sum()).backward()
        grads.append([p.grad for p in other.parameters()])
        buffers.append([b.double() for b in other.buffers()])
    assert error(*grads) < 1e-12
    assert error(*buffers) < 1e-14


@pytest.mark.parametrize("mode", MODES)
def test_spectral_norm_is_replayed_with_its_vectors(mode):
    def build():
        torch.manual_seed(0)
        branches = [
            nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh())
            for _ in range(4)
        ]
        return ReversibleSequence([ReversibleBlock(*branches[:2]), ReversibleBlock(*branches[2:])])

    net, reference = build().double(), build().double()
    set_memory(net, mode)
    set_memory(reference, "store")
    x = torch.randn(5, 8, dtype=torch.float64)
    assert_same_training(net, reference, x)
    assert all(
        torch.equal(a, b) for a, b in zip(net.buffers(), reference.buffers(), strict=True)
    ) or (error(list(net.buffers()), list(reference.buffers())) < 1e-12)


class Warmup(nn.Module):
    """A user's counter that the value depends on, kept by assignment."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.calls = self.calls + 1
        return (x * self.calls).tanh()


@pytest.mark.parametrize("mode", MODES)
def test_a_users_counter_is_replayed_with_its_value(mode):
    net = ReversibleSequence([AdditiveCoupling(Warmup()) for _ in range(3)], memory=mode)
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_same_training(net, twin(net, "store"), x)
    assert [step.branch.calls.item() for step in net] == [3.0] * 3


def test_inverse_leaves_statistics_alone():
    net = conv_net()
    before = copy.deepcopy(net.state_dict())
    x = images()
    y = net(x)
    net.load_state_dict(before)
    back = net.inverse(y)
    assert (back - x).abs().max() < 1e-12
    for k, v in net.state_dict().items():
        assert torch.equal(v, before[k])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_replay_reads_the_strides_of_a_single_image(mode, inside):
    """Other strides change the order of kernels' sums and the masks of dropout."""
    strides = []
    branch = nn.Tanh()
    branch.register_forward_pre_hook(lambda _, args: strides.append(args[0].stride()))
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    x = torch.randn(1, 4, 8, 8).to(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
        net(2 * x, x.requires_grad_())[1].sum().backward()
    assert strides == [x.stride()] * 2


@pytest.mark.parametrize("mode", MODES)
def test_autocast_around_the_backward_pass_keeps_no_casts_of_streams(mode):
    branches = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh()) for _ in range(12)]
    net = ReversibleSequence(map(AdditiveCoupling, branches), memory=mode)
    revzoo.set_drift_limit(net, 1)
    peaks = []
    for inside in (False, True):
        autocast = torch.autocast("cpu", dtype=torch.bfloat16)
        with LiveMemory() as memory, contextlib.ExitStack() as stack:
            stack.enter_context(autocast)
            loss = net(torch.randn(4, 8, 32, 32)).sum()
            if not inside:
                stack.close()
            loss.backward()
        peaks.append(memory.peak)
    assert peaks[1] < 1.02 * peaks[0]  # the casts of the weights


@pytest.mark.parametrize("mode", MODES)
def test_converted_to_synchronised_statistics(mode):
    """Where it runs without a GPU: in one process, torch takes the plain kernel."""
    net = nn.SyncBatchNorm.convert_sync_batchnorm(conv_net(depth=2))
    assert any(isinstance(m, nn.SyncBatchNorm) for m in net.modules())
    assert_same_training(twin(net, mode), twin(net, "store"), images())


class Device:
    """A device's random numbers: 1, 2, 3, ... from its state."""

    def __init__(self):
        self.state = torch.zeros(1, dtype=torch.long)

    def get_rng_state(self, device):
        return self.state.clone()

    def set_rng_state(self, state, device):
        self.state.copy_(state)

    def draw(self):
        return (self.state.add_(1)).item()


class Scaled(Invertible):
    """Multiplies the first stream by a random number of the second one's device."""

    def __init__(self, device):
        super().__init__()
        self.device = device
        self.drawn = []

    def forward(self, x, other):
        self.drawn.append(self.device.draw())
        return (x * self.drawn[-1]).asinh(), other

    def inverse(self, y, other):
        return y.sinh() / self.device.draw(), other


@pytest.mark.parametrize("mode", MODES)
def test_random_numbers_of_another_device_are_drawn_again(mode, monkeypatch):
    device = Device()
    monkeypatch.setattr(conditions, "HOST", ("cpu",))  # "meta" stands for a device of its own
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    steps = [Scaled(device) for _ in range(3)]
    x, other = inputs(), torch.empty(2, device="meta")
    y, _ = ReversibleSequence(steps, memory=mode)(x, other)
    device.draw()  # the caller's
    y.sum().backward()
    assert [set(step.drawn) for step in steps] == [{1}, {2}, {3}]
    assert device.state.item() == 4  # as if nothing had been replayed
    z = inputs()
    ((z.asinh() * 2).asinh() * 3).asinh().sum().backward()
    assert error([x.grad], [z.grad]) < 1e-6


@pytest.mark.parametrize("mode", MODES)
def test_a_bias_that_a_layer_gets_after_the_first_pass_is_watched(mode):
    layer = nn.Linear(4, 4, bias=False)
    net = ReversibleSequence([AdditiveCoupling(nn.Sequential(layer, nn.Tanh()))], memory=mode)
    x = torch.randn(3, 8)
    for _ in range(3):  # the first pass adds an attribute to the step
        net(x).sum().backward()
    layer.bias = nn.Parameter(torch.ones(4))
    y = net(x)
    with torch.no_grad():
        layer.bias.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: 'bias'"):
        y.sum().backward()


def twice(net, change, x):
    """Gradients of the second training step, before which ``change`` changes the network."""
    torch.manual_seed(0)
    net(x).square().sum().backward()
    change(net)
    net.zero_grad()
    net(x).square().sum().backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("mode", [*MODES, "exact"])
def test_statistics_in_another_type_after_the_first_pass(mode):
    branch = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    net(images().float()).sum().backward()
    net.double()  # replaces the buffers, as net.cuda() does
    assert_same_training(net, twin(net, "store"), images(), tolerance=1e-9)


@pytest.mark.parametrize("mode", [*MODES, "exact"])
def test_a_dropout_that_gets_a_probability_after_the_first_pass(mode):
    layers = nn.Linear(4, 4), nn.Dropout(0.0), nn.Linear(4, 4)
    net = ReversibleSequence([AdditiveCoupling(nn.Sequential(*layers))], memory=mode)
    x = torch.randn(3, 8)

    def change(net):
        net[0].branch[1].p = 0.5

    expected = copy.deepcopy(net)
    set_memory(expected, "store", grid="auto" if mode == "exact" else None)
    found = twice(net, change, x)
    torch.testing.assert_close(found, twice(expected, change, x))


def set_memory_of(net, mode):
    set_memory(net, mode)
    return net


def imported_in_the_body():
    import random as python

    return python.random()


HOST_DRAWS = {
    "random.random": lambda: random.random,
    "a global module": lambda: lambda: random.gauss(1, 1),
    "a global function": lambda: lambda: uniform(0, 1),
    "an import in the body": lambda: imported_in_the_body,
    "random.Random": lambda: random.Random(0).random,
    "a generator in a closure": lambda: (lambda g: lambda: g.random())(random.Random(0)),
    "np.random": lambda: lambda: np.random.rand(),
    "numpy in a closure": lambda: (lambda numpy: lambda: numpy.random.rand())(np),
    "numpy in a dictionary": lambda: (lambda table: lambda: table["np"].random.rand())({"np": np}),
    "np.random.Generator": lambda: np.random.default_rng(0).random,
    "np.random.RandomState": lambda: np.random.RandomState(0).rand,
}


class ByFactor(nn.Module):
    """A factor that the last saved tensors do not show: a normalisation removes it."""

    def __init__(self, factor):
        super().__init__()
        self.factor = factor
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh())

    def forward(self, x):
        scaled = x * float(1 + abs(self.factor()))
        return self.layers(nn.functional.layer_norm(scaled, (6,)))


def gradient_by_factor(factor, mode, between=lambda: None):
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(ByFactor(factor))], dim=-1, memory=mode)
    x = torch.randn(5, 12, requires_grad=True)
    loss = net(x).square().sum()
    between()
    loss.backward()
    return x.grad


def counted():
    yield from itertools.count(1)


ITERATORS = {
    "cycle": lambda: itertools.cycle([1, 3, 9]),
    "count": lambda: itertools.count(1),
    "generator": counted,
    "list": lambda: iter([1, 2, 3]),
}


@pytest.mark.parametrize("mode", [*MODES, "exact"])
def test_an_iterator_that_changes_nothing_is_none(mode):
    calls = itertools.count()
    gradient = gradient_by_factor(lambda: 0 * next(calls), mode)
    assert error(gradient, gradient_by_factor(lambda: 0, "store")) < 1e-3


def test_an_iterator_beside_two_norms_is_no_drift():
    """The mean that the second norm saves is rounding error, which ``invert`` changes."""
    calls = itertools.count()

    class Norms(ByFactor):
        def __init__(self):
            super().__init__(lambda: 0 * next(calls))
            self.layers = nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6), nn.Linear(6, 6))

    net = ReversibleSequence([AdditiveCoupling(Norms()) for _ in range(6)], dim=-1)
    net(torch.randn(4, 12)).sum().backward()
