"""Channel permutations: orders, seeds, checkpoints."""

import numpy as np
import pytest
import torch

from revzoo import ChannelPermutation


def applied(layer, n=6):
    return layer(torch.arange(float(n))[None])[0].tolist()


def test_orders():
    assert applied(ChannelPermutation(6, order="reverse", streams=1)) == [5, 4, 3, 2, 1, 0]
    given = [2, 0, 1, 5, 4, 3]
    assert applied(ChannelPermutation(6, order=given, streams=1)) == given
    y1, y2 = ChannelPermutation(6, order=given)(*torch.arange(6.0)[None].chunk(2, dim=1))
    assert (y1.tolist(), y2.tolist()) == ([[2, 0, 1]], [[5, 4, 3]])


def test_the_seed_alone_decides():
    state = torch.get_rng_state()
    layers = []
    for seed in (0, 0, 1):
        torch.rand(1)
        layers.append(ChannelPermutation(64, seed=seed, streams=1))
    first, again, other = (applied(layer, 64) for layer in layers)
    assert first == again != other
    assert sorted(first) == list(range(64)) != first
    torch.set_rng_state(state)
    ChannelPermutation(64)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_checkpoint_brings_its_order():
    saved, layer = (ChannelPermutation(6, seed=seed, streams=1) for seed in (1, 2))
    layer.load_state_dict(saved.state_dict())
    assert applied(layer) == applied(saved)
    x = torch.randn(2, 6)
    assert torch.equal(layer.inverse(layer(x)), x)


@pytest.mark.parametrize("order", ["sorted", [0, 1, 1], [0, 1], [1, 2, 3]])
def test_what_is_not_a_permutation(order):
    with pytest.raises(ValueError, match=r"expected 'random', 'reverse' or each of 0 to 2 once"):
        ChannelPermutation(3, order=order)


@pytest.mark.parametrize("order", [np.array([2, 0, 1]), torch.tensor([2, 0, 1]), (2, 0, 1)])
def test_an_order_may_be_an_array(order):
    x = torch.arange(3.0)[None]
    assert ChannelPermutation(3, order=order, streams=1)(x).tolist() == [[2.0, 0.0, 1.0]]


@pytest.mark.parametrize("order", [[2.0, 1.0, 0.0], None])
def test_an_order_is_of_whole_numbers(order):
    with pytest.raises(ValueError, match="each of 0 to 2 once"):
        ChannelPermutation(3, order=order, streams=1)
