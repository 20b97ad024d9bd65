"""Log-determinants of chains: sums, gradients in every mode, memory, layers that have none."""

import math

import pytest
import torch
from compare import conv_net, error, images, twin
from layer_table import build
from torch import nn

import revzoo
from revzoo import (
    ActNorm,
    AffineCoupling,
    ChannelPermutation,
    Coupling,
    Invertible,
    InvertibleBatchNorm,
    InvertibleConv1x1,
    Merge,
    NotInvertibleError,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Split,
    Squeeze,
    Step,
    drift,
    set_memory,
)
from revzoo.core.live import LiveMemory
from revzoo.layers.logdet import WithLogDet

MODES = ["offload", "recompute", "invert"]


def affine(channels, *, dropout=0.0):
    first, last = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, 2 * channels, 1)
    return AffineCoupling(nn.Sequential(first, nn.Tanh(), nn.Dropout(dropout), last))


def flow(*, depth=1, dropout=0.0, norm=ActNorm):
    """On one tensor ``(B, 4, H, W)`` in float64, with a nested sequence and a block."""
    torch.manual_seed(0)
    steps = [Squeeze(2)]
    for _ in range(depth):
        inner = ReversibleSequence([affine(8, dropout=dropout), ChannelPermutation(16)])
        block = ReversibleBlock(nn.Conv2d(8, 8, 1), nn.Tanh())
        steps += [norm(16), InvertibleConv1x1(16), inner, Reversed(affine(8)), block]
    return ReversibleSequence(steps).double()


def likelihood(net, x):
    """The negative log-likelihood of a standard normal, per image."""
    z, log_det = net.forward_with_log_det(x)
    return 0.5 * z.square().flatten(1).sum(1) - log_det


def jacobian(net, x):
    one = torch.func.jacrev(lambda v: net(v.reshape(1, *x.shape)).flatten())
    return one(x.flatten())


def test_a_sequence_sums_its_steps():
    net, x = flow(), images(channels=4, size=2, batch=2)
    net(x)  # initialises
    y, log_det = net.forward_with_log_det(x)
    assert torch.equal(y, net(x))
    assert torch.equal(log_det, net.log_det(x))
    for image in range(2):
        expected = torch.linalg.slogdet(jacobian(net, x[image])).logabsdet
        assert abs(log_det[image] - expected) < 1e-10
    assert log_det.abs().min() > 0.1


def test_reversed_is_negative_at_the_other_end():
    net, x = flow(), images(channels=4, size=2, batch=2)
    y, log_det = net.forward_with_log_det(x)
    back, reverse = Reversed(net).forward_with_log_det(y)
    assert error([back], [x]) < 1e-12
    torch.testing.assert_close(reverse, -log_det, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["actnorm", "conv1x1, plu"])
def test_two_streams_give_a_tuple(name):
    layer = build(name)
    x1, x2 = images(channels=4, batch=2).chunk(2, dim=1)
    (y1, y2), log_det = ReversibleSequence([layer]).forward_with_log_det(x1, x2)
    assert y1.shape == y2.shape == x1.shape
    torch.testing.assert_close(log_det, layer.log_det(x1, x2))


def test_the_total_is_taken_back():
    step, (x1, x2) = WithLogDet(build("actnorm")), images(channels=4).chunk(2, dim=1)
    total = torch.randn(3, dtype=torch.float64)
    assert error(step.inverse(*step(x1, x2, total)), (x1, x2, total)) < 1e-13


def test_splitting_and_merging():
    net = ReversibleSequence([Split(), affine(2), Merge()]).double()
    x = images(channels=4, size=2, batch=2)
    assert torch.equal(net.log_det(x), net[1].log_det(*x.chunk(2, dim=1)))
    assert error([Reversed(net)(net(x))], [x]) < 1e-13


@pytest.mark.parametrize("norm", [ActNorm, InvertibleBatchNorm])
@pytest.mark.parametrize("mode", MODES)
def test_the_likelihoods_gradients_equal_store(mode, norm):
    net = flow(depth=2, dropout=0.3 if norm is ActNorm else 0.0, norm=norm)
    results = []
    for m in (mode, "store"):
        other = twin(net, m)
        for seed in (2, 3):  # the first initialises
            torch.manual_seed(seed)
            x = images(channels=4, size=4, seed=seed).requires_grad_()
            loss = likelihood(other, x).mean()
        gradients = torch.autograd.grad(loss, [x, *other.parameters()], materialize_grads=True)
        results.append([loss.detach(), *gradients, *other.buffers()])
    assert error(*([t.double() for t in r] for r in results)) < 1e-10


def test_in_mode_exact():
    net = ReversibleSequence([Squeeze(2), ReversibleBlock(nn.Tanh(), nn.Tanh())], memory="exact")
    y, log_det = net.forward_with_log_det(images(channels=4).float().requires_grad_())
    (y.sum() + log_det.sum()).backward()
    assert torch.equal(log_det, torch.zeros(3))


def test_under_autocast_the_sum_stays_wide():
    net, x = flow().float(), images(channels=4).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, log_det = net.forward_with_log_det(x.bfloat16().requires_grad_())
        (y.sum() + log_det.sum()).backward()
    assert y.dtype == log_det.dtype == torch.float32


def test_drift_is_noted_at_the_steps():
    net = flow()
    likelihood(net, images(channels=4).requires_grad_()).sum().backward()
    assert all(value < 1e-12 for value in drift(net).values())
    assert {"steps.1", "steps.2", "steps.3.steps.0", "steps.4.steps.0"} <= drift(net).keys()


def test_memory_does_not_grow_with_depth():
    def peak(depth, mode):
        net, x = flow(depth=depth), images(channels=4, size=128)
        set_memory(net, mode)
        with LiveMemory() as memory:
            likelihood(net, x.requires_grad_()).mean().backward()
        return memory.peak / x.nbytes

    growth = {mode: peak(4, mode) - peak(2, mode) for mode in ("invert", "store")}
    assert growth["store"] > 10
    assert growth["invert"] < 0.5  # gradients of parameters: no activation


def test_a_layer_without_one_is_named():
    class Shift(Invertible):
        def forward(self, x1, x2):
            return x1 + 1, x2

        def inverse(self, y1, y2):
            return y1 - 1, y2

    class Swirl(Coupling):
        def combine(self, x1, value):
            return x1 * value.cosh()

    class Halve(Step):
        def forward(self, x1, x2):
            return x1[:, ::2], x2[:, ::2]

    x = images()
    for step in (Shift(), Swirl(nn.Tanh())):
        kind = type(step).__name__
        with pytest.raises(NotImplementedError, match=rf"{kind} defines no log_det"):
            step.log_det(*x.chunk(2, dim=1))
        with pytest.raises(NotImplementedError, match=rf"steps.1 {kind} defines no log_det"):
            ReversibleSequence([ReversibleBlock(nn.Tanh(), nn.Tanh()), step]).log_det(x)
    with pytest.raises(NotInvertibleError, match="step 0 of 1, Halve"):
        ReversibleSequence([Halve()]).log_det(x)


def test_additive_networks_keep_volume():
    net = conv_net(norm=lambda c: nn.GroupNorm(2, c))
    assert torch.equal(net.log_det(images()), torch.zeros(3).double())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_determinants_are_at_least_float32(dtype):
    """As float16 they overflowed for images, and as bfloat16 they lost digits."""
    x = -torch.ones(2, 3, 224, 224, dtype=dtype)
    relu = revzoo.InvertibleLeakyReLU(0.2, streams=1)
    norm = revzoo.ActNorm(3, streams=1)
    norm.log_scale.data.fill_(1.0)
    for step, of_value in ((relu, math.log(0.2)), (norm.eval(), 1.0)):
        found = step.log_det(x)
        assert found.dtype == torch.float32
        assert torch.allclose(found, torch.full((2,), of_value * x[0].numel()), rtol=1e-5)


class Exp(Invertible):
    """Its replay does more than its forward pass, after the last tensor that it saves."""

    streams = 1

    def forward(self, x):
        y = x.exp()
        return y.exp().log() if revzoo.is_replaying() else y

    inverse = torch.log

    def log_det(self, x):
        return x.sum(1)


def test_a_step_that_is_replayed_to_its_end_is_so_with_its_log_determinant():
    """As any step with code that we do not know."""
    net = ReversibleSequence([Exp()], memory="recompute")
    y, log_det = net.forward_with_log_det(torch.randn(2, 3, requires_grad=True))
    with pytest.raises(revzoo.ReplayMismatchError, match="save more tensors"):
        (y.sum() + log_det.sum()).backward()
