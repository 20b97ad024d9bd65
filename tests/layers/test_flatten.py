"""Flattening stores its shape."""

import pytest
import torch
from torch import nn

from revzoo import AdditiveCoupling, InvertibleFlatten, ReversibleSequence


def test_the_way_back():
    flatten = InvertibleFlatten((2, 3, 4))
    x1, x2 = torch.randn(2, 5, 2, 3, 4)
    y1, y2 = flatten(x1, x2)
    assert torch.equal(y1, x1.flatten(1))
    assert all(map(torch.equal, flatten.inverse(y1, y2), (x1, x2)))


def test_between_convolutions_and_linear_layers():
    branches = torch.nn.Conv2d(2, 2, 3, padding=1), torch.nn.Linear(32, 32)
    steps = [AdditiveCoupling(f) for f in branches]
    net = ReversibleSequence([steps[0], InvertibleFlatten((2, 4, 4)), steps[1]])
    x = torch.randn(3, 4, 4, 4, requires_grad=True)
    y = net(x)
    assert y.shape == (3, 64)
    assert (net.inverse(y) - x).abs().max() < 1e-6
    y.sum().backward()
    assert x.grad.shape == x.shape


def test_refusals():
    for shape in ((), (2, 0)):
        with pytest.raises(ValueError, match="expected the sizes of one image"):
            InvertibleFlatten(shape)
    flatten = InvertibleFlatten((2, 3), streams=1)
    with pytest.raises(ValueError, match=r"shape \(5, 3, 2\): expected \(B, 2, 3\)"):
        flatten(torch.zeros(5, 3, 2))
    with pytest.raises(ValueError, match=r"the inverse of.*shape \(5, 5\): expected \(B, 6\)"):
        flatten.inverse(torch.zeros(5, 5))


@pytest.mark.parametrize("dims", [(1, -1), (2, 3), (1, 2), (2, 2), (-2, -1)])
def test_it_flattens_as_torch_does(dims):
    x = torch.randn(2, 3, 4, 5)
    flatten = InvertibleFlatten((3, 4, 5), start_dim=dims[0], end_dim=dims[1], streams=1)
    y = flatten(x)
    assert torch.equal(y, nn.Flatten(*dims)(x))
    assert torch.equal(flatten.inverse(y), x)


@pytest.mark.parametrize("dims", [(0, 1), (2, 1), (4, -1), (1, 4), (-4, -1)])
def test_dimensions_that_are_not_there(dims):
    with pytest.raises(ValueError, match="expected dimensions 1 to 3 of"):
        InvertibleFlatten((3, 4, 5), start_dim=dims[0], end_dim=dims[1])
