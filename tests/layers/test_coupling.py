"""Couplings: equations, round trips, gradients in every mode, conditioning, a user's own."""

import math

import pytest
import torch
from compare import assert_same_training, error, gradients_in, leaf_rows, twin
from torch import nn

import revzoo
from revzoo import AdditiveCoupling, AffineCoupling, Coupling, ReversibleSequence, set_memory
from revzoo.core.live import LiveMemory
from revzoo.core.replay import _Before, _minus
from revzoo.core.sums import put_on_grid
from revzoo.core.words import fixed_of

MODES = ["offload", "recompute", "invert"]


def vectors(width=8, *, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, width, dtype=torch.float64, generator=generator)


def affine_net(depth=4, width=4):
    torch.manual_seed(0)

    def branch():
        return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 2 * width))

    return ReversibleSequence([AffineCoupling(branch()) for _ in range(depth)]).double()


class Rotation(Coupling):
    """A user's coupling: both streams' sum of squares matters to its gradient."""

    def combine(self, x1, value):
        return x1 * value.cosh()

    def uncombine(self, y2, value):
        return y2 / value.cosh()


def test_affine_is_the_papers_equation():
    coupling = affine_net(depth=1)[0]
    x1, x2 = vectors().chunk(2, dim=1)
    raw, shift = coupling.branch(x2).chunk(2, dim=1)
    scale = torch.exp(1.9 * 2 / math.pi * torch.atan(raw / 1.9))
    y1, y2 = coupling(x1, x2)
    assert torch.equal(y1, x2)
    torch.testing.assert_close(y2, x1 * scale + shift)


@pytest.mark.parametrize("base", [AdditiveCoupling, AffineCoupling])
def test_another_combination_has_no_inherited_log_det(base):
    class Doubled(base):
        def combine(self, x1, value):
            return 2 * super().combine(x1, value)

    class Counted(Doubled):
        def log_det(self, x1, x2):
            return base.log_det(self, x1, x2) + x1[0].numel() * math.log(2)

    x1, x2 = vectors().chunk(2, dim=1)
    branch = affine_net(depth=1)[0].branch if base is AffineCoupling else nn.Tanh()
    for evaluate in ("log_det", "forward_with_log_det"):
        with pytest.raises(NotImplementedError, match="Doubled defines no log_det"):
            getattr(Doubled(branch), evaluate)(x1, x2)
    (_, y2), log_det = Counted(branch).forward_with_log_det(x1, x2)
    assert torch.equal(y2, 2 * base(branch)(x1, x2)[1])
    assert torch.allclose(log_det, base(branch).log_det(x1, x2) + 4 * math.log(2))


def test_affine_scale_is_bounded_for_any_branch():
    """Asked at https://github.com/vislearn/FrEIA/issues/38 and
    https://github.com/vislearn/FrEIA/issues/76."""

    class Huge(nn.Module):
        def forward(self, x):
            return torch.cat((torch.full_like(x, -1e6), torch.zeros_like(x)), dim=1)

    net = ReversibleSequence([AffineCoupling(Huge(), clamp=2.0)])
    x = vectors()
    y = net(x)
    assert torch.allclose(y[:, 4:], x[:, :4] * math.exp(-2.0))
    assert (net.inverse(y) - x).abs().max() < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_affine_training_equals_store(mode):
    net = affine_net()
    assert_same_training(twin(net, mode), twin(net, "store"), vectors())


@pytest.mark.parametrize("mode", MODES)
def test_a_users_coupling_equals_store(mode):
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
    net = ReversibleSequence([Rotation(branch) for branch in branches]).double()
    assert_same_training(twin(net, mode), twin(net, "store"), vectors())
    assert (net.inverse(net(vectors())) - vectors()).abs().max() < 1e-12


@pytest.mark.parametrize("mode", MODES)
def test_gradgradcheck_of_affine(mode):
    net = twin(affine_net(depth=2, width=2), mode)
    x = vectors(4)[:2].requires_grad_()
    assert torch.autograd.gradcheck(net, x)
    if mode == "invert":
        with pytest.raises(RuntimeError, match=r"create_graph=True.*'recompute'"):
            torch.autograd.gradgradcheck(net, x)
    else:
        assert torch.autograd.gradgradcheck(net, x)


class Conditioned(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x, *, condition):
        return self.linear(torch.cat((x, condition.expand(len(x), 2)), dim=1)).tanh()


@pytest.mark.parametrize("mode", MODES)
def test_a_condition_shared_by_all_steps(mode):
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(Conditioned()) for _ in range(3)]).double()
    results = []
    for m in (mode, "store"):
        set_memory(net, m)
        given, x = vectors(2)[:1].requires_grad_(), vectors().requires_grad_()
        y = net(x, condition=given.sin())
        back = net.inverse(y, condition=given.sin())
        assert (back - x).abs().max() < 1e-12
        results.append(torch.autograd.grad(y.square().sum(), [x, given, *net.parameters()]))
    assert error(*results) < 1e-12


def test_a_condition_changed_in_place_is_an_error():
    net = ReversibleSequence([AdditiveCoupling(Conditioned())]).double()
    condition = vectors(2)[:1].clone()
    y = net(vectors().requires_grad_(), condition=condition)
    condition.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace .*'condition'"):
        y.sum().backward()


def test_refusals():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match=r"returned shape \(3, 2\).*expects \(3, 4\)"):
        ReversibleSequence([AffineCoupling(nn.Linear(2, 2))])(x)
    with pytest.raises(TypeError, match="branch is 'f', expected a module or a function"):
        AffineCoupling("f")
    with pytest.raises(ValueError, match="clamp=0: expected a number in"):
        AffineCoupling(nn.Identity(), clamp=0)
    with pytest.raises(NotImplementedError, match="Coupling must define combine"):
        ReversibleSequence([Coupling(nn.Identity())])(x)


class Constant(nn.Module):
    """Its value is a parameter's own storage."""

    def __init__(self):
        super().__init__()
        self.value = nn.Parameter(torch.ones(5, 4))

    def forward(self, x):
        return self.value


class Kept(nn.Module):
    """Keeps its value for someone else."""

    def forward(self, x):
        self.value = x.sin()
        return self.value


@pytest.mark.parametrize(
    "branch",
    [nn.Identity, Constant, Kept, nn.ReLU, nn.Sigmoid, lambda: nn.Softmax(dim=1)],
    ids=["the stream", "a parameter", "kept", "relu", "sigmoid", "softmax"],
)
@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_value_that_others_hold_is_not_overwritten(branch, mode):
    # In a replay the branch's value makes room for the reconstructed stream, if it is free.
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(branch()) for _ in range(4)]).double()
    results = []
    for m in (mode, "store"):
        set_memory(net, m, grid="auto" if mode == "exact" else None)
        x = vectors().requires_grad_()
        loss = net(x).sin().sum()
        results.append(torch.autograd.grad(loss, [x, *net.parameters()]))
        values = [s.branch.value.clone() for s in net if isinstance(s.branch, Kept)]
        assert all(v.isfinite().all() and v.abs().max() <= 1 for v in values)
    assert error(*results) < 1e-12
    for step in net:
        if isinstance(step.branch, Constant):
            assert torch.equal(step.branch.value, torch.ones(5, 4))


@pytest.mark.parametrize("grid", [None, 14])
def test_recovering_a_stream_takes_no_memory(grid, monkeypatch):
    # The branch's value makes room for the stream; without that, the peak is one stream higher.
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(64, 64)) for _ in range(3)])
    set_memory(net, "invert", grid=grid)
    step, x = net[0], torch.randn(8192, 64)
    fixed = None if grid is None else fixed_of(*put_on_grid((x,), step))

    def growth():
        with torch.no_grad(), LiveMemory() as memory:
            value = step.branch(x)
            before = memory.now
            strides, down = x.stride(), None if fixed is None else fixed.down
            x1 = _minus(fixed or x, value, _Before(strides, down, None, None), step)
            return memory.peak - before, x1 if fixed is None else x1.read()

    spared, x1 = growth()
    monkeypatch.setattr("revzoo.core.replay.unshared", lambda value: False)
    plain, expected = growth()
    assert torch.equal(x1, expected)
    stream = x.numel() * x.element_size()
    scratch = 0 if grid is None else 4 * 2**16
    assert spared <= scratch
    assert plain >= stream > 4 * scratch


class _Tripled(revzoo.AdditiveCoupling):
    """``y2 = 3 x1 + F(x2)``, by ``forward`` and ``inverse``."""

    def forward(self, x1, x2):
        return x2, 3 * x1 + self.branch(x2)

    def inverse(self, y1, y2):
        return (y2 - self.branch(y1)) / 3, y1


def test_a_coupling_with_another_forward_inherits_no_facts():
    """Its log-determinant was zero, and mode invert blamed its inverse."""
    step = _Tripled(nn.Linear(3, 3).double())
    x = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    with pytest.raises(NotImplementedError, match="defines no log_det"):
        step.log_det(*x)
    assert not step.exact
    gradients = []
    for mode in ("invert", "store"):
        net = revzoo.ReversibleSequence([step], memory=mode)
        loss = sum(y.square().sum() for y in net(*x))
        gradients.append(torch.autograd.grad(loss, [*x, *net.parameters()]))
    assert all(torch.allclose(a, b) for a, b in zip(*gradients, strict=True))


class _Scales:
    def combine(self, x1, value):
        return 0.5 * x1 + value

    def uncombine(self, y2, value):
        return 2 * (y2 - value)


class _Subtracts(revzoo.AdditiveCoupling):
    exact = True

    def combine(self, x1, value):
        return super().uncombine(x1, value)

    def uncombine(self, y2, value):
        return super().combine(y2, value)


def test_a_mixin_changes_the_facts_of_a_coupling():
    """Its log-determinant was zero, and its default mode exact."""
    step = type("Mixed", (_Scales, revzoo.AdditiveCoupling), {})(nn.Linear(3, 3))
    assert not step.exact
    with pytest.raises(NotImplementedError, match="defines no log_det"):
        step.log_det(torch.zeros(1, 3), torch.zeros(1, 3))


def test_a_subclass_that_says_it_is_exact_is():
    """The words were inverted like the words of a sum."""
    net = revzoo.ReversibleSequence([_Subtracts(nn.Linear(4, 4)) for _ in range(3)], memory="exact")
    x = torch.randn(2, 8, requires_grad=True)
    gradients = []
    for mode in ("exact", "store"):
        revzoo.set_memory(net, mode, grid="auto")
        gradients.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_a_coupling_derived_from_the_additive_one(scale):
    # Its value was overwritten by the reconstructed stream before combine was recorded.
    class Scaled(AdditiveCoupling):
        def __init__(self, branch):
            super().__init__(branch)
            self.scale = nn.Parameter(torch.tensor(scale))

        def combine(self, x1, value):
            return x1 + self.scale * value

        def uncombine(self, y2, value):
            return y2 - self.scale * value

    torch.manual_seed(0)
    net = ReversibleSequence([Scaled(nn.Linear(4, 4)) for _ in range(3)]).double()
    x = leaf_rows()
    assert error(gradients_in(net, "invert", x), gradients_in(net, "store", x)) < 1e-12


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_value_that_is_expanded(mode):
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x).mean(0, keepdim=True).expand_as(x)

    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(Mean()) for _ in range(3)]).double()
    x, grid = leaf_rows(), 14 if mode == "exact" else None
    expected = gradients_in(net, "store", x, grid=grid)
    assert error(gradients_in(net, mode, x, grid=grid), expected) < 1e-12


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_value_that_overlaps_itself_in_a_storage_of_its_own_size(mode):
    """The replay subtracted in place from one row that stood for all."""

    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x)[:1].expand_as(x)

    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(First()) for _ in range(3)]).double()
    x, grid = leaf_rows(), 14 if mode == "exact" else None
    expected = gradients_in(net, "store", x, grid=grid)
    assert error(gradients_in(net, mode, x, grid=grid), expected) < 1e-12


def test_a_branch_without_its_extra_output():
    coupling = AdditiveCoupling(nn.Identity())
    coupling.extras = 1
    with pytest.raises(TypeError, match="returned Tensor, expected a tuple of 2 tensors"):
        coupling(torch.ones(1, 2), torch.ones(1, 2))
