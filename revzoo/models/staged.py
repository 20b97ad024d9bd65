"""The base class of ResNets and RevNets: stem, stages, head.

    image -> stem -> stages of residual units -> BN - ReLU -> average pool -> [dropout] -> linear

:mod:`revzoo.models.resnet` and :mod:`revzoo.models.revnet` define the units and the number of
streams. torchvision's ResNets are post-activation networks without streams or memory modes.

Shapes: B batch, C channels of all streams together, H, W height and width.
"""

from abc import abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from revzoo._checks import check_probability
from revzoo.core.invertible import State, Step
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.split import halves
from revzoo.models.components.conv import conv2d
from revzoo.models.components.lean import run
from revzoo.models.components.norm import RELEASE, NormAct
from revzoo.models.convolutional import ConvolutionalClassifier
from revzoo.models.network import FeatureInfo, feature_infos
from revzoo.models.variant import UnitPlan, Variant


class Stem(Step):
    """The first layers: ``(B, in_chans, H, W)`` -> ``out_streams`` of ``(B, channels / out_streams,
    H, W)``.

        CIFAR       conv3x3 - BN - ReLU
        ImageNet    conv7x7(stride 2) - BN - ReLU - max pool 3x3(stride 2)

    as in the TensorFlow release of arXiv 1707.04585. The stem ends in BN-ReLU, so the first branch
    omits it.

    Args:
        in_chans: channels of the image.
        channels: channels of all streams together.
        out_streams: number of streams, split along the channels.
        downsample: True for the ImageNet stem, whose output is ``(H/4, W/4)``, rounded up.
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

    def forward(self, x: Tensor) -> Tensor | State:
        y = run((self.conv, self.norm, self.relu, self.pool), x)  # keeps less, see components.lean
        return y if self.out_streams == 1 else halves(y)


class StagedNetwork(ConvolutionalClassifier):
    """Image classifier of stages of residual units, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Args:
        variant: widths, depths and strides.
        num_classes: number of logits; 0 for pooled features instead.
        in_chans: channels of the image.
        memory: memory mode of all steps (see :func:`revzoo.set_memory`); None for
            :attr:`default_memory`.
        drop_rate: probability of dropping a pooled feature before the classifier.
        global_pool: a name in :data:`~revzoo.models.components.pool.POOLS`.
        dropout: probability of dropping an activation inside a residual function.
        drop_path_rate: probability of dropping the last residual function's output for an image; it
            rises linearly from 0 at the first unit.

    Raises:
        ValueError: an argument is out of range, or the memory mode does not fit.
    """

    size_reason: ClassVar[str] = "halves the size with pooling shortcuts"
    input_layer = "stem.steps.0.conv"

    def __init__(
        self,
        variant: Variant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        check_probability("dropout", dropout)
        check_probability("drop_path_rate", drop_path_rate)
        self.variant = variant
        self.num_features = variant.stage_channels[-1]
        stem = Stem(
            in_chans,
            channels=variant.stem_width,
            out_streams=self.streams,
            downsample=variant.downsampling_stem,
            norm_act=variant.norm_act,
        )
        self.stem = ReversibleSequence([stem], memory=self.default_memory)
        self.stages = nn.ModuleList(
            ReversibleSequence(
                [self.build_unit(plan) for plan in stage], memory=self.default_memory
            )
            for stage in variant.stages(dropout=dropout, drop_path_rate=drop_path_rate)
        )
        # branches begin with BN-ReLU, so the sum after the last branch still needs BN-ReLU
        self._append_norm(variant.norm_act, size_multiple=variant.size_multiple)
        self._assemble(
            num_classes=num_classes, drop_rate=drop_rate, memory=memory, global_pool=global_pool
        )

    @staticmethod
    @abstractmethod
    def build_unit(plan: UnitPlan) -> Step:
        """One residual unit; the plan's channels count all streams together."""

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """Each stage's last map, streams merged, before the next BN-ReLU."""
        return feature_infos(self.variant.stage_channels, self.variant.reductions)

    @property
    def image_size(self) -> int:
        """224 for the ImageNet stem, 32 for the CIFAR stem."""
        return 224 if self.variant.downsampling_stem else 32
