"""Residual units without inverse, and the branches and shortcuts of all units.

    ResidualUnit    y  = s(x)   + F(x)                              one stream
    MergedUnit      y  = s(x)   + F(x),  x and y of all channels    two streams, merged and split
    Transition      y1 = s1(x1) + F(x2),  y2 = s2(x2) + G(y1)       two streams

The shortcuts ``s`` may change width and resolution (arXiv 1707.04585). Such a unit loses
information, so its input must be kept. All units are steps: in the memory modes ``recompute`` and
``invert`` they are recomputed from that input.

A shortcut is the identity if the unit keeps the shape. Otherwise it follows the TensorFlow release
of arXiv 1707.04585, in which each stream of a RevNet has its own shortcut:

    basic       average pool by the stride, then zero channels, half before and half after
    bottleneck  1x1 convolution with the stride, without normalisation

or, in MemCNN's networks:

    either      1x1 convolution with the stride, then normalisation
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.core.invertible import State, Step
from revzoo.layers.split import halves
from revzoo.models.components.branch import BRANCHES
from revzoo.models.components.conv import conv2d
from revzoo.models.components.droppath import add_drop_path
from revzoo.models.components.lean import Lean, avg_pool2d, run
from revzoo.models.variant import UnitPlan


class ResidualUnit(Step):
    """``y = shortcut(x) + branch(x)`` on one stream ``(B, C, H, W)``.

    Args:
        branch: residual function F.
        shortcut: identity, or a module with the branch's output shape.
    """

    streams = 1

    def __init__(self, branch: nn.Module, *, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, *state: Tensor) -> Tensor | State:
        (x,) = state
        return run((self.shortcut,), x) + self.branch(x)


class MergedUnit(ResidualUnit):
    """A residual unit on the merged streams, ``(B, C/2, H, W)`` each; splits its output again.

    Args:
        branch: residual function F of all channels, with an even number of output channels.
        shortcut: a module with the branch's output shape.
    """

    streams = 2

    def forward(self, *state: Tensor) -> State:
        y = super().forward(torch.cat(state, dim=1))  # MemCNN's way, see Convention
        assert isinstance(y, Tensor)
        return halves(y)


class Transition(Step):
    """``y1 = s1(x1) + f(x2)``, ``y2 = s2(x2) + g(y1)`` on two streams.

    Args:
        f: residual function of the second stream; it has the stride and changes the width.
        g: residual function of the new first stream.
        shortcuts: ``s1`` and ``s2``, both with the shape of ``f``'s output.
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
        y1 = run((self.shortcut1,), x1) + self.f(x2)
        y2 = run((self.shortcut2,), x2) + self.g(y1)  # y1 as in a coupling, not x1
        return y1, y2


def branch(plan: UnitPlan) -> nn.Module:
    """The residual function of ``plan``, whose channels are per stream."""
    options: dict[str, Any] = {}
    if plan.branch == "bottleneck":
        options["stride_at_3x3"] = plan.convention.memcnn
    layers = BRANCHES[plan.branch](
        plan.in_channels,
        out_channels=plan.out_channels,
        stride=plan.stride,
        activate_first=plan.activate_first,
        dropout=plan.dropout,
        norm_act=plan.norm_act,
        **options,
    )
    return add_drop_path(layers, plan.drop_path)


class PoolAndPad(nn.Module):
    """``(B, in, H, W) -> (B, out, H/stride, W/stride)`` without parameters.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, at least ``in_channels``. If the difference is odd,
            the extra zero channel comes last.
        stride: side of the pooling window; H and W must be multiples of it.

    Raises:
        ValueError: fewer channels out than in.
    """

    def __init__(self, in_channels: int, *, out_channels: int, stride: int) -> None:
        super().__init__()
        added = out_channels - in_channels
        if added < 0:
            raise ValueError(
                f"out_channels={out_channels}: expected at least in_channels={in_channels}, since "
                "a pooling shortcut adds zero channels; let the widths grow, or use "
                "branch='bottleneck'"
            )
        self.stride = stride
        self.padding = (added // 2, added - added // 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, *self.padding))  # last dimension first: W, H, C

    def extra_repr(self) -> str:
        return f"stride={self.stride}, padding={self.padding}"


def shortcut(plan: UnitPlan) -> nn.Module:
    """The shortcut of one stream for ``plan``, whose channels are per stream."""
    if plan.keeps_shape:
        return nn.Identity()
    if plan.branch == "basic" and not plan.convention.memcnn:
        return PoolAndPad(plan.in_channels, out_channels=plan.out_channels, stride=plan.stride)
    projection = conv2d(
        plan.in_channels, out_channels=plan.out_channels, kernel_size=1, stride=plan.stride
    )
    if not plan.convention.memcnn:
        return projection
    return Lean(projection, plan.norm_act.normalise(plan.out_channels))
