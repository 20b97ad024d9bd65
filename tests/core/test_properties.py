"""Random architectures: gradients, buffers and random state equal stored backprop."""

import pytest
import torch
from compare import Effects, error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from revzoo import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    ChannelPermutation,
    HaarSqueeze,
    InjectiveLinear,
    InvertibleBatchNorm,
    InvertibleConv1x1,
    InvertibleLeakyReLU,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Squeeze,
    set_memory,
)

NORMS = {
    "none": lambda c: nn.Identity(),
    "batch": nn.BatchNorm2d,
    "batch, cumulative": lambda c: nn.BatchNorm2d(c, momentum=None),
    "batch, stateless": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    "group": lambda c: nn.GroupNorm(1, c),
}
ACTIVATIONS = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "relu, in place": lambda: nn.ReLU(inplace=True),
}


@st.composite
def branches(draw, channels, outputs):
    hidden = draw(st.sampled_from([1, 2, 4]))
    norm = NORMS[draw(st.sampled_from(sorted(NORMS)))]
    activation = ACTIVATIONS[draw(st.sampled_from(sorted(ACTIVATIONS)))]
    layers = [nn.Conv2d(channels, hidden, 3, padding=1, bias=draw(st.booleans())), norm(hidden)]
    layers += [activation(), nn.Dropout(draw(st.sampled_from([0.0, 0.3])))]
    layers += [nn.Conv2d(hidden, outputs, 1)]
    return nn.Sequential(*layers)


@st.composite
def steps(draw, channels):
    kinds = ["block", "additive", "affine", "nested", "layer", "reversed"]
    kind = draw(st.sampled_from(kinds))
    if kind == "layer":
        return LAYERS[draw(st.sampled_from(sorted(LAYERS)))](2 * channels)
    if kind == "reversed":
        return Reversed(AdditiveCoupling(draw(branches(channels, channels))))
    if kind == "block":
        return ReversibleBlock(*(draw(branches(channels, channels)) for _ in range(2)))
    if kind == "additive":
        return AdditiveCoupling(draw(branches(channels, channels)))
    if kind == "affine":
        return AffineCoupling(draw(branches(channels, 2 * channels)))
    return ReversibleSequence([AdditiveCoupling(draw(branches(channels, channels)))])


LAYERS = {
    "permutation": ChannelPermutation,
    "plu": InvertibleConv1x1,
    "orthogonal": lambda c: InvertibleConv1x1(c, matrix="orthogonal"),
    "batch norm": InvertibleBatchNorm,
    "batch norm of the batch": lambda c: InvertibleBatchNorm(c, statistics="batch"),
    "linear with bias": lambda c: InjectiveLinear(c, c, matrix="plu", dim=1),
    "leaky relu": lambda _: InvertibleLeakyReLU(0.5),
    "actnorm": ActNorm,
}
SQUEEZES = {
    "torch": Squeeze,
    "irevnet": lambda: Squeeze(order="irevnet"),
    "haar": HaarSqueeze,
}


@st.composite
def nets(draw):
    torch.manual_seed(draw(st.integers(0, 2**16)))
    channels = first = draw(st.sampled_from([1, 2, 3]))
    members = []
    for _ in range(draw(st.integers(1, 5))):
        if channels <= 3 and draw(st.integers(0, 4)) == 0:
            members.append(SQUEEZES[draw(st.sampled_from(sorted(SQUEEZES)))]())
            channels *= 4
        members.append(draw(steps(channels)))
    net = ReversibleSequence(members)
    for p in net.parameters():
        p.requires_grad_(draw(st.integers(0, 4)) > 0)
    for m in net.modules():
        if draw(st.integers(0, 5)) == 0:
            m.eval()
    return net.double(), 2 * first


MODES = ["store", "offload", "recompute", "invert"]


def effects(net, x, initial, *, two_streams, twice):
    """One training step from the initial buffers, with all its effects."""
    net.load_state_dict(initial)
    net.zero_grad(set_to_none=True)
    torch.manual_seed(5)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    y = torch.cat(net(*x.chunk(2, dim=1)), dim=1) if two_streams else net(x)
    loss = y.sin().mean()  # squares are blind to rotations
    if loss.requires_grad:
        loss.backward(retain_graph=twice)
        if twice:
            loss.backward()
    gradients = [p.grad for p in (x, *net.parameters()) if p.grad is not None]
    buffers = [b.clone() for b in net.buffers()]
    return Effects([loss.detach()], gradients, buffers, torch.get_rng_state())


@pytest.mark.timeout(600)
@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_random_nets_equal_store(data):
    net, channels = data.draw(nets())
    initial = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.randn(2, channels, 4, 4, dtype=torch.float64)
    x.requires_grad_(data.draw(st.booleans()))
    options = {"two_streams": data.draw(st.booleans()), "twice": data.draw(st.booleans())}
    set_memory(net, "store")
    expected = effects(net, x, initial, **options)
    for m in net.modules():
        if hasattr(m, "memory"):
            m.memory = data.draw(st.sampled_from(MODES))
    if data.draw(st.booleans()):
        set_memory(net, "invert")
    actual = effects(net, x, initial, **options)
    assert torch.equal(actual.losses[0], expected.losses[0])
    if expected.gradients:
        assert error(actual.gradients, expected.gradients) <= 1e-10
    for a, e in zip(actual.buffers, expected.buffers, strict=True):
        assert torch.equal(a, e)
    assert torch.equal(actual.random_state, expected.random_state)
