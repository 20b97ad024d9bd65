"""Floating-point operations of a training step, counted exactly."""

import pytest
import torch
from compare import conv_net, images, twin
from torch.utils.flop_counter import FlopCounterMode

from revzoo import AdditiveCoupling, ReversibleSequence, set_memory


def flops(fn):
    with FlopCounterMode(display=False) as counter:
        result = fn()
    return result, counter.get_total_flops()


def forward_and_backward(net, x):
    y, forward = flops(lambda: net(x))
    _, backward = flops(y.square().sum().backward)
    return forward, backward


def branches(net, x):
    """One evaluation of every branch, which is all that a replay may cost."""
    stream = x.chunk(2, dim=1)[0]
    return flops(lambda: [coupling.branch(stream) for block in net for coupling in block])[1]


CONVOLUTIONS = 6 * 2  # of three blocks
LEFT_OUT = {  # a replay ends with the last tensor that it records, the input of a convolution
    "offload": CONVOLUTIONS,  # no replay
    "recompute": 6,  # the last convolution of each branch
    "invert": 0,  # the branches' values invert the couplings
    "exact": 0,
}


@pytest.mark.parametrize("mode", LEFT_OUT)
def test_a_backward_pass_costs_at_most_one_evaluation_of_each_branch_more_than_store(mode):
    net, x = conv_net(depth=3), images().requires_grad_()
    once = branches(net, x)
    assert once == CONVOLUTIONS * (2 * 4 * 4 * 9) * x[:, 0].numel()  # 4 -> 4 channels, 3x3
    assert forward_and_backward(twin(net, "store"), x) == (once, 2 * once)
    again = (CONVOLUTIONS - LEFT_OUT[mode]) * once // CONVOLUTIONS
    assert forward_and_backward(twin(net, mode), x) == (once, 2 * once + again)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_a_branch_that_ends_in_dropout_is_replayed_to_its_end(mode):
    """What it draws is compared with the forward pass's."""
    torch.manual_seed(0)
    branch = conv_net(depth=1)[0][0].branch.append(torch.nn.Dropout(0.5))
    net = ReversibleSequence([AdditiveCoupling(branch)], memory=mode)
    x = images().requires_grad_()
    forward, backward = forward_and_backward(net, x)
    assert backward == 3 * forward


def test_steps_that_store_are_not_evaluated_again():
    net, x = conv_net(depth=3), images().requires_grad_()
    once, last = branches(net, x), branches(ReversibleSequence([net[2]]), x)
    set_memory(net, "invert")
    set_memory(net[2], "store")
    assert forward_and_backward(net, x) == (once, 3 * once - last)


def test_a_retained_graph_costs_one_more_evaluation_each_time():
    net, x = conv_net(depth=3), images().requires_grad_()
    once, y = branches(net, x), net(x)
    for _ in range(2):
        again = flops(lambda: y.backward(torch.ones_like(y), retain_graph=True))[1]
        assert again == 3 * once


def test_the_inverse_costs_what_the_forward_pass_costs():
    net, x = conv_net(depth=3).eval(), images()
    y, forward = flops(lambda: net(x))
    assert flops(lambda: net.inverse(y))[1] == forward == branches(net, x)


def test_a_frozen_beginning_costs_nothing_in_the_backward_pass():
    net, x = conv_net(depth=3), images()
    net[0].requires_grad_(False)
    once, frozen = branches(net, x), branches(ReversibleSequence([net[0]]), x)
    _, stored = forward_and_backward(twin(net, "store"), x)
    _, inverted = forward_and_backward(net, x)
    assert inverted == stored + once - frozen
