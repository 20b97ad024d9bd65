"""A scale for each sample: neighbours do not matter, small and large values keep their bits."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn

import revzoo
from revzoo import AdditiveCoupling, Invertible, RangeError, ReversibleBlock, ReversibleSequence
from revzoo.core.kernels import Growth, magnitudes, sample_count
from revzoo.core.words import fixed_of


def branch(norm=True):
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)]
    return nn.Sequential(*[nn.GroupNorm(2, 4)] * norm, *layers)


def network(blocks=6, norm=True, memory="exact"):
    torch.manual_seed(0)
    steps = [ReversibleBlock(branch(norm), branch(norm)) for _ in range(blocks)]
    return ReversibleSequence(steps, memory=memory)


def pictures():
    return torch.randn(4, 8, 6, 6, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("bad", [1e7, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("memory", ["exact", "store", "recompute"])
@pytest.mark.parametrize("training", [True, False])
def test_a_sample_does_not_change_the_others(bad, memory, training):
    """One picture 1e7 times too large moved the others by 13 %; one NaN pixel made all NaN."""
    net = network(norm=False).train(training)
    revzoo.set_memory(net, memory, grid="auto")
    others = [0, 1, 3]

    def results(x):
        x.requires_grad_()
        y = net(x)
        (gradient,) = torch.autograd.grad(y[others].square().sum(), x)
        return y[others], gradient[others]

    x, spoilt = pictures(), pictures()
    spoilt[2, 0, 0, 0] = bad
    assert all(map(torch.equal, results(spoilt), results(x)))


@pytest.mark.parametrize(("size", "limit"), [(1.0, 5e-7), (1e6, 2e-7), (1e-6, 5e-4), (1e-12, 5e-4)])
@pytest.mark.parametrize("norm", [True, False])
def test_large_and_small_values_keep_their_bits(size, limit, norm):
    net = network(norm=norm).eval()
    if not norm:  # else the biases set the size
        net.apply(lambda m: nn.init.zeros_(m.bias) if isinstance(m, nn.Conv2d) else None)
        limit = 5e-7
    truth = copy.deepcopy(net).double()
    revzoo.set_memory(truth, "store")
    x = pictures() * size
    with torch.no_grad():
        y, expected = net(x), truth(x.double())
        assert torch.equal(net(x), y)
        assert (net.inverse(y) - x).abs().max() <= 2.0**-23 * expected.abs().max()
    assert (y - expected).norm() <= limit * expected.norm()


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(float(factor)))

    def forward(self, x):
        return x * self.factor


def growing(factor=50, steps=4):
    return ReversibleSequence([AdditiveCoupling(Times(factor)) for _ in range(steps)])


def test_without_training_a_network_that_grows_runs_again():
    net, x = growing().eval(), torch.ones(2, 4)
    expected = copy.deepcopy(net).double()
    revzoo.set_memory(expected, "store")
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.allclose(net(x).double(), expected(x.double()), rtol=1e-6)
        net[0].growth = None


def test_in_training_the_error_comes_once_a_size():
    net, x = growing(steps=2), torch.ones(2, 4)
    with pytest.raises(RangeError, match="compute the step again") as info:
        net(x).sum().backward()
    assert info.value.adapted
    net.zero_grad()
    y = net(x)
    y.sum().backward()
    assert y.isfinite().all()
    with torch.no_grad(), pytest.raises(RangeError):  # statistics must not count a batch twice
        growing()(x)


def test_values_that_grow_slowly_never_leave_the_range():
    net = growing(0, steps=2)
    for factor in torch.linspace(1, 60, 30):
        for p in net.parameters():
            p.data.fill_(factor)
        net(torch.ones(2, 4)).sum().backward()  # raises no RangeError
    assert net[0].growth.floor > 500


def test_an_outlier_raises_the_ratio_and_not_the_floor():
    growth = Growth()
    growth.widen([(1.0, 30.0), (1e7, 1e9)], failed=True)
    assert growth.floor == 30
    assert growth.ratio == 100
    units = growth.units(torch.tensor([0.1, 1e7, math.nan, math.inf]))
    assert units[0] == 4 * 32 * 2.0**-30
    assert 4e9 <= units[1] * 2.0**30 <= 8e9
    assert units[2:].isnan().all()


def test_sample_count_and_magnitudes():
    assert sample_count((torch.ones(3, 2), torch.ones(3, 5))) == 3
    assert sample_count((torch.ones(3, 2), torch.ones(2, 2))) == 1
    assert sample_count((torch.ones(3),)) == 1
    t = torch.randn(3, 4, 5, 6)
    t[1, 0, 0, 0] = -9
    for layout in (t, t.contiguous(memory_format=torch.channels_last), t.transpose(2, 3)):
        assert torch.equal(magnitudes(layout, 3), t.abs().amax((1, 2, 3)))


class Rolled(Invertible):
    """Moves values along ``dim``."""

    exact = True

    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x1, x2):
        return x1.roll(1, self.dim), x2.roll(1, self.dim)

    def inverse(self, y1, y2):
        return y1.roll(-1, self.dim), y2.roll(-1, self.dim)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_step_that_moves_samples_is_exact_on_one_unit_for_all(dim):
    steps = [AdditiveCoupling(nn.Linear(4, 4)), Rolled(dim), AdditiveCoupling(nn.Linear(4, 4))]
    net, results = ReversibleSequence(steps), []
    x = (torch.randn(3, 8) * torch.tensor([[1.0], [10], [0.1]])).requires_grad_()
    for memory in ("exact", "store"):
        revzoo.set_memory(net, memory, grid=20)
        y = net(x)
        results.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
        assert torch.equal(net.inverse(y), net.inverse(net(net.inverse(y))))
    assert all(map(torch.equal, *results))
    revzoo.set_memory(net, "exact")
    with pytest.raises(ValueError, match="grid=23") if dim == 0 else contextlib.nullcontext():
        net(x)


class Flat(Rolled):
    """Moves values between samples."""

    def forward(self, x1, x2):
        return tuple(x.flatten().roll(1).view_as(x) for x in (x1, x2))

    def inverse(self, y1, y2):
        return tuple(y.flatten().roll(-1).view_as(y) for y in (y1, y2))


def test_a_step_that_mixes_samples_is_refused():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4)), Flat(0)])
    with pytest.raises(ValueError, match=r"one sample .* to another.*grid=23"):
        net(torch.randn(3, 8))
    revzoo.set_memory(net, "exact", grid=20)
    net(torch.randn(3, 8)).sum().backward()


def test_a_chain_inside_a_branch_replays_on_its_grid():
    """The grid adapts between the forward pass and the replay."""
    inner = growing(4, steps=2)
    steps = [AdditiveCoupling(nn.Sequential(nn.Linear(4, 4), inner)) for _ in range(2)]
    net = ReversibleSequence(steps)
    x = torch.randn(2, 8) * 1e-3
    y = net(x)
    inner[0].growth.floor = 1e6
    y.sum().backward()
    assert all(d == 0 for d in revzoo.drift(net).values())


def test_values_that_the_grid_rounds_are_named():
    net = network(2, norm=False)
    x = torch.randn(2, 8, 6, 6)
    x[:, 1:4] = 1e-5
    net.requires_grad_(False)
    for m in net.modules():
        if isinstance(m, nn.Conv2d):
            nn.init.zeros_(m.weight)
            nn.init.zeros_(m.bias)
    with pytest.warns(RuntimeWarning, match=r"% of the channels .* less than 1024 units"):
        net(x)
    net(x)  # once


def test_another_chain_that_widens_the_grid_does_not_hide_a_failure():
    """The second backward pass raised nothing: its gradients were wrong."""
    net = growing(4, steps=8)
    x = torch.ones(2, 4, requires_grad=True)
    first, second = net(x * 3), net(x)
    with pytest.raises(RangeError):
        first.sum().backward()
    with pytest.raises(RangeError):
        second.sum().backward()


def test_a_chain_that_grows_over_many_calls_starts_anew():
    """It raised at each call: the scale was that of the first one."""
    net = ReversibleSequence([AdditiveCoupling(Times(1)) for _ in range(2)]).eval()
    state = torch.ones(2, 2, 4).unbind()
    expected = [s.double() for s in state]
    double = copy.deepcopy(net).double()
    revzoo.set_memory(double, "store")
    with torch.no_grad():
        for _ in range(20):
            state, expected = net(*state), double(*expected)
    assert all(map(torch.allclose, [s.double() for s in state], expected))
    log = fixed_of(state[0]).scale.log
    assert not log


def test_a_failure_after_samples_moved_is_raised():
    """The scale of the moved samples did not know it: the gradient of the last step was NaN."""
    steps = [AdditiveCoupling(Times(1)), Rolled(0), AdditiveCoupling(Times(1e4))]
    net = ReversibleSequence(steps)
    revzoo.set_memory(net, "exact", grid=23)
    net[0].requires_grad_(False)
    y = net(torch.ones(3, 8))
    with pytest.raises(RangeError, match=r"steps\.2"):
        y.sum().backward()
