"""Residual functions: the branches F and G of a residual or reversible block.

Pre-activation order (He et al. 2016, "Identity Mappings in Deep Residual Networks", arXiv
1603.05027), as in the RevNet paper (arXiv 1707.04585):

    basic       [BN-ReLU] conv3x3(stride) - BN-ReLU - [dropout] - conv3x3
    bottleneck  [BN-ReLU] conv1x1(stride) - BN-ReLU - conv3x3 - BN-ReLU - [dropout] - conv1x1
    triple      [BN-ReLU] conv3x3(stride) - BN-ReLU - conv3x3 - [dropout] - BN-ReLU - conv3x3

A branch has no skip connection: the coupling or unit around it adds. ``activate_first=False`` omits
the leading BN-ReLU, for the first branch after a stem that ends in BN-ReLU. Dropout is after the
activation and before the last convolution (between the convolutions, as in Wide ResNets, arXiv
1605.07146); it has no parameters, so the ``state_dict`` keys are the same with it. The triple
branch is from i-RevNets (arXiv 1802.07088), with dropout where their release has it.
``norm_act`` selects other normalisations and activations.

A branch does not change its input, which is a stream.
"""

import itertools
from collections import OrderedDict
from typing import Literal

from torch import Tensor, nn

from revzoo.layers.precision import narrowed
from revzoo.models.components.conv import conv2d
from revzoo.models.components.lean import Lean
from revzoo.models.components.norm import RELEASE, NormAct

BranchKind = Literal["basic", "bottleneck"]

# Width of a bottleneck's output over its inner convolutions' (He et al. 2015, 1512.03385).
BOTTLENECK_EXPANSION = 4


class _Branch(Lean):
    """Layers of a branch, computed in autocast's type if autocast is on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(narrowed(x))


class BasicBranch(_Branch):
    """Two 3x3 convolutions, ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``.

    Args:
        in_channels: channels of the input stream.
        out_channels: channels of the output.
        stride: stride of the first convolution.
        activate_first: whether BN-ReLU comes before the first convolution.
        dropout: probability of zeroing an activation before the last convolution.
        norm_act: normalisation and activation.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        out_channels: int,
        stride: int = 1,
        activate_first: bool = True,
        dropout: float = 0.0,
        norm_act: NormAct = RELEASE,
    ) -> None:
        super().__init__(
            _layers(
                (in_channels, out_channels, out_channels),
                kernels=(3, 3),
                strides=(stride, 1),
                activate_first=activate_first,
                dropout=dropout,
                norm_act=norm_act,
            )
        )


class BottleneckBranch(_Branch):
    """1x1, 3x3 and 1x1 convolution, ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``.

    The inner width is ``out_channels / 4``.

    Args:
        in_channels: channels of the input stream.
        out_channels: channels of the output, a multiple of 4.
        stride: stride of the first convolution.
        activate_first: whether BN-ReLU comes before the first convolution.
        dropout: probability of zeroing an activation before the last convolution.
        stride_at_3x3: give the stride to the 3x3 convolution instead.
        norm_act: normalisation and activation.

    Raises:
        ValueError: ``out_channels`` is not a multiple of 4.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        out_channels: int,
        stride: int = 1,
        activate_first: bool = True,
        dropout: float = 0.0,
        stride_at_3x3: bool = False,
        norm_act: NormAct = RELEASE,
    ) -> None:
        inner, remainder = divmod(out_channels, BOTTLENECK_EXPANSION)
        if remainder or inner < 1:
            raise ValueError(
                f"out_channels={out_channels}: expected a positive multiple of "
                f"{BOTTLENECK_EXPANSION}, since the inner width of a bottleneck branch is a quarter"
            )
        super().__init__(
            _layers(
                (in_channels, inner, inner, out_channels),
                kernels=(1, 3, 1),
                strides=(1, stride, 1) if stride_at_3x3 else (stride, 1, 1),
                activate_first=activate_first,
                dropout=dropout,
                norm_act=norm_act,
            )
        )


class TripleBranch(_Branch):
    """Three 3x3 convolutions, ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``.

    Args:
        in_channels: channels of the input stream.
        out_channels: channels of the output.
        inner: channels between the convolutions.
        stride: stride of the first convolution.
        activate_first: whether BN-ReLU comes before the first convolution.
        dropout: probability of zeroing a value of the second convolution.
        norm_act: normalisation and activation.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        out_channels: int,
        inner: int,
        stride: int = 1,
        activate_first: bool = True,
        dropout: float = 0.0,
        norm_act: NormAct = RELEASE,
    ) -> None:
        super().__init__(
            _layers(
                (in_channels, inner, inner, out_channels),
                kernels=(3, 3, 3),
                strides=(stride, 1, 1),
                activate_first=activate_first,
                dropout=dropout,
                dropout_at_conv=True,
                norm_act=norm_act,
            )
        )


BRANCHES: dict[BranchKind, type[BasicBranch | BottleneckBranch]] = {
    "basic": BasicBranch,
    "bottleneck": BottleneckBranch,
}


def _layers(
    widths: tuple[int, ...],
    *,
    kernels: tuple[int, ...],
    strides: tuple[int, ...],
    activate_first: bool,
    dropout: float,
    dropout_at_conv: bool = False,
    norm_act: NormAct,
) -> OrderedDict[str, nn.Module]:
    """Convolutions between ``widths``, each behind BN-ReLU; all numbered from 1.

    Dropout comes after the last activation, or, with ``dropout_at_conv``, after the convolution
    before it. At 0 it is left out, so that the ``repr`` of plain networks does not show it.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    last = len(kernels)
    convolutions = zip(itertools.pairwise(widths), kernels, strides, strict=True)
    for i, ((before, after), kernel, stride) in enumerate(convolutions, start=1):
        if i > 1 or activate_first:
            layers[f"norm{i}"] = norm_act.normalise(before)
            layers[f"relu{i}"] = norm_act.activate()
        if dropout and i == last and not dropout_at_conv:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
        layers[f"conv{i}"] = conv2d(before, out_channels=after, kernel_size=kernel, stride=stride)
        if dropout and i == last - 1 and dropout_at_conv:
            layers[f"dropout{i}"] = nn.Dropout(dropout)
    return layers
