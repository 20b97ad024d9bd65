"""Haar squeezes: the four bands, orthonormality, channel orders."""

import pytest
import torch

from revzoo import HaarSqueeze


def test_bands_of_one_block():
    a, b, c, d = 1.0, 2.0, 4.0, 9.0
    y = HaarSqueeze(streams=1)(torch.tensor([[[[a, b], [c, d]]]]))
    low, horizontal, vertical, diagonal = y.flatten().tolist()
    assert low == (a + b + c + d) / 2
    assert horizontal == (a - b + c - d) / 2
    assert vertical == (a + b - c - d) / 2
    assert diagonal == (a - b - c + d) / 2


@pytest.mark.parametrize("order", ["torch", "irevnet"])
def test_a_constant_image_has_only_averages(order):
    x = torch.arange(1.0, 4).reshape(1, 3, 1, 1).expand(1, 3, 4, 6)
    haar = HaarSqueeze(order=order, streams=1)
    y = haar(x)
    assert y.shape == (1, 12, 2, 3)
    low = [0, 4, 8] if order == "torch" else [0, 1, 2]
    assert torch.equal(y[0, low, 0, 0], torch.tensor([2.0, 4, 6]))
    rest = [i for i in range(12) if i not in low]
    assert torch.equal(y[0, rest], torch.zeros(9, 2, 3))
    assert torch.equal(haar.inverse(y), x)


@pytest.mark.parametrize("order", ["torch", "irevnet"])
def test_it_is_orthonormal(order):
    x1, x2 = torch.randn(2, 3, 2, 6, 8, dtype=torch.float64)
    y1, y2 = HaarSqueeze(order=order)(x1, x2)
    for x, y in ((x1, y1), (x2, y2)):
        torch.testing.assert_close(y.square().sum(), x.square().sum())


def test_refusals():
    with pytest.raises(ValueError, match=r"HaarSqueeze\(2\) got a stream of shape \(1, 2, 5, 4\)"):
        HaarSqueeze()(*torch.zeros(2, 1, 2, 5, 4))
    with pytest.raises(ValueError, match=r"inverse of HaarSqueeze\(2\) got.*divisible by 4"):
        HaarSqueeze().inverse(*torch.zeros(2, 1, 6, 2, 2))
