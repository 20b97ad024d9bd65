"""The base class of all networks: the head, encoding and its inverse, checks of the images.

    image -> stem -> stages of steps -> features -> pool -> [dropout] -> linear

Stem and stages are sequences of steps on one state, so the streams of the last stage are a
*representation* of the image, from which it can be computed again where every step has an inverse.
Feature extraction, pretrained weights and saving are built on the states after the stages, once for
all networks.

Shapes: B batch, C channels of all streams together, H, W height and width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from revzoo._checks import check_count, check_probability
from revzoo.core.invertible import (
    NotInvertibleError,
    State,
    Step,
    as_state,
    label_steps,
    name_of,
)
from revzoo.core.modes import set_memory
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.split import halves
from revzoo.models.save import Saved

# Draw anew in each pass. By name, as torchvision's is imported only where it is used; _DropoutNd is
# the base of torch's Dropout*, AlphaDropout*.
DROPS = ("_DropoutNd", "StochasticDepth")


class FeatureInfo(NamedTuple):
    """A feature map: its channels, by how much it is smaller than the image, and where it ends."""

    num_chs: int
    reduction: int
    module: str


class ImageNetwork(Saved, ABC):
    """Image classifier, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Subclasses build ``stem`` and ``stages``, call :meth:`_assemble` at the end of their
    constructor, and define the abstract methods.

    Args:
        in_chans: channels of the images.

    Attributes:
        num_features: channels of what :meth:`forward_features` gives.

    Raises:
        ValueError: ``in_chans`` is no positive whole number.
    """

    default_memory: ClassVar[str]
    """The memory mode of a model for which none was chosen."""

    streams: ClassVar[int] = 2
    """How many streams leave the stages."""

    channel_dim: ClassVar[int] = 1
    """The dimension along which the streams are merged."""

    classifier: ClassVar[str] = "fc"
    """Path of the last linear layer."""

    input_layer: ClassVar[str | None] = None
    """Path of the first convolution, whose weights can be adapted to other image channels."""

    num_features: int
    stem: ReversibleSequence
    stages: nn.ModuleList

    def __init__(self, *, in_chans: int) -> None:
        super().__init__()
        check_count("in_chans", in_chans)
        self.in_chans = in_chans

    def _assemble(self, *, num_classes: int, drop_rate: float, memory: str | None) -> None:
        """Append dropout and classifier, name the steps, and set their memory mode."""
        check_probability("drop_rate", drop_rate)
        self.drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes)
        label_steps(self)
        if memory is not None:  # refuses what does not apply; the default needs no refusal
            set_memory(self, memory)

    @property
    @abstractmethod
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The feature map at the end of each stage."""

    @abstractmethod
    def check_size(self, height: int, width: int) -> None:
        """Raise a ValueError unless the network takes images of ``height`` x ``width`` pixels."""

    @abstractmethod
    def forward_features(self, x: Tensor) -> Tensor:
        """The features of images ``(B, in_chans, H, W)`` that :meth:`forward_head` pools."""

    @abstractmethod
    def pooled(self, features: Tensor) -> Tensor:
        """Features averaged over their places: ``(B, num_features)``."""

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_chans, H, W)``.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        return self.forward_head(self.forward_features(x))

    def forward_head(self, features: Tensor, *, pre_logits: bool = False) -> Tensor:
        """Pool what :meth:`forward_features` gives and classify it: ``(B, num_classes)``.

        With ``pre_logits`` the pooled features ``(B, num_features)`` are returned instead.
        """
        pooled: Tensor = self.drop(self.pooled(features))
        return pooled if pre_logits else self.fc(pooled)

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier by a fresh one with ``num_classes`` outputs, on the same device.

        Raises:
            ValueError: ``num_classes`` is no positive whole number.
        """
        check_count("num_classes", num_classes)
        self.num_classes, self.fresh_head = num_classes, True
        like = next(self.parameters())
        classifier = _linear(self.num_features, num_classes).train(self.training)
        self.fc = classifier.to(like.device, like.dtype)

    @property
    def invertible(self) -> bool:
        """Whether no layer before the head loses information, so that :meth:`inverse` works."""
        return all(step.invertible for step in self._steps())

    def encode(self, x: Tensor) -> Tensor:
        """Representation of images ``(B, in_chans, H, W)``: the last stage's streams, merged.

        The head normalises, pools and classifies it. In memory mode ``exact`` the image is
        rounded to the grid (a multiple of ``2**-14`` stays as it is) and :meth:`inverse` gives it
        back bit for bit.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        return torch.cat(deque(self.stage_states(x), maxlen=1).pop(), dim=self.channel_dim)

    def inverse(self, z: Tensor) -> Tensor:
        """The images ``(B, in_chans, H, W)`` whose representation :meth:`encode` gives as ``z``.

        Raises:
            NotInvertibleError: a layer loses information, and is named; or the model is in
                training mode and drops activations, which it would do differently this time.
            RangeError: on a grid, a stream is too large for its sums to have been exact.
        """
        self._check_invertible()
        # dense, as in the forward pass: kernels sum views in another order
        state = halves(z, self.channel_dim) if self.streams == 2 else (z,)
        for sequence in reversed([self.stem, *self.stages]):
            assert isinstance(sequence, ReversibleSequence)
            state = as_state(sequence.inverse(*state))
        return state[0]

    def stage_states(self, x: Tensor) -> Iterator[State]:
        """The streams after each stage, computed as they are asked for.

        Raises:
            ValueError: the images' channels or size do not fit.
        """
        self._check_images(x)
        state = as_state(self.stem(x))
        for stage in self.stages:
            state = as_state(stage(*state))
            yield state

    def feature_map(self, state: State) -> Tensor:
        """The streams after a stage as one map ``(B, C, H, W)``."""
        return torch.cat(state, dim=self.channel_dim)

    def keep_stages(self, count: int) -> None:
        """Remove everything after the first ``count`` stages, the head included."""
        self.stages = self.stages[:count]
        for name in [name for name, _ in self.named_children() if name not in ("stem", "stages")]:
            delattr(self, name)

    def _steps(self) -> Iterator[Step]:
        for sequence in (self.stem, *self.stages):
            assert isinstance(sequence, ReversibleSequence)
            yield from sequence

    def _check_invertible(self) -> None:
        lossy = [name_of(step) for step in self._steps() if not step.invertible]
        if lossy:
            raise NotInvertibleError(
                f"{type(self).__name__} cannot be inverted: {', '.join(lossy)} "
                f"{'loses' if len(lossy) == 1 else 'lose'} information. i-RevNets are invertible "
                "from end to end; of other models, a stage without such a step is: "
                "model.stages[i].inverse(...)"
            )
        for name, module in self.stages.named_modules():
            drops = any(kind.__name__ in DROPS for kind in type(module).__mro__)
            if drops and module.training and module.p > 0:
                raise NotInvertibleError(
                    f"stages.{name} drops values with p={module.p} in training mode, other ones in "
                    "each pass: call eval() before encode and inverse"
                )

    def _check_images(self, x: Tensor) -> None:
        if x.dim() != 4:
            raise ValueError(
                f"Got a tensor of shape {tuple(x.shape)}; expected images "
                f"(B, {self.in_chans}, H, W). Give one image a batch dimension: x.unsqueeze(0)."
            )
        if not x.is_floating_point():
            raise ValueError(
                f"Got images of {x.dtype}; expected normalised ones of a floating type. Batches of "
                "revzoo.data hold bytes: give the trainer datamodule=data, or the model "
                "data.transform(images, training=False)."
            )
        channels, height, width = x.shape[1:]
        if channels != self.in_chans:
            raise ValueError(
                f"Got images of {channels} channels; this model expects {self.in_chans}. Create it "
                f"with in_chans={channels}, or convert the images."
            )
        self.check_size(height, width)


def feature_infos(channels: Iterable[int], reductions: Iterable[int]) -> tuple[FeatureInfo, ...]:
    """One for each stage."""
    pairs = zip(channels, reductions, strict=True)
    return tuple(FeatureInfo(c, r, f"stages.{i}") for i, (c, r) in enumerate(pairs))


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
