"""For every layer: round trips, gradients in each mode, log-determinants, refusals."""

import copy

import pytest
import torch
from compare import error, train, twin
from layer_table import EXACT, INJECTIVE, LAYERS, build, inputs
from torch import nn
from torch.nn import GELU

from revzoo import (
    ActNorm,
    AdditiveCoupling,
    ChannelPadding,
    ChannelPermutation,
    HaarSqueeze,
    InjectiveLinear,
    InvertibleBatchNorm,
    InvertibleConv1x1,
    InvertibleFlatten,
    InvertibleLeakyReLU,
    InvertibleLinear,
    PatchConv,
    Reversed,
    ReversibleSequence,
    SpatialPadding,
    Squeeze,
    check_inverse,
    drift,
    set_memory,
)
from revzoo.core.invertible import steps_in
from revzoo.core.kernels import round_to_grid
from revzoo.core.live import LiveMemory
from revzoo.core.modes import MODES
from revzoo.layers.streams import Joint, Streamwise

every_layer = pytest.mark.parametrize("name", LAYERS)


def between_couplings(name):
    """The layer with neighbours whose branches need the streams as they were."""
    steps = [AdditiveCoupling(nn.Tanh()), build(name), AdditiveCoupling(nn.Sigmoid())]
    net = ReversibleSequence([*steps, AdditiveCoupling(nn.Tanh())])
    return net.double()


class OfTwo(nn.Module):
    """A net of two streams as a net of one tensor, for the helpers."""

    def __init__(self, net, shape):
        super().__init__()
        self.net = net
        self.shape = shape

    def forward(self, x):
        streams = self.net(*(t.unflatten(1, self.shape) for t in x.unbind(1)))
        return torch.cat([t.sin().flatten(1) for t in streams], dim=1)


def jacobians(layer, state, image):
    """The Jacobian of one image's outputs by its inputs, a square matrix."""
    shapes = [x[image].shape for x in state]

    def flat(vector):
        parts = vector.split([s.numel() for s in shapes])
        streams = layer(*(p.reshape(1, *s) for p, s in zip(parts, shapes, strict=True)))
        return torch.cat([y.flatten() for y in streams])

    return torch.func.jacrev(flat)(torch.cat([x[image].flatten() for x in state]))


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_round_trip(name, training):
    layer, state = build(name).train(training), inputs(name)
    back = layer.inverse(*layer(*state))
    assert error(back, state) < 1e-13
    assert [b.shape for b in back] == [x.shape for x in state]


@every_layer
def test_log_det_is_that_of_the_jacobian(name):
    layer, state = build(name).eval(), inputs(name, batch=2)
    if name in INJECTIVE:
        with pytest.raises(NotImplementedError, match="Jacobian"):
            layer.log_det(*state)
        return
    log_det = layer.log_det(*state)
    assert log_det.shape == (2,)
    for image in range(2):
        expected = torch.linalg.slogdet(jacobians(layer, state, image)).logabsdet
        assert abs(log_det[image] - expected) < 1e-10
    # Zero is right for some layers and must be wrong for the others.
    volume = log_det.abs().max() > 1e-3
    moves = ("squeeze", "haar", "permutation", "flatten")
    assert volume == (not name.startswith(moves) and "orthogonal" not in name)


@every_layer
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", ["offload", "recompute", "invert"])
def test_training_equals_store(name, mode, training):
    net = between_couplings(name).train(training)
    x = torch.stack([s.flatten(1) for s in inputs(name)], dim=1)
    shape = inputs(name)[0].shape[1:]
    actual, expected = (train(OfTwo(twin(net, m), shape), x) for m in (mode, "store"))
    assert error(actual.losses, expected.losses) <= 1e-10
    assert error(actual.gradients, expected.gradients) <= 1e-10
    for a, e in zip(actual.buffers, expected.buffers, strict=True):
        assert torch.allclose(a.double(), e.double(), rtol=1e-10, atol=1e-10)


@every_layer
def test_what_comes_before_it_is_reconstructed_through_it(name):
    net = between_couplings(name)
    net(*(x.requires_grad_() for x in inputs(name)))[0].sum().backward()
    assert 0 <= drift(net)["steps.0"] < 1e-13


def test_memory_does_not_grow_with_depth():
    def peak(depth, mode):
        torch.manual_seed(0)
        layers = (
            ActNorm(8),
            InvertibleConv1x1(8),
            InvertibleBatchNorm(8),
            AdditiveCoupling(GELU()),
        )
        net = ReversibleSequence([copy.deepcopy(s) for _ in range(depth) for s in layers])
        set_memory(net, mode)
        x = torch.randn(8, 8, 64, 64, requires_grad=True)
        with LiveMemory() as memory:
            net(x).square().mean().backward()
        return memory.peak / x.nbytes

    growth = {mode: peak(6, mode) - peak(2, mode) for mode in ("invert", "store")}
    assert growth["store"] > 10
    assert growth["invert"] < 0.25  # gradients of parameters, statistics: no activation


@every_layer
def test_gradcheck(name):
    layer = build(name).eval()
    state = tuple(x[:1].requires_grad_() for x in inputs(name))
    assert torch.autograd.gradcheck(lambda *s: tuple(layer(*s)), state)


@every_layer
def test_mode_exact(name):
    net = between_couplings(name).float()
    if name not in EXACT:
        layer = build(name)
        if name.startswith("reversed"):
            layer = layer[0].step
        kind = "InjectiveLinear" if name.startswith("patches") else type(layer).__name__
        with pytest.raises(ValueError, match=rf"{kind}.* is not exact.*, since .*use 'invert'"):
            set_memory(net, "exact")
        return
    results = []
    for mode in ("exact", "store"):
        set_memory(net, mode, grid=14)
        state = tuple(x.float().requires_grad_() for x in inputs(name))
        outputs = net(*state)
        results.append(torch.autograd.grad(sum(y.square().sum() for y in outputs), state))
        on_grid = [round_to_grid(x, 14) for x in state]
        assert all(map(torch.equal, net.inverse(*outputs), on_grid))
    assert all(map(torch.equal, *results))


@every_layer
def test_state_dict_is_the_same_in_every_mode(name):
    layer = build(name)
    keys = set()
    for mode in MODES if name in EXACT else list(MODES)[:-1]:
        set_memory(layer, mode)
        layer(*inputs(name))
        keys.add(tuple(layer.state_dict()))
    assert len(keys) == 1


@every_layer
@pytest.mark.parametrize("training", [True, False])
def test_check_inverse(name, training):
    report = check_inverse(between_couplings(name).train(training), *inputs(name))
    assert report.worst(torch.float64) < 1e-12
    assert report.worst(torch.float32) < 1e-4
    assert report.worst(torch.bfloat16) < 0.2


def test_streams_of_unequal_size_and_number():
    torch.manual_seed(0)
    streams = torch.randn(2, 6, 3, 3).split([1, 2, 3], dim=1)
    norm = ActNorm(6, streams=3)
    outputs = norm(*streams)
    assert [y.shape for y in outputs] == [x.shape for x in streams]
    assert torch.cat(outputs, 1).mean((0, 2, 3)).abs().max() < 1e-6
    assert error(norm.inverse(*outputs), streams) < 1e-6


ALONE = {
    "squeeze": lambda: Squeeze(2, streams=1),
    "haar": lambda: HaarSqueeze(streams=1),
    "permutation": lambda: ChannelPermutation(4, streams=1),
    "conv1x1": lambda: InvertibleConv1x1(4, streams=1),
    "linear": lambda: InvertibleLinear(4, streams=1),
    "wider": lambda: InjectiveLinear(4, 6, streams=1),
    "patches": lambda: PatchConv(4, 16, 2, streams=1),
    "actnorm": lambda: ActNorm(4, streams=1),
    "batchnorm": lambda: InvertibleBatchNorm(4, streams=1),
    "flatten": lambda: InvertibleFlatten((4, 4, 4), streams=1),
    "leaky relu": lambda: InvertibleLeakyReLU(0.2, streams=1),
    "frame": lambda: SpatialPadding(1, streams=1),
    "channels of zeros": lambda: ChannelPadding(2),
    "reversed": lambda: Reversed(InvertibleConv1x1(4, streams=1)),
    "reversed step": lambda: Reversed(InvertibleConv1x1(4, streams=1))[0],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ALONE)
def test_a_layer_of_one_stream_maps_a_tensor_to_a_tensor(name, mode):
    layer = ALONE[name]().double()
    if mode == "exact" and not all(step.exact for step in steps_in(layer).values()):
        mode = "invert"
    set_memory(layer, mode)
    x = torch.randn(3, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    net = nn.Sequential(nn.Tanh(), layer, nn.Tanh())  # among plain modules
    net(x).sum().backward()
    layer.eval()
    y = layer(x)
    assert isinstance(y, torch.Tensor)
    back = layer.inverse(y)
    assert isinstance(back, torch.Tensor)
    assert (back - x).abs().max() < (1e-5 if mode == "exact" else 1e-12)


def test_refusals():
    with pytest.raises(ValueError, match=r"ActNorm got streams of shape \(1, 3\), \(1, 3\).*4 in"):
        ActNorm(4)(torch.zeros(1, 3), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="got streams of shape"):
        ActNorm(3, streams=1)(torch.zeros(3))
    with pytest.raises(ValueError, match="ActNorm size=0"):
        ActNorm(0)
    with pytest.raises(ValueError, match="dim=2: expected one of 1"):
        ActNorm(2, dim=2)
    with pytest.raises(ValueError, match="streams=0"):
        Squeeze(2, streams=0)
    for base in (Streamwise(), Joint(2)):
        with pytest.raises(NotImplementedError, match="must define transform"):
            base(torch.zeros(1, 1), torch.zeros(1, 1))
