import pytest
import torch
from torch import nn

from revzoo.models.unit import PoolAndPad, ResidualUnit, Transition, branch, shortcut
from revzoo.models.variant import UnitPlan


class Affine(nn.Module):
    """``scale * x + shift``, which distinguishes the terms of a formula."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x):
        return self.scale * x + self.shift


def test_residual_unit_adds_branch_and_shortcut():
    y = ResidualUnit(Affine(2, 1), shortcut=Affine(10, 0))(torch.tensor(3.0))
    assert y.item() == 30 + 7


def test_transition_follows_the_formula():
    unit = Transition(Affine(2, 1), g=Affine(3, 5), shortcuts=(Affine(10, 0), Affine(100, 0)))
    y1, y2 = unit(torch.tensor(1.0), torch.tensor(2.0))
    assert y1.item() == 10 * 1 + (2 * 2 + 1)
    assert y2.item() == 100 * 2 + (3 * 15 + 5)


def test_units_without_inverse_raise():
    unit = Transition(nn.Identity(), g=nn.Identity(), shortcuts=(nn.Identity(), nn.Identity()))
    assert not unit.invertible
    assert not ResidualUnit(nn.Identity(), shortcut=nn.Identity()).invertible
    assert (unit.streams, ResidualUnit.streams) == (2, 1)


def test_a_branch_is_built_as_planned():
    f = branch(UnitPlan(8, 16, 2, "bottleneck", False, 0.2))
    assert f(torch.randn(2, 8, 4, 4)).shape == (2, 16, 2, 2)
    assert next(name for name, _ in f.named_children()) == "conv1"
    assert f.dropout3.p == 0.2


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
    with pytest.raises(ValueError, match=r"out_channels=6: .* in_channels=8.*bottleneck"):
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
