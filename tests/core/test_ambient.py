"""Devices, modes and types that apply to all code: a replay has those of its forward pass."""

import math

import pytest
import torch
from compare import leaf_rows, relu_block
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from revzoo import AdditiveCoupling, ReversibleSequence, set_drift_limit


def test_streams_are_float32_under_autocast():
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(4, 4))])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert net(torch.randn(2, 8).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("mode", ["store", "offload", "recompute", "invert", "exact"])
@pytest.mark.parametrize(
    "where",
    ["meta", "fake"],
)
def test_training_steps_without_values(mode, where):
    """The guard read figures that have no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context = FakeTensorMode() if where == "fake" else torch.device("meta")
    with context:
        blocks = [relu_block(nn.BatchNorm2d) for _ in range(2)]
        net = ReversibleSequence(blocks, memory=mode)
        x = torch.randn(2, 16, 8, 8, requires_grad=True)
        net(x).square().mean().backward()
        net.inverse(net(x))
        net.eval()
        net.inverse(net(x))
    assert x.grad.shape == x.shape
    run = ReversibleSequence([relu_block(nn.BatchNorm2d)], memory=mode)
    run(torch.randn(2, 16, 8, 8, requires_grad=True)).mean().backward()  # nothing fake was cached


REPLAYED = ["recompute", "invert"]


@pytest.mark.parametrize("mode", REPLAYED)
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_the_default_device_is_that_of_the_forward_pass(mode, around):
    """A replay put a branch's tensors in place of those that the caller of backward() expected."""

    class Where(nn.Module):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x):
            self.seen.append(torch.arange(4).device.type)
            return x.sin()

    net = ReversibleSequence([AdditiveCoupling(Where())], memory=mode)
    set_drift_limit(net, math.inf)
    x = leaf_rows()
    forward, backward = ("meta", "cpu") if around == "forward" else ("cpu", "meta")
    with torch.device(forward):
        loss = net(x).sum()
    with torch.device(backward):
        loss.backward()
        assert torch.empty(0).device.type == backward
    assert net[0].branch.seen == [forward, forward]


@pytest.mark.parametrize("mode", REPLAYED)
def test_the_default_device_set_for_good_is_that_of_the_forward_pass(mode):
    net = ReversibleSequence([AdditiveCoupling(nn.Tanh())], memory=mode)
    set_drift_limit(net, math.inf)
    seen = []
    net[0].branch.register_forward_pre_hook(lambda *_: seen.append(torch.empty(0).device.type))
    loss = net(leaf_rows()).sum()
    torch.set_default_device("meta")
    try:
        loss.backward()
    finally:
        torch.set_default_device(None)
    assert seen == ["cpu", "cpu"]


@pytest.mark.parametrize("mode", ["store", *REPLAYED])
@pytest.mark.parametrize("inside", [True, False])
def test_training_with_fake_tensors(mode, inside):
    """Their random states were compared, which a fake tensor refuses."""
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        branches = [nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)]
        net = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory=mode)
        set_drift_limit(net, math.inf)
        x = torch.randn(5, 8, requires_grad=True)
    if not inside:
        net(x).sum().backward()
        return
    with fake:
        net(x).sum().backward()
    assert all(isinstance(p.grad, FakeTensor) for p in net.parameters())
