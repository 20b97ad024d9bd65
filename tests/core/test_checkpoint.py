"""``checkpoint``: hostile functions, beyond what torch's own tests ask (tests/peers)."""

# ruff: noqa: B023 -- functions that see a loop's variables are what a checkpoint must cope with

import copy
import functools
import pickle
import weakref

import numpy as np
import pytest
import torch
from compare import error, grows, leaf_rows, linear_net
from torch import nn

import revzoo
from revzoo import AdditiveCoupling, DriftError, ReversibleSequence, checkpoint, set_memory


def leaf(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape or (4,), dtype=torch.float64, generator=generator).requires_grad_()


class Net(nn.Module):
    """Calls ``checkpoint`` in its forward, or not."""

    def __init__(self, *, nested):
        super().__init__()
        self.bn = nn.BatchNorm1d(4)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.register_buffer("calls", torch.zeros(()))
        self.nested = nested

    def forward(self, x):
        self.calls += 1
        h = self.bn(x) * self.calls
        return checkpoint(self.block, h) if self.nested else self.block(h)


class OfFunction(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


def in_a_coupling(net, x):
    seq = ReversibleSequence([AdditiveCoupling(OfFunction(lambda t: net(t)))], memory="invert")
    return seq(torch.zeros_like(x), x)[1]


@pytest.mark.parametrize(
    "call",
    [
        checkpoint,
        lambda net, x: checkpoint(lambda t: net(t), x),
        lambda net, x: checkpoint(net.__call__, x),
        lambda net, x: checkpoint(lambda m, t: m(t), net, x),
        lambda net, x: checkpoint(lambda ms, t: ms[0](t), [net], x),
        lambda net, x: checkpoint(functools.partial(lambda m, t: m(t), net), x),
        in_a_coupling,
    ],
    ids=["module", "closure", "method", "argument", "list", "partial", "coupling"],
)
def test_a_module_that_calls_checkpoint_itself(call):
    """It was taken for a module around the outer call, so that its buffers and
    statistics were not restored: DriftError, and statistics counted twice."""
    found = []
    for nested, fn in ((True, call), (False, lambda net, x: net(x))):
        torch.manual_seed(0)
        net, x = Net(nested=nested).double(), leaf(5, 4)
        for _ in range(2):
            fn(net, x).square().sum().backward()
        found.append([x.grad, *(p.grad for p in net.parameters()), *net.buffers()])
    assert all(map(torch.equal, *found))


class Methods(nn.Module):
    """Three checkpoints, one inside the other, each of a method."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.register_buffer("steps", torch.zeros(()))

    def first(self, x):
        return checkpoint(self.second, x).tanh()

    def second(self, x):
        return checkpoint(self.third, x).sin()

    def third(self, x):
        return self.inside(x)

    def forward(self, x):
        y = self.outside(checkpoint(self.first, x))
        self.steps += 1  # no part of the checkpoint, though its module's
        return y


def test_methods_of_the_module_that_calls():
    net, x = Methods().double(), leaf(5, 4)
    plain = copy.deepcopy(net)
    for _ in range(2):
        net(x).square().sum().backward()
    grad, x.grad = x.grad, None
    for _ in range(2):
        plain.outside(plain.inside(x).sin().tanh()).square().sum().backward()
    assert torch.equal(grad, x.grad)
    assert net.inside.num_batches_tracked == net.outside.num_batches_tracked == net.steps == 2
    assert torch.equal(net.inside.running_var, plain.inside.running_var)


def test_what_cannot_be_called():
    with pytest.raises(TypeError, match="fn is 3, expected a module or a function"):
        checkpoint(3, torch.randn(2))


def test_one_tensor_in_two_places_is_one_tensor_again():
    x = leaf()
    checkpoint(lambda a, b: (a * b).sin() if a is b else a.exp(), x, x).sum().backward()
    torch.testing.assert_close(x.grad, (2 * x * (x * x).cos()).detach())


def test_a_parameter_among_the_arguments_is_one_in_the_replay():
    p = nn.Parameter(torch.ones(3))
    fn = lambda q: q.exp() if isinstance(q, nn.Parameter) else q * q  # noqa: E731
    checkpoint(fn, p).sum().backward()
    torch.testing.assert_close(p.grad, p.detach().exp())


def test_a_module_is_left_as_it_was():
    """The pickle contains no part of revzoo."""
    layer = nn.Linear(4, 4).double()
    before = set(vars(layer))
    checkpoint(layer, leaf(2, 4)).sum().backward()
    assert set(vars(layer)) == before
    assert b"revzoo" not in pickle.dumps(layer)
    gone = weakref.ref(layer)
    del layer
    assert gone() is None


def test_a_closure_over_a_variable_that_the_result_replaces_is_reported():
    layers = [nn.Linear(4, 4).double() for _ in range(3)]
    start = x = leaf(2, 4)
    for layer in layers:
        x = checkpoint(lambda: layer(x).tanh())
    with pytest.raises(DriftError, match="It was computed again from the same inputs") as error:
        torch.autograd.grad(x.sum(), start)
    assert error.value.step is None  # no step is at fault


def test_infinities_repeat_without_an_error():
    """Scaled losses overflow at times; the scaler then skips the step."""
    for early_stop in (True, False):
        x = torch.tensor([1e200, -1.0], dtype=torch.float64, requires_grad=True)
        checkpoint(lambda t: (t * t * t).log(), x, early_stop=early_stop).sum().backward()
        assert not x.grad.isfinite().all()


def test_what_it_returns_is_the_very_object():
    x, seen = leaf(), []

    def fn(t, sink):
        sink.append(1)
        out = {"y": t.exp(), "sink": sink}
        seen.append(out)
        return out

    sink = []
    out = checkpoint(fn, x, sink)
    assert out is seen[0]
    assert out["sink"] is sink
    out["y"].sum().backward()
    assert sink == [1]  # the replay appends to another list


def test_nothing_is_left_when_the_graph_is_gone():
    refs = []

    def fn(t):
        refs.append(weakref.ref(h := t.exp()))
        return h.sin() * h

    y = checkpoint(fn, leaf())
    assert refs[0]() is None
    y.sum().backward()
    del y
    assert [r() for r in refs] == [None, None]


@pytest.mark.parametrize("mode", ["store", "recompute", "offload", "invert", "exact"])
def test_around_and_inside_reversible_sequences(mode):
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x):
            return checkpoint(self.layer, x).tanh()

    torch.manual_seed(0)
    inside = ReversibleSequence([AdditiveCoupling(Inner()) for _ in range(2)]).double()
    outside = linear_net(2)
    for net in (inside, outside):
        set_memory(net, mode)
    x = leaf(3, 8)
    parameters = [x, *inside.parameters(), *outside.parameters()]
    y = checkpoint(outside, inside(x))
    found = [torch.autograd.grad(y.square().sum(), parameters)]
    for net in (inside, outside):
        set_memory(net, "store")
    found.append(torch.autograd.grad(outside(inside(x)).square().sum(), parameters))
    assert error(*found) < (1e-2 if mode == "exact" else 1e-12)


def test_sparse_arguments():
    matrix, x = torch.eye(4).double().to_sparse().requires_grad_(), leaf(4, 4)
    checkpoint(lambda m, t: torch.sparse.mm(m, t).exp(), matrix, x).sum().backward()
    torch.testing.assert_close(x.grad, x.exp().detach())


def test_functional_transforms_and_second_derivatives():
    """A transform has nothing to recompute: the plain call."""
    x = leaf()
    gradient = torch.func.grad(lambda t: checkpoint(torch.sin, t).sum())(x.detach())
    torch.testing.assert_close(gradient, x.detach().cos())
    values = torch.func.vmap(lambda t: checkpoint(torch.sin, t))(x.detach())
    torch.testing.assert_close(values, x.detach().sin())
    assert torch.autograd.gradcheck(lambda t: checkpoint(lambda u: u.exp().sin(), t), x)
    assert torch.autograd.gradgradcheck(lambda t: checkpoint(lambda u: u.exp().sin(), t), x)


def test_sizes_of_nested_tensors_are_known_by_identity():
    """The replay got another tensor of offsets, so its nested tensors had other sizes."""

    def ragged(x, offsets):
        return torch.nested.nested_tensor_from_jagged(x.sin(), offsets).exp().values()

    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    offsets = torch.tensor([0, 2, 5])
    (expected,) = torch.autograd.grad(ragged(x, offsets).sum(), x)
    (got,) = torch.autograd.grad(checkpoint(ragged, x, offsets).sum(), x)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("inner", ["recompute", "invert"])
def test_dropout_in_steps_inside_a_checkpoint(inner):
    """A replay that ends early was said to draw other random numbers."""
    results = []
    for mode in (inner, "store"):
        torch.manual_seed(0)
        branches = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3)) for _ in range(2)]
        net = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory=mode).double()
        x = leaf_rows()
        y = net(x) if mode == "store" else checkpoint(net, x)
        results.append(torch.autograd.grad(y.square().sum(), [x, *net.parameters()]))
    assert error(*results) < 1e-12


def test_nothing_is_left_of_a_checkpoint_that_fails():
    """Its last activation held its own graph, for good."""
    linear = nn.Linear(4, 4)

    def fails(x):
        linear(x).exp()
        raise KeyError

    def step():
        with pytest.raises(KeyError):
            checkpoint(fails, torch.ones(2, 4))

    assert not grows(step)


def test_an_order_drawn_outside_of_torch_is_noticed():
    """It permuted the gradient."""
    x = torch.randn(3, 64, requires_grad=True)
    y = revzoo.checkpoint(
        lambda x: x[:, torch.from_numpy(np.random.default_rng().permutation(64))], x
    )
    with pytest.raises(DriftError):
        y.sum().backward()


def test_a_ctc_loss_of_sequences_of_several_lengths():
    """Its kernel leaves a part of its table unfilled, which the guard compared."""
    lengths, targets = torch.tensor([20, 12, 9]), torch.tensor([[1, 2, 3], [2, 1, 4], [3, 3, 5]])

    def loss(x):
        targets_length = torch.tensor([3, 2, 3])
        return nn.functional.ctc_loss(x.log_softmax(-1), targets, lengths, targets_length)

    for _ in range(20):
        x = torch.randn(20, 3, 6, requires_grad=True)
        y = checkpoint(loss, x)
        # other tensors take the place of the freed table
        del [torch.full((420,), 1e3) for _ in range(20)][:]
        (gradient,) = torch.autograd.grad(y, x)
        (expected,) = torch.autograd.grad(loss(x), x)
        assert torch.equal(gradient, expected)
