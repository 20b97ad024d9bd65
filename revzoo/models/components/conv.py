"""Bias-free convolution with the initialisation of the RevNet release.

In the ResNets and RevNets a batch normalisation follows every convolution, directly or in the next
unit, so none has a bias. Weights are drawn from a normal distribution truncated at two standard
deviations, with

    std = sqrt(2 / (k * k * out_channels))        (He et al. 2015, arXiv 1502.01852, fan-out form)

as in the TensorFlow release of arXiv 1707.04585. There, too, ``std`` is the deviation before
truncation: the deviation of the weights is 0.88 of it. ``torch.nn.init.kaiming_normal_`` does not
truncate, and the cut-offs of ``torch.nn.init.trunc_normal_`` are absolute, not in units of std.

Known limit: for stride 2 and an even size, TensorFlow's "SAME" pads only after the image and
torch's symmetric padding on both sides. Output shapes are the same, the sampling grid is shifted by
one pixel, so converted TensorFlow weights would not give identical outputs.
"""

import math

from torch import nn

# The cut-off of the normal, in standard deviations (tf.truncated_normal_initializer).
TRUNCATION = 2.0


def conv2d(in_channels: int, *, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    """Convolution ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))`` without bias.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: side of the square kernel, odd; the padding is half of it.
        stride: stride in both directions.
    """
    layer = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        bias=False,
    )
    # fan-out keeps the size of gradients; fan-in, torch's default, the size of activations
    std = math.sqrt(2.0 / (kernel_size * kernel_size * out_channels))
    nn.init.trunc_normal_(layer.weight, std=std, a=-TRUNCATION * std, b=TRUNCATION * std)
    return layer
