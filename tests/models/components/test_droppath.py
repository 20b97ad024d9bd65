"""Stochastic depth, alone and under couplings whose replays must drop the same images."""

import copy

import pytest
import torch
from compare import assert_same_training, conv_branch, images, twin
from torch import nn

from revzoo import AdditiveCoupling, ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core.fixedpoint.rounding import round_to_grid
from revzoo.models.components.droppath import add_drop_path, drop_path_rates


def test_rates_rise_linearly_to_the_last():
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 1) == [0]


def test_no_rate_adds_nothing():
    assert len(add_drop_path(nn.Sequential(nn.Identity()), 0.0)) == 1


def test_whole_images_are_dropped_and_the_others_scaled():
    branch = add_drop_path(nn.Sequential(nn.Identity()), 0.75)
    torch.manual_seed(0)
    y = branch(torch.ones(400, 2, 3, 3)).flatten(1)
    assert ((y == 0).all(1) | (y == 4).all(1)).all()
    assert (y[:, 0] == 0).float().mean().item() == pytest.approx(0.75, abs=0.07)
    assert torch.equal(branch.eval()(torch.ones(4, 2)), torch.ones(4, 2))


def net(depth=3):
    torch.manual_seed(0)

    def branch():
        return add_drop_path(conv_branch(), 0.5)

    return ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(depth)]).double()


@pytest.mark.parametrize("mode", ["invert", "recompute", "offload"])
def test_replays_drop_the_same_images(mode):
    reference = net()
    set_memory(reference, "store")
    assert_same_training(twin(net(), mode), reference, images(batch=6))


def test_on_a_grid_reconstruction_and_gradients_stay_exact():
    # 1 / 0.7 is not a multiple of the grid: the value is rounded after the division
    torch.manual_seed(0)
    branches = [add_drop_path(conv_branch(), 0.3) for _ in range(6)]
    exact = ReversibleSequence([AdditiveCoupling(b) for b in branches], memory="exact")
    stored = copy.deepcopy(exact)
    set_memory(stored, "store", grid="auto")
    x = images(batch=6).float()
    found = []
    for sequence in (exact, stored):
        torch.manual_seed(5)
        y = sequence(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(sequence.parameters()))))
    assert all(map(torch.equal, *found))
    grid = round_to_grid(x, 23)
    sequence = exact.eval()
    assert torch.equal(sequence.inverse(sequence(x)), grid)
