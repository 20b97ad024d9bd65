"""NOTE [ The contract ] as a table: change something between the passes; right, or this error."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from revzoo import AdditiveCoupling, DriftError, ReversibleSequence, checkpoint, set_memory

MODES = ["recompute", "invert", "exact"]
SCALE = [1.0]
COUNT = iter(range(999))


class Branch(nn.Module):
    """Reads everything that the table changes."""

    def __init__(self, large):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.3)
        self.scale = 1.0
        self.generator = torch.Generator().manual_seed(0)
        self.draws = lambda x: torch.zeros(())
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("table", torch.ones(20_000 if large else 4))

    def forward(self, x):
        self.count += 1
        y = self.drop(self.norm(self.linear(x))) * self.count
        return y * self.scale * SCALE[0] * self.table[:4] + self.draws(x)


def net_of(mode, large=False):
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(Branch(large)) for _ in range(3)])
    set_memory(net, mode, grid=20 if mode == "store" else None)
    return net


def train(net, between=lambda net: None, before=lambda net: None):
    before(net)
    torch.manual_seed(1)
    x = torch.randn(6, 8, requires_grad=True)
    y = net(x)
    between(net)
    (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]


def branches(net):
    return [step.branch for step in net]


def other_parameters(net):
    for branch in branches(net):
        branch.linear.weight = nn.Parameter(torch.zeros(4, 4))


def another_pass(net):
    with torch.no_grad():
        net(torch.randn(6, 8))


def flags(net):
    net.eval()


def grids(net):
    set_memory(net, "exact", grid=8)


def default_dtype(net):
    torch.set_default_dtype(torch.float64)


RIGHT = {
    "nothing": lambda net: None,
    "torch draws": lambda net: torch.rand(5),
    "training flags": flags,
    "statistics and small buffers": another_pass,
    "the default dtype": default_dtype,
    "grids": grids,
}


@pytest.fixture(autouse=True)
def restored():
    yield
    torch.set_default_dtype(torch.float32)
    SCALE[0] = 1.0


@pytest.mark.parametrize("change", RIGHT)
@pytest.mark.parametrize("mode", MODES)
def test_restored(mode, change):
    expected, found = train(net_of("store")), train(net_of(mode), RIGHT[change])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_are_those_of_the_forward_pass(mode):
    """Other tensors in their place do not matter."""
    expected = train(net_of("store"))
    net = net_of(mode)
    own = [x for branch in branches(net) for x in [branch.linear.weight]]
    train(net, other_parameters)
    torch.testing.assert_close(
        [p.grad for p in own], [expected[i] for i in (1, 5, 9)], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_that_of_the_forward_pass(mode):
    def run(mode):
        net, x = net_of(mode), torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            y = net(x)
        y.float().square().sum().backward()
        return [p.grad for p in net.parameters()]

    torch.testing.assert_close(run(mode), run("store"), rtol=2e-2, atol=2e-2)


def change_parameter(net):
    with torch.no_grad():
        net[1].branch.linear.weight += 1


def change_table(net):
    net[1].branch.table += 1


@pytest.mark.parametrize("change", [change_parameter, change_table])
@pytest.mark.parametrize("mode", MODES)
def test_a_change_in_place_raises(mode, change):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(net_of(mode, large=True), change)


def set_draws(fn):
    def before(net):
        for branch in branches(net):
            branch.draws = fn

    return before


def set_scale(net):
    for branch in branches(net):
        branch.scale = 2.0


def set_global(net):
    SCALE[0] = 2.0


def other_layer(net):
    for branch in branches(net):
        branch.linear = copy.deepcopy(branch.linear)


def other_branch(net):
    for step in net:
        step.branch = copy.deepcopy(step.branch)


REPORTED = {
    "Python's random": (set_draws(lambda x: x * random.random()), lambda net: None),
    "NumPy's random": (set_draws(lambda x: x * np.random.rand()), lambda net: None),
    "an iterator": (set_draws(lambda x: x * next(COUNT) / 99), lambda net: None),
    "an attribute": (lambda net: None, set_scale),
    "a global": (lambda net: None, set_global),
}


@pytest.mark.parametrize("what", REPORTED)
@pytest.mark.parametrize("mode", MODES)
def test_what_else_differs_is_reported(mode, what):
    before, between = REPORTED[what]
    with pytest.raises(DriftError, match="deterministic"):
        train(net_of(mode), between, before)


@pytest.mark.parametrize("change", [other_layer, other_branch])
@pytest.mark.parametrize("mode", MODES)
def test_a_replaced_module_raises(mode, change):
    """Its copy computes the same values, so no comparison would see it."""
    with pytest.raises(RuntimeError, match="replaced between its forward pass and its replay"):
        train(net_of(mode), change)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_a_parameter_frozen_or_thawed_between_the_passes_raises(mode, trained):
    """In recompute, other tensors would be saved, and mistaken for those of the forward pass."""
    net = net_of(mode)
    net[1].branch.linear.requires_grad_(not trained)
    with pytest.raises(RuntimeError, match=f"requires_grad of 'weight' .* changed to {trained}"):
        train(net, lambda net: net[1].branch.linear.requires_grad_(trained))


def test_a_captured_tensor_with_a_graph_is_refused():
    weight = torch.ones(4, requires_grad=True)
    scale = weight * 2

    class Scaled(nn.Module):
        def forward(self, x):
            return x * scale

    net = ReversibleSequence([AdditiveCoupling(Scaled())])
    with pytest.raises(RuntimeError, match="expected such tensors as keyword arguments"):
        net(torch.randn(2, 8, requires_grad=True))


def test_a_captured_leaf_gets_its_gradient():
    weight = torch.ones(4, requires_grad=True)

    class Scaled(nn.Module):
        def forward(self, x):
            return x * weight

    results = []
    for mode in ("store", "exact"):
        weight.grad = None
        net = ReversibleSequence([AdditiveCoupling(Scaled()) for _ in range(3)], memory=mode)
        x = torch.arange(16.0).view(2, 8).div(8).requires_grad_()
        net(x).square().sum().backward()
        results.append([x.grad, weight.grad])
    torch.testing.assert_close(*results)


def test_a_tensor_left_in_an_attribute_cannot_be_differentiated():
    class Leaves(nn.Module):
        def forward(self, x):
            self.kept = x.sin()
            return self.kept

    net = ReversibleSequence([AdditiveCoupling(Leaves())])
    y = net(torch.randn(2, 8, requires_grad=True))
    assert net[0].branch.kept.isfinite().all()
    with pytest.raises(RuntimeError, match=r"Leaves\.kept"):
        (y.sum() + net[0].branch.kept.sum()).backward()


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_second_derivatives_name_the_mode_that_has_them(mode):
    net, x = net_of(mode), torch.randn(6, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=True.*'recompute'"):
        torch.autograd.grad(net(x).sum(), x, create_graph=True)


def test_hooks_of_parameters_run_once():
    results = []
    for mode in ("store", "exact"):
        net = net_of(mode)
        for p in net.parameters():
            p.register_hook(lambda g: 2 * g)
        results.append(train(net))
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-4)


def test_an_argument_that_the_step_fills_is_filled_once():
    class Caching(nn.Module):
        def forward(self, x, cache=None):
            cache.append(x.detach())
            return torch.stack(list(cache)).sum(0).tanh()

    class Cache(list):
        pass

    found = []
    for mode in ("store", "exact"):
        cache = Cache()
        net = ReversibleSequence([AdditiveCoupling(Caching()) for _ in range(2)], memory=mode)
        x = torch.arange(16.0).view(2, 8).div(8).requires_grad_()
        net(x, cache=cache).sum().backward()
        assert len(cache) == 2
        found.append(x.grad)
    torch.testing.assert_close(*found)


def test_copies_and_checkpoints_of_functions():
    net = copy.deepcopy(net_of("exact"))
    torch.testing.assert_close(train(net), train(net_of("store")), rtol=1e-3, atol=1e-4)
    drop, x = nn.Dropout(0.5), torch.ones(100, requires_grad=True)
    torch.manual_seed(0)
    y = checkpoint(drop, x)
    y.square().sum().backward()
    assert torch.equal(x.grad, 4 * y.detach())  # 2 y times the factor 2 of what is kept
    norm = nn.BatchNorm1d(4)
    checkpoint(norm, torch.randn(6, 4, requires_grad=True)).sum().backward()
    assert norm.num_batches_tracked == 1
    norm = nn.BatchNorm1d(4)
    x = torch.randn(6, 4, requires_grad=True)
    checkpoint(lambda t: norm(t).tanh(), x).sum().backward()
    assert norm.num_batches_tracked == 1


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_checkpoint_may_change_the_output_of_a_sequence_in_place(mode):
    """The state on the tape was an alias of it, and changed with it."""
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4)) for _ in range(2)]).double()

    def fn(x):
        y = net(x)
        y.mul_(1.0005)
        return y

    results = []
    for m in (mode, "store"):
        set_memory(net, m, grid=20 if "exact" in (m, mode) and m != "recompute" else None)
        net.zero_grad()
        x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(2, 8).requires_grad_()
        y = checkpoint(fn, x) if m == mode else fn(x)
        y.square().sum().backward()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-9)


def test_a_layer_that_was_patched_draws_again():
    """The members were gathered before; the replay drew another mask, without an error."""
    net = ReversibleSequence([AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))])
    results = []
    for mode in ("recompute", "store"):
        set_memory(net, mode)
        net(torch.ones(2, 8)).sum().backward()
        net[0].branch[1].forward = lambda x: nn.functional.dropout(x, 0.5)
        torch.manual_seed(0)
        net.zero_grad()
        net(torch.ones(2, 8)).square().sum().backward()
        results.append([p.grad.clone() for p in net.parameters()])
        del net[0].branch[1].forward
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_statistics_that_a_norm_read_may_not_change(mode, norm):
    """A replay read those of a later batch: its gradients were 2 % off, in recompute silently."""
    norms = [norm(2, affine=True, track_running_stats=True) for _ in range(2)]
    net = ReversibleSequence([AdditiveCoupling(m) for m in norms], memory=mode)
    x = torch.randn(3, 4, 2, 2, requires_grad=True)
    y = net.eval()(x)
    net.train()(x)
    with pytest.raises(RuntimeError, match=r"(running_mean|tracked)' of .* changed between"):
        y.square().sum().backward()
