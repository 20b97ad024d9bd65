"""Residual units that have no inverse, and the branch every unit is made of.

    ResidualUnit    y  = s(x)   + F(x)                              one stream
    MergedUnit      y  = s(x)   + F(x),  x and y of all channels    two streams, merged and split
    Transition      y1 = s1(x1) + F(x2),  y2 = s2(x2) + G(y1)       two streams

with shortcuts ``s`` that may change width and resolution (arXiv 1707.04585). Such a unit loses
information, so its input has to be kept; being steps, all can be recomputed from it, and are where
the memory mode is ``recompute`` or ``invert``.
"""

import torch
from torch import Tensor, nn

from revzoo.core.invertible import State, Step
from revzoo.layers.branch import BRANCHES
from revzoo.layers.droppath import add_drop_path
from revzoo.layers.split import halves
from revzoo.models.variant import UnitPlan


class ResidualUnit(Step):
    """``y = shortcut(x) + branch(x)`` on one stream ``(B, C, H, W)``.

    Args:
        branch: residual function F.
        shortcut: identity, or what gives the branch's output shape.
    """

    streams = 1

    def __init__(self, branch: nn.Module, *, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, *state: Tensor) -> State:
        (x,) = state
        return (self.shortcut(x) + self.branch(x),)


class MergedUnit(ResidualUnit):
    """A residual unit on both streams merged, ``(B, C/2, H, W)`` each; its output is split again.

    Args:
        branch: residual function F from all channels to an even number of them.
        shortcut: what gives the branch's output shape.
    """

    streams = 2

    def forward(self, *state: Tensor) -> State:
        (y,) = super().forward(torch.cat(state, dim=1))
        return halves(y)


class Transition(Step):
    """``y1 = s1(x1) + f(x2)``, ``y2 = s2(x2) + g(y1)`` on two streams.

    Args:
        f: residual function from the second stream; it carries the stride and the change of width.
        g: residual function from the first new stream.
        shortcuts: ``s1`` and ``s2``, each giving the shape of ``f``'s output.
    """

    streams = 2

    def __init__(
        self, f: nn.Module, *, g: nn.Module, shortcuts: tuple[nn.Module, nn.Module]
    ) -> None:
        super().__init__()
        self.f = f
        self.g = g
        self.shortcut1, self.shortcut2 = shortcuts

    def forward(self, *state: Tensor) -> State:
        x1, x2 = state
        y1 = self.shortcut1(x1) + self.f(x2)
        y2 = self.shortcut2(x2) + self.g(y1)
        return y1, y2


def branch(plan: UnitPlan) -> nn.Module:
    """The residual function of ``plan``, whose channels are those of one stream."""
    layers = BRANCHES[plan.branch](
        plan.in_channels,
        out_channels=plan.out_channels,
        stride=plan.stride,
        activate_first=plan.activate_first,
        dropout=plan.dropout,
        stride_at_3x3=plan.convention.stride_at_3x3,
        norm_act=plan.norm_act,
    )
    return add_drop_path(layers, plan.drop_path)
