import pytest
import torch
from torch import nn

from revzoo.models.shortcut import PoolAndPad, shortcut
from revzoo.models.variant import UnitPlan


def test_pooling_averages_windows_and_pads_channels_evenly():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    y = PoolAndPad(1, out_channels=5, stride=2)(x)
    means = torch.tensor([[2.5, 4.5], [10.5, 12.5]])
    zeros = torch.zeros(2, 2)
    assert torch.equal(y, torch.stack([zeros, zeros, means, zeros, zeros])[None])


def test_an_odd_number_of_zero_channels_has_its_extra_one_last():
    y = PoolAndPad(1, out_channels=4, stride=1)(torch.ones(1, 1, 1, 1))
    assert y.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]


def test_pooling_refuses_to_narrow():
    with pytest.raises(ValueError, match=r"from 8 to 6.*bottleneck"):
        PoolAndPad(8, out_channels=6, stride=1)


@pytest.mark.parametrize("branch", ["basic", "bottleneck"])
def test_a_unit_that_keeps_its_shape_has_the_identity(branch):
    assert isinstance(shortcut(UnitPlan(8, 8, 1, branch, True, 0.0)), nn.Identity)


@pytest.mark.parametrize(("width", "stride"), [(16, 1), (8, 2), (16, 2)])
def test_kinds_of_shortcut(width, stride):
    pool = shortcut(UnitPlan(8, width, stride, "basic", True, 0.0))
    projection = shortcut(UnitPlan(8, width, stride, "bottleneck", True, 0.0))
    assert list(pool.state_dict()) == []
    assert {k: v.shape for k, v in projection.state_dict().items()} == {"weight": (width, 8, 1, 1)}
    x = torch.randn(2, 8, 4, 4)
    assert pool(x).shape == projection(x).shape == (2, width, 4 // stride, 4 // stride)
