"""Networks that classify each position: ``(B, in_chans, *sizes) -> (B, num_classes, *sizes)``.

They have the interface of the image classifiers (:mod:`revzoo.models.network`), for signals
``(B, C, L)``, images and volumes ``(B, C, D, H, W)``. There is no pooling: the head is dropout of
values and a convolution of the last map.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from revzoo._checks import check_count, size_word
from revzoo.core.invertible import State, Step, as_state
from revzoo.layers.sequence import ReversibleSequence
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError, feature_infos

CONVOLUTIONS: Mapping[int, type[nn.Conv1d | nn.Conv2d | nn.Conv3d]] = {
    1: nn.Conv1d,
    2: nn.Conv2d,
    3: nn.Conv3d,
}


class DenseStem(Step):
    """``(B, in_chans, *sizes) -> (B, width, *sizes)``: a convolution with kernels of side 3."""

    streams = 1

    def __init__(self, in_chans: int, *, width: int, dims: int, bias: bool = True) -> None:
        super().__init__()
        self.conv = CONVOLUTIONS[dims](in_chans, width, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


class DenseNetwork(ImageNetwork):
    """A network that returns a map of the size of its input.

    Its stages are the levels of an encoder, the finest first, then those of a decoder, back to the
    finest. The variant has the image sizes that the strides allow: ``size_multiples``, for each
    axis.

    Args:
        variant: a row of a table, with ``dims``, ``channels``, ``strides``, ``size_multiples`` and
            ``image_size``.
        stages: the named steps of each stage, built lazily, after the stem.
        stem_bias: whether the first convolution adds a bias.
    """

    dense = True
    default_memory: ClassVar[str] = "exact"
    head_kernel: ClassVar[int] = 1
    input_layer = "stem.steps.0.conv"

    variant: Any

    def __init__(
        self,
        variant: Any,
        stages: Iterable[Mapping[str, Step]],
        *,
        num_classes: int,
        in_chans: int,
        memory: str | None,
        drop_rate: float,
        stem_bias: bool = True,
    ) -> None:
        super().__init__(in_chans=in_chans)
        self.variant, self.dims = variant, variant.dims
        self.size_multiples = variant.size_multiples
        self.num_features = variant.channels[0]
        stem = DenseStem(in_chans, width=self.num_features, dims=self.dims, bias=stem_bias)
        self.stem = ReversibleSequence([stem], memory=self.default_memory)
        self.stages = nn.ModuleList(
            ReversibleSequence(steps, memory=self.default_memory) for steps in stages
        )
        self._assemble(num_classes, drop_rate, memory, "")

    @property
    def image_size(self) -> int:
        size: int = self.variant.image_size
        return size

    def check_size(self, *sizes: int) -> None:
        """Raise an ImageSizeError unless the network takes images of these sizes."""
        multiples = self.size_multiples
        coarsest = [n // m for n, m in zip(sizes, multiples, strict=True)]
        fits = all(n > 0 and not n % m for n, m in zip(sizes, multiples, strict=True))
        if fits and math.prod(coarsest) > 1:
            return
        near = [max(2 * m, round(n / m) * m) for n, m in zip(sizes, multiples, strict=True)]
        remedy = f" (of data=masks: data.image_size={size_word(near)})" if len(sizes) == 2 else ""
        raise ImageSizeError(
            f"images of {' x '.join(map(str, sizes))}: expected positive multiples of "
            f"{' x '.join(map(str, multiples))}, and more than one position in the coarsest map",
            f"; pad or crop the images{remedy}",
            sizes=near,
        )

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the last convolution by a fresh one with ``num_classes`` outputs.

        Args:
            num_classes: 0 for none: the model then returns its features.
            global_pool: None, or empty: there is no pooling.

        Raises:
            ValueError: ``num_classes`` is not an integer >= 0, or there is a pooling.
        """
        check_count("num_classes", num_classes, least=0)
        if global_pool:
            raise ValueError(
                f"global_pool={global_pool!r}: expected None, since {type(self).__name__} "
                "classifies each position and pools nothing"
            )
        self.num_classes, self.fresh_head = num_classes, True
        self.fc: nn.Module = nn.Identity()
        if num_classes:
            conv, kernel = CONVOLUTIONS[self.dims], self.head_kernel
            self.fc = conv(self.num_features, num_classes, kernel, padding=kernel // 2)
            # device and precision may have changed since creation
            like = next(self.parameters())
            self.fc.to(like.device, like.dtype).train(self.training)

    def stage_states(self, x: Tensor) -> Iterator[State]:
        self._check_images(x)
        state = as_state(self.stem(x))
        for i, stage in enumerate(self.stages):
            state = as_state(stage(*state))
            parts = [state[at] for at in self.map_at(i)]
            yield (torch.cat(parts, dim=1) if len(parts) > 1 else parts[0],)

    @abstractmethod
    def map_at(self, stage: int) -> tuple[int, ...]:
        """The streams after a stage that make its map, in the order of the channels."""

    @property
    def levels(self) -> list[int]:
        """The level of each stage."""
        levels = range(len(self.variant.channels))
        return [*levels, *reversed(levels[:-1])]

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The maps of the encoder, then those of the decoder."""
        channels = [self.variant.channels[i] for i in self.levels]
        return feature_infos(channels, [max(self.variant.strides) ** i for i in self.levels])
