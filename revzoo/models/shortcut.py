"""Shortcuts of units that change resolution or width.

    basic       average pool by the stride, then zero channels, half before and half after
    bottleneck  1x1 convolution with the stride, without normalisation

as in the TensorFlow release of the RevNet paper (arXiv 1707.04585), where each stream of a RevNet
has a shortcut of its own; or, where the variant's convention projects,

    either      1x1 convolution with the stride, then normalisation

A unit that keeps the shape has the identity.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.layers.conv import conv2d
from revzoo.models.variant import UnitPlan


class PoolAndPad(nn.Module):
    """``(B, in, H, W) -> (B, out, H/stride, W/stride)`` without parameters.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output, at least ``in_channels``. Where the difference is odd,
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
                f"A pooling shortcut adds zero channels and cannot go from {in_channels} to "
                f"{out_channels}; let the widths grow, or use branch='bottleneck'."
            )
        self.stride = stride
        self.padding = (added // 2, added - added // 2)

    def forward(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, *self.padding))

    def extra_repr(self) -> str:
        return f"stride={self.stride}, padding={self.padding}"


def shortcut(plan: UnitPlan) -> nn.Module:
    """The shortcut of one stream for ``plan``, whose channels are those of that stream."""
    if plan.keeps_shape:
        return nn.Identity()
    if plan.branch == "basic" and not plan.convention.projects:
        return PoolAndPad(plan.in_channels, out_channels=plan.out_channels, stride=plan.stride)
    projection = conv2d(
        plan.in_channels, out_channels=plan.out_channels, kernel_size=1, stride=plan.stride
    )
    if not plan.convention.projects:
        return projection
    return nn.Sequential(projection, plan.norm_act.normalise(plan.out_channels))
