import math

import pytest
import torch

from revzoo.models.components.conv import conv2d

# Standard deviation of a unit normal truncated at +-2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)).
PHI = math.exp(-2.0) / math.sqrt(2 * math.pi)
TRUNCATED_STD = math.sqrt(1 - 4 * PHI / math.erf(math.sqrt(2)))


@pytest.mark.parametrize(("kernel_size", "out_channels"), [(3, 128), (1, 64), (7, 32)])
def test_weights_are_a_normal_cut_at_two_nominal_deviations(kernel_size, out_channels):
    torch.manual_seed(0)
    weight = conv2d(512, out_channels=out_channels, kernel_size=kernel_size).weight
    nominal = math.sqrt(2 / (kernel_size**2 * out_channels))
    standard_error = 1 / math.sqrt(weight.numel())
    assert weight.std().item() == pytest.approx(TRUNCATED_STD * nominal, rel=4 * standard_error)
    assert abs(weight.mean().item()) < 4 * nominal * standard_error
    assert 1.98 * nominal < weight.abs().max().item() <= 2 * nominal * (1 + 1e-6)


def test_no_bias():
    assert conv2d(3, out_channels=4, kernel_size=3).bias is None


@pytest.mark.parametrize("kernel_size", [1, 3, 7])
@pytest.mark.parametrize(("stride", "expected"), [(1, 9), (2, 5)])
def test_size_is_divided_by_the_stride_rounding_up(kernel_size, stride, expected):
    layer = conv2d(3, out_channels=4, kernel_size=kernel_size, stride=stride)
    assert layer(torch.randn(1, 3, 9, 9)).shape == (1, 4, expected, expected)
