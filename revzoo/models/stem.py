"""The first layers: from an image to the streams of the first stage.

    CIFAR       conv3x3 - BN - ReLU
    ImageNet    conv7x7(stride 2) - BN - ReLU - max pool 3x3(stride 2)

as in the TensorFlow release of the RevNet paper (arXiv 1707.04585). As the stem ends in BN-ReLU,
the first branch after it has none of its own.
"""

from torch import Tensor, nn

from revzoo.core.invertible import State, Step
from revzoo.layers.conv import conv2d
from revzoo.layers.norm import RELEASE, NormAct
from revzoo.layers.split import halves


class Stem(Step):
    """``(B, in_chans, H, W)`` -> as many as ``out_streams`` ``(B, channels / out_streams, H, W)``.

    Args:
        in_chans: channels of the image.
        channels: channels of all streams together.
        out_streams: number of streams, split along the channels.
        downsample: the ImageNet stem, whose output is ``(H/4, W/4)`` (rounded up), where true.
        norm_act: normalisation and activation.
    """

    streams = 1

    def __init__(
        self,
        in_chans: int,
        *,
        channels: int,
        out_streams: int,
        downsample: bool,
        norm_act: NormAct = RELEASE,
    ) -> None:
        super().__init__()
        self.out_streams = out_streams
        kernel_size, stride = (7, 2) if downsample else (3, 1)
        self.conv = conv2d(in_chans, out_channels=channels, kernel_size=kernel_size, stride=stride)
        self.norm = norm_act.normalise(channels)
        self.relu = norm_act.activate()
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if downsample else nn.Identity()

    def forward(self, *state: Tensor) -> State:
        (x,) = state
        y: Tensor = self.pool(self.relu(self.norm(self.conv(x))))
        return (y,) if self.out_streams == 1 else halves(y)
