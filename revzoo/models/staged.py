"""What ResNets and RevNets share: stem, stages, head, and the checks of what comes in.

    image -> stem -> stages of residual units -> BN - ReLU -> average pool -> [dropout] -> linear

The classes in :mod:`revzoo.models.resnet` and :mod:`revzoo.models.revnet` say how one unit is built
and how many streams run through the stages. torchvision's ResNets are post-activation ones, without
streams and without a memory mode.

Shapes: B batch, C channels of all streams together, H, W height and width.
"""

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor, nn

from revzoo.core.invertible import State, Step, as_state, label_steps
from revzoo.core.memory import set_memory
from revzoo.layers.norm import batch_norm
from revzoo.layers.sequence import ReversibleSequence
from revzoo.models.checks import check_count, check_probability
from revzoo.models.network import FeatureInfo, ImageNetwork
from revzoo.models.stem import Stem
from revzoo.models.variant import UnitPlan, Variant


class StagedNetwork(ImageNetwork):
    """Image classifier of stages of residual units, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Args:
        variant: widths, depths and strides.
        num_classes: number of logits.
        in_chans: channels of the image.
        memory: memory mode of all steps (see :func:`revzoo.set_memory`); None for the model's own
            default, :attr:`default_memory`.
        drop_rate: probability of dropping a pooled feature before the classifier.
        dropout: probability of dropping an activation inside every residual function.
        drop_path_rate: probability of dropping the value of the last residual function for an
            image; it rises linearly from 0 at the first unit.

    Raises:
        ValueError: an argument is out of range, or the memory mode does not apply.
    """

    streams: ClassVar[int]
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
    ) -> None:
        super().__init__()
        check_count("in_chans", in_chans)
        rates = {"drop_rate": drop_rate, "dropout": dropout, "drop_path_rate": drop_path_rate}
        for name, rate in rates.items():
            check_probability(name, rate)
        self.variant = variant
        self.in_chans = in_chans
        self.num_features = variant.stage_channels[-1]
        downsample = variant.downsampling_stem
        stem = Stem(
            in_chans, channels=variant.stem_width, out_streams=self.streams, downsample=downsample
        )
        self.stem = ReversibleSequence([stem], memory=self.default_memory)
        self.stages = nn.ModuleList(
            ReversibleSequence(
                [self.build_unit(plan) for plan in stage], memory=self.default_memory
            )
            for stage in variant.stages(dropout=dropout, drop_path_rate=drop_path_rate)
        )
        self.norm = batch_norm(self.num_features)
        self.relu = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        label_steps(self)
        if memory is not None:  # refuses what does not apply; the default needs no refusal
            set_memory(self, memory)

    @staticmethod
    @abstractmethod
    def build_unit(plan: UnitPlan) -> Step:
        """One residual unit; the plan's channels count all streams together."""

    def forward_features(self, x: Tensor) -> Tensor:
        """Last feature maps ``(B, num_features, H', W')``: streams merged, normalised, after ReLU.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        state = deque(self.stage_states(x), maxlen=1).pop()
        return self.relu(self.norm(self.merge(state)))

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """Each stage's last map, streams merged, as it is before the next BN-ReLU."""
        variant = self.variant
        sizes = zip(variant.stage_channels, variant.reductions, strict=True)
        return tuple(FeatureInfo(c, r, f"stages.{i}") for i, (c, r) in enumerate(sizes))

    @property
    def image_size(self) -> int:
        """Side in pixels of CIFAR's or ImageNet's images, as the stem tells."""
        return 224 if self.variant.downsampling_stem else 32

    def stage_states(self, x: Tensor) -> Iterator[State]:
        """The streams after each stage.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        self._check_images(x)
        state = as_state(self.stem(x))
        for stage in self.stages:
            state = as_state(stage(*state))
            yield state

    def keep_stages(self, count: int) -> None:
        self.stages = self.stages[:count]
        del self.norm, self.relu, self.pool, self.drop, self.fc

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool features ``(B, num_features, H', W')`` and classify them: ``(B, num_classes)``.

        With ``pre_logits`` the pooled features ``(B, num_features)`` are returned instead.
        """
        pooled: Tensor = self.drop(self.pool(features).flatten(1))
        return pooled if pre_logits else self.fc(pooled)

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a fresh one with ``num_classes`` outputs, on the same device.

        Raises:
            ValueError: ``num_classes`` is no positive whole number.
        """
        check_count("num_classes", num_classes)
        self.num_classes = num_classes
        like = self.norm.weight
        classifier = _linear(self.num_features, num_classes).train(self.training)
        self.fc = classifier.to(like.device, like.dtype)

    def _check_images(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(
                f"Got a tensor of shape {tuple(x.shape)}; expected images "
                f"(B, {self.in_chans}, H, W). Give one image a batch dimension: x.unsqueeze(0)."
            )
        channels, height, width = x.shape[1:]
        if channels != self.in_chans:
            raise ValueError(
                f"Got images of {channels} channels; this model expects {self.in_chans}. Create it "
                f"with in_chans={channels}, or convert the images."
            )
        multiple = self.variant.size_multiple
        if height < 1 or width < 1 or height % multiple or width % multiple:
            raise ValueError(
                f"Got images of {height}x{width} pixels; this model halves the size with pooling "
                f"shortcuts and expects height and width to be positive multiples of {multiple}. "
                "Resize or pad the images."
            )


def _linear(in_features: int, out_features: int) -> nn.Linear:
    """Classifier initialised as in the TensorFlow release of arXiv 1707.04585.

    Weights uniform in +-sqrt(3 / in_features), i.e. of variance 1 / in_features
    (tf.uniform_unit_scaling_initializer with factor 1), biases zero.
    """
    layer = nn.Linear(in_features, out_features)
    bound = math.sqrt(3.0 / in_features)
    nn.init.uniform_(layer.weight, -bound, bound)
    nn.init.zeros_(layer.bias)
    return layer
