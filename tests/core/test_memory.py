"""``with memory(net, mode)``: a temporary mode; afterwards each step has its own mode again."""

import pytest
import torch
from compare import images, linear_net
from torch import nn

from revzoo import ReversibleSequence, memory, set_memory
from revzoo.layers.padding import PaddedCoupling


def modes(net):
    return [(step.memory, step.grid) for block in net for step in block]


def test_each_step_gets_its_own_mode_back():
    net = linear_net()
    set_memory(net[0], "recompute")
    set_memory(net[1], "store", grid=12)
    before = modes(net)
    with memory(net, "exact", grid=10):
        assert modes(net) == [("exact", 10)] * 6
        with memory(net[2], "offload"):
            assert modes(net)[4:] == [("offload", None)] * 2
        assert modes(net) == [("exact", 10)] * 6
    assert modes(net) == before


def test_also_after_an_exception_and_where_the_mode_is_refused():
    net = linear_net()
    with pytest.raises(KeyError), memory(net, "store"):  # noqa: PT012
        assert modes(net) == [("store", None)] * 6
        raise KeyError
    assert modes(net) == [("exact", "auto")] * 6
    with pytest.raises(ValueError, match="unknown memory mode"), memory(net, "other"):
        pass
    assert modes(net) == [("exact", "auto")] * 6


def test_a_step_that_reads_another_mode_than_was_set():
    net = ReversibleSequence([PaddedCoupling(nn.Identity(), filled=1)], memory="invert")
    with memory(net, "store"):
        assert net[0].memory == "store"
    assert net[0].memory == "recompute"
    set_memory(net, "exact")
    assert net[0].memory == "exact"
    with memory(net, "invert"):
        assert net[0].memory == "recompute"
    assert net[0].memory == "exact"


def test_the_graph_of_a_forward_pass_keeps_its_mode():
    """A backward pass after the context replays in the mode of its forward pass."""
    net, x = linear_net(), images(size=1).flatten(1).requires_grad_()
    with memory(net, "recompute"):
        y = net(x)
    expected = torch.autograd.grad(net(x).square().sum(), x)
    assert (torch.autograd.grad(y.square().sum(), x)[0] - expected[0]).abs().max() < 1e-12
