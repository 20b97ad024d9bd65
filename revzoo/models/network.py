"""What every network of the zoo offers, whatever it is made of.

    image -> stages, each ending in a state of streams -> features -> head -> logits

A network class says how a state comes out of each stage (:meth:`ImageNetwork.stage_states`) and
what those states are (:attr:`ImageNetwork.feature_info`); feature extraction, pretrained weights
and saving are built on that, once for all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from revzoo.core.invertible import State
from revzoo.weights.entry import WeightsEntry


class FeatureInfo(NamedTuple):
    """A feature map: its channels, by how much it is smaller than the image, and where it ends."""

    num_chs: int
    reduction: int
    module: str


class Spec(NamedTuple):
    """How ``create_model`` made a network: the architecture and the keywords that shape it."""

    architecture: str
    options: Mapping[str, Any]


class ImageNetwork(nn.Module, ABC):
    """Image classifier, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Attributes:
        num_classes: number of logits.
        in_chans: channels of the images.
        num_features: channels of what :meth:`forward_features` gives.
        classifier: path of the last linear layer.
        input_layer: path of the first convolution, whose weights can be adapted to another number
            of image channels; None where there is none.
        spec: how it was made; None for a network built from its class.
        entry: the weights it was created with, if any.
    """

    default_memory: ClassVar[str]
    classifier: ClassVar[str] = "fc"
    input_layer: ClassVar[str | None] = None
    num_classes: int
    in_chans: int
    num_features: int
    spec: Spec | None = None
    entry: WeightsEntry | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_chans, H, W)``.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        return self.forward_head(self.forward_features(x))

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """What the head takes."""

    @abstractmethod
    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Logits of features; with ``pre_logits`` what the classifier takes."""

    @abstractmethod
    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a fresh one, on the same device."""

    @property
    @abstractmethod
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The feature map at the end of each stage."""

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Side in pixels of the images that the architecture was published for."""

    @abstractmethod
    def stage_states(self, x: Tensor) -> Iterator[State]:
        """The state after each stage, computed as it is asked for."""

    @abstractmethod
    def keep_stages(self, count: int) -> None:
        """Remove what comes after the first ``count`` stages, the head included."""

    def merge(self, state: State) -> Tensor:
        """A state of streams as one feature map ``(B, C, H, W)``."""
        return torch.cat(state, dim=1)

    def save_pretrained(self, folder: str | Path, **facts: Any) -> WeightsEntry:
        """Write weights, entry and model card; see :func:`revzoo.models.saving.save_pretrained`."""
        from revzoo.models.saving import save_pretrained

        return save_pretrained(self, Path(folder), **facts)

    def push_to_hub(self, repository: str, *, private: bool = False, **facts: Any) -> str:
        """Upload to ``owner/name``; see :func:`revzoo.models.saving.push_to_hub`."""
        from revzoo.models.saving import push_to_hub

        return push_to_hub(self, repository, private=private, **facts)
