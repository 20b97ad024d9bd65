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

from collections import OrderedDict
from typing import Literal, Protocol

from torch import Tensor, nn

from revzoo.layers.conv import conv2d
from revzoo.layers.lean import Lean
from revzoo.layers.norm import RELEASE, NormAct
from revzoo.layers.precision import narrowed

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
        in_channels: channels of the stream read.
        out_channels: channels of the stream added to.
        stride: stride of the first convolution.
        activate_first: whether BN-ReLU comes before the first convolution.
        dropout: probability of zeroing an activation before the last convolution.
        stride_at_3x3: no effect: the first convolution is 3x3.
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
        stride_at_3x3: bool = False,
        norm_act: NormAct = RELEASE,
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if activate_first:
            _append_activation(layers, 1, in_channels, norm_act)
        layers["conv1"] = conv2d(
            in_channels, out_channels=out_channels, kernel_size=3, stride=stride
        )
        _append_activation(layers, 2, out_channels, norm_act, dropout)
        layers["conv2"] = conv2d(out_channels, out_channels=out_channels, kernel_size=3)
        super().__init__(layers)


class BottleneckBranch(_Branch):
    """1x1, 3x3 and 1x1 convolution, ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``.

    The inner width is ``out_channels / 4``; the first convolution has the stride.

    Args:
        in_channels: channels of the stream read.
        out_channels: channels of the stream added to, a multiple of 4.
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
                f"A bottleneck branch got out_channels={out_channels}; its inner width is a "
                f"quarter of that, so give a positive multiple of {BOTTLENECK_EXPANSION}."
            )
        strides = (1, stride) if stride_at_3x3 else (stride, 1)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if activate_first:
            _append_activation(layers, 1, in_channels, norm_act)
        layers["conv1"] = conv2d(in_channels, out_channels=inner, kernel_size=1, stride=strides[0])
        _append_activation(layers, 2, inner, norm_act)
        layers["conv2"] = conv2d(inner, out_channels=inner, kernel_size=3, stride=strides[1])
        _append_activation(layers, 3, inner, norm_act, dropout)
        layers["conv3"] = conv2d(inner, out_channels=out_channels, kernel_size=1)
        super().__init__(layers)


class TripleBranch(_Branch):
    """Three 3x3 convolutions, ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``.

    Args:
        in_channels: channels of the stream read.
        out_channels: channels of the stream added to.
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
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if activate_first:
            _append_activation(layers, 1, in_channels, norm_act)
        layers["conv1"] = conv2d(in_channels, out_channels=inner, kernel_size=3, stride=stride)
        _append_activation(layers, 2, inner, norm_act)
        layers["conv2"] = conv2d(inner, out_channels=inner, kernel_size=3)
        # left out at 0, so that state_dict and repr of plain networks do not change
        if dropout != 0.0:
            layers["dropout2"] = nn.Dropout(dropout)
        _append_activation(layers, 3, inner, norm_act)
        layers["conv3"] = conv2d(inner, out_channels=out_channels, kernel_size=3)
        super().__init__(layers)


class BranchFactory(Protocol):
    """The arguments of ResNet and RevNet branches."""

    def __call__(
        self,
        in_channels: int,
        *,
        out_channels: int,
        stride: int = 1,
        activate_first: bool = True,
        dropout: float = 0.0,
        stride_at_3x3: bool = False,
        norm_act: NormAct = RELEASE,
    ) -> nn.Sequential: ...


BRANCHES: dict[BranchKind, BranchFactory] = {
    "basic": BasicBranch,
    "bottleneck": BottleneckBranch,
}


def _append_activation(
    layers: OrderedDict[str, nn.Module],
    index: int,
    channels: int,
    norm_act: NormAct,
    dropout: float = 0.0,
) -> None:
    """Append BN, ReLU and optional dropout, numbered like the convolution after them."""
    layers[f"norm{index}"] = norm_act.normalise(channels)
    layers[f"relu{index}"] = norm_act.activate()
    if dropout != 0.0:
        layers[f"dropout{index}"] = nn.Dropout(dropout)
