"""Flattening remembers the shape it was given."""

import pytest
import torch

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
