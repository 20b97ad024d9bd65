import torch
from torch import nn

from revzoo.models.unit import ResidualUnit, Transition, branch
from revzoo.models.variant import UnitPlan


class Affine(nn.Module):
    """``scale * x + shift``, so that every term of a formula can be told apart."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x):
        return self.scale * x + self.shift


def test_residual_unit_adds_branch_and_shortcut():
    (y,) = ResidualUnit(Affine(2, 1), shortcut=Affine(10, 0))(torch.tensor(3.0))
    assert y.item() == 30 + 7


def test_transition_follows_the_formula():
    unit = Transition(Affine(2, 1), g=Affine(3, 5), shortcuts=(Affine(10, 0), Affine(100, 0)))
    y1, y2 = unit(torch.tensor(1.0), torch.tensor(2.0))
    assert y1.item() == 10 * 1 + (2 * 2 + 1)
    assert y2.item() == 100 * 2 + (3 * 15 + 5)


def test_units_without_inverse_say_so():
    unit = Transition(nn.Identity(), g=nn.Identity(), shortcuts=(nn.Identity(), nn.Identity()))
    assert not unit.invertible
    assert not ResidualUnit(nn.Identity(), shortcut=nn.Identity()).invertible
    assert (unit.streams, ResidualUnit.streams) == (2, 1)


def test_a_branch_is_built_as_planned():
    f = branch(UnitPlan(8, 16, 2, "bottleneck", False, 0.2))
    assert f(torch.randn(2, 8, 4, 4)).shape == (2, 16, 2, 2)
    assert next(name for name, _ in f.named_children()) == "conv1"
    assert f.dropout3.p == 0.2
