"""Containers: one tensor or two streams, round trips, refusals."""

import pytest
import torch
from compare import conv_net, images, linear_net
from torch import nn

from revzoo import (
    AdditiveCoupling,
    NotInvertibleError,
    ReversibleBlock,
    ReversibleSequence,
    Step,
    set_drift_limit,
)


class Stem(Step):
    streams = 1

    def forward(self, x):
        return x.sin(), x.cos()


def test_one_tensor_is_two_streams_merged():
    net, x = conv_net().eval(), images()
    y1, y2 = net(*x.chunk(2, dim=1))
    assert torch.equal(net(x), torch.cat((y1, y2), dim=1))


def test_round_trip():
    net, x = conv_net().eval(), images()
    assert (net.inverse(net(x)) - x).abs().max() < 1e-12
    x1, x2 = net.inverse(*net(*x.chunk(2, dim=1)))
    assert (torch.cat((x1, x2), dim=1) - x).abs().max() < 1e-12


def test_block_is_the_papers_equation():
    torch.manual_seed(0)
    f, g = nn.Linear(3, 3), nn.Linear(3, 3)
    x1, x2 = torch.randn(2, 3), torch.randn(2, 3)
    y1 = x1 + f(x2)
    y2 = x2 + g(y1)
    z1, z2 = ReversibleBlock(f, g)(x1, x2)
    assert torch.equal(z1, y1)
    assert torch.equal(z2, y2)


def test_a_stem_takes_the_tensor_whole():
    net = ReversibleSequence([Stem(), AdditiveCoupling(nn.Tanh())])
    x = torch.randn(2, 3)  # an odd number of channels is no matter here
    y1, y2 = net(x)
    assert torch.equal(y1, x.cos())
    assert torch.equal(y2, x.sin() + x.cos().tanh())


def test_inverse_names_the_layer_that_loses_information():
    net = ReversibleSequence([Stem(), AdditiveCoupling(nn.Tanh())])
    with pytest.raises(NotInvertibleError, match="step 0 of 2, Stem"):
        net.inverse(torch.randn(2, 3), torch.randn(2, 3))


def test_odd_channels():
    with pytest.raises(ValueError, match=r"shape \(2, 7\).*expected an even number of channels"):
        linear_net()(torch.randn(2, 7, dtype=torch.float64))


def test_wrong_number_of_streams():
    x = torch.randn(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="got 3 streams, its first step takes 2"):
        linear_net()(x, x, x)


def test_a_member_that_is_no_step():
    with pytest.raises(TypeError, match="step 1 is a Linear, expected an Invertible"):
        ReversibleSequence([AdditiveCoupling(nn.Identity()), nn.Linear(2, 2)])


def test_a_branch_of_another_shape():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 1))])
    with pytest.raises(
        ValueError, match=r"Linear returned shape \(3, 1\) for a stream of shape \(3, 2\)"
    ):
        net(torch.randn(3, 4))


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("batch", [0, 3])
def test_layouts_and_empty_batches(memory_format, batch):
    net = conv_net(norm=lambda c: nn.GroupNorm(2, c))
    x = images(batch=batch).to(memory_format=memory_format).requires_grad_()
    grads = []
    for mode in ("invert", "store"):
        for step in net.modules():
            step.memory = mode
        grads.append(torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()]))
    for a, e in zip(*grads, strict=True):
        torch.testing.assert_close(a, e)


def test_streams_keep_their_dtype():
    # A float32 branch on bfloat16 streams: the sum must not widen the stream.
    class Wide(nn.Module):
        def forward(self, x):
            return x.float().tanh()

    net = ReversibleSequence([AdditiveCoupling(Wide()) for _ in range(3)])
    set_drift_limit(net, 0.1)
    x = torch.randn(2, 4, dtype=torch.bfloat16, requires_grad=True)
    y = net(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
