"""Squeezes: both channel orders, round trips, use inside a sequence, refusals."""

import itertools

import pytest
import torch
from compare import assert_same_training, conv_branch, images, twin
from torch import nn

from revzoo import ReversibleBlock, ReversibleSequence, Squeeze


def test_channel_orders():
    channels, b = 3, 2
    x = torch.arange(channels * 4 * 4.0).reshape(1, channels, 4, 4)
    torch_order = Squeeze(b, streams=1)(x)
    irevnet_order = Squeeze(b, order="irevnet", streams=1)(x)
    for c in range(channels):
        for dy in range(b):
            for dx in range(b):
                pixels = x[0, c, dy::b, dx::b]
                assert torch.equal(torch_order[0, (c * b + dy) * b + dx], pixels)
                assert torch.equal(irevnet_order[0, (dy * b + dx) * channels + c], pixels)
    assert not torch.equal(torch_order, irevnet_order)


@pytest.mark.parametrize("factor", [2, 3])
@pytest.mark.parametrize("order", ["torch", "irevnet"])
def test_round_trip_is_exact(order, factor):
    squeeze = Squeeze(factor, order=order)
    x1, x2 = torch.randn(2, 2, 3, 6, 12)
    y1, y2 = squeeze(x1, x2)
    assert y1.shape == (2, 3 * factor**2, 6 // factor, 12 // factor)
    z1, z2 = squeeze.inverse(y1, y2)
    assert torch.equal(z1, x1)
    assert torch.equal(z2, x2)


@pytest.mark.parametrize("mode", ["offload", "recompute", "invert"])
def test_inside_a_sequence(mode):
    """Asked at https://github.com/RobinBruegger/RevTorch/issues/12."""
    torch.manual_seed(0)
    blocks = [ReversibleBlock(conv_branch(c), conv_branch(c)) for c in (2, 8, 8)]
    steps = [blocks[0], Squeeze(2), blocks[1], Squeeze(2, order="irevnet")]
    net = ReversibleSequence(steps).double()
    assert_same_training(twin(net, mode), twin(net, "store"), images(channels=4, size=8))


def test_refusals():
    with pytest.raises(ValueError, match=r"Squeeze\(2\) got a stream of shape \(1, 2, 5, 4\)"):
        ReversibleSequence([Squeeze(2)])(torch.zeros(1, 4, 5, 4))
    with pytest.raises(ValueError, match="channels divisible by 4"):
        Squeeze(2).inverse(torch.zeros(1, 6, 2, 2))
    with pytest.raises(ValueError, match="factor=1"):
        Squeeze(1)
    with pytest.raises(ValueError, match="order=tf: expected one of torch, irevnet"):
        Squeeze(2, order="tf")
    with pytest.raises(ValueError, match="expected \\(B, C, H, W\\)"):
        Squeeze(2, streams=1)(nn.Parameter(torch.zeros(4, 4)))


@pytest.mark.parametrize("order", ["torch", "irevnet"])
def test_an_empty_batch_is_squeezed_too(order):
    squeeze = Squeeze(2, order=order, streams=1)
    y = squeeze(torch.zeros(0, 3, 4, 6))
    assert y.shape == (0, 12, 2, 3)
    assert squeeze.inverse(y).shape == (0, 3, 4, 6)


@pytest.mark.parametrize("factors", [(3,), (2, 3), (2, 2), (1, 2, 3), (2, 1, 1)])
@pytest.mark.parametrize("order", ["torch", "irevnet"])
def test_a_factor_per_axis(factors, order):
    """Each channel of the output holds one place of every block."""
    channels, sizes = 2, [2 * b for b in factors]
    x = torch.randn(3, channels, *sizes)
    squeeze = Squeeze(factors, order=order, streams=1)
    y = squeeze(x)
    assert y.is_contiguous()
    blocks = list(itertools.product(*map(range, factors)))
    for c in range(channels):
        for k, offset in enumerate(blocks):
            channel = c * len(blocks) + k if order == "torch" else k * channels + c
            place = tuple(slice(o, None, b) for o, b in zip(offset, factors, strict=True))
            assert torch.equal(y[:, channel], x[(slice(None), c, *place)])
    assert torch.equal(squeeze.inverse(y), x)
    empty = x[:0]
    assert squeeze.inverse(squeeze(empty)).shape == empty.shape


def test_factors_that_are_refused():
    for factor in ((), (1, 1), (0, 2), (2, -1)):
        with pytest.raises(ValueError, match="or one of at least 1 for each axis, not all 1"):
            Squeeze(factor)
    with pytest.raises(ValueError, match=r"Squeeze\(\(2, 3\)\) got a stream of shape \(1, 2, 4"):
        Squeeze((2, 3), streams=1)(torch.zeros(1, 2, 4, 4))
    with pytest.raises(ValueError, match=r"expected \(B, C, L\) with channels divisible by 3"):
        Squeeze((3,), streams=1).inverse(torch.zeros(1, 2, 4))


def test_volumes_need_a_factor_for_each_axis():
    with pytest.raises(ValueError, match="one factor for each axis"):
        Squeeze(2, streams=1)(torch.zeros(1, 2, 4, 4, 4))
