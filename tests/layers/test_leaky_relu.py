"""Leaky ReLU and its inverse."""

import math

import pytest
import torch

from revzoo import InvertibleLeakyReLU


@pytest.mark.parametrize("slope", [0.01, 0.5, 1.0, 3.0])
def test_values_and_inverse(slope):
    x = torch.tensor([[-2.0, -0.5, 0.0, 1.5]], dtype=torch.float64)
    layer = InvertibleLeakyReLU(slope, streams=1)
    y = layer(x)
    assert torch.equal(y, torch.nn.functional.leaky_relu(x, slope))
    torch.testing.assert_close(layer.inverse(y), x, rtol=1e-15, atol=0)
    assert math.isclose(layer.log_det(x).item(), 2 * math.log(slope), abs_tol=1e-15)


@pytest.mark.parametrize("slope", [0, -0.1, math.inf, math.nan])
def test_slopes_that_lose_the_way_back(slope):
    with pytest.raises(ValueError, match=f"slope={slope}: expected a number in"):
        InvertibleLeakyReLU(slope)
