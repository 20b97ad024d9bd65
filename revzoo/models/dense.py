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

from revzoo._checks import size_word
from revzoo.core.invertible import State, Step, as_state
from revzoo.models.components import PlainStem
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError, feature_infos


def layer_for(dims: int, name: str) -> Any:
    """Torch's class of a layer for so many axes: ``nn.Conv3d`` for 3 and ``Conv``."""
    return getattr(nn, f"{name}{dims}d")


class DenseNetwork(ImageNetwork):
    """A network that returns a map of the size of its input.

    Its stages are the levels of an encoder, the finest first, then those of a decoder, back to the
    finest. The variant has the image sizes that the strides allow: ``size_multiples``, for each
    axis.

    Args:
        variant: dimensions, widths and depths; a row with ``dims``, ``channels``, ``strides``,
            ``size_multiples`` and ``image_size``. The keywords are those of
            :func:`revzoo.create_model`.

    Raises:
        ValueError: an argument is out of range.
    """

    dense = True
    default_memory: ClassVar[str] = "exact"
    head_kernel: ClassVar[int] = 1
    stem_bias: ClassVar[bool] = True
    input_layer = "stem.steps.0.conv"

    def __init__(
        self,
        variant: Any,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__(in_chans=in_chans)
        self.dims, self.size_multiples = variant.dims, variant.size_multiples
        self.num_features = variant.channels[0]
        stages = self.build_stages(variant)
        conv = layer_for(self.dims, "Conv")
        first = conv(in_chans, self.num_features, 3, padding=1, bias=self.stem_bias)
        self._build(variant, [PlainStem(conv=first)], stages)
        self._assemble(num_classes, drop_rate, memory, "")

    @abstractmethod
    def build_stages(self, variant: Any) -> Iterable[Mapping[str, Step]]:
        """The named steps of each stage, built lazily."""

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
        if global_pool:
            raise ValueError(
                f"global_pool={global_pool!r}: expected None, since {type(self).__name__} "
                "classifies each position and pools nothing"
            )
        super().reset_classifier(num_classes)

    def new_classifier(self, num_classes: int) -> nn.Module:
        conv, kernel = layer_for(self.dims, "Conv"), self.head_kernel
        return conv(self.num_features, num_classes, kernel, padding=kernel // 2)

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
