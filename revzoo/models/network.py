"""The base class of all networks: the head, encoding and its inverse, checks of the images.

    image -> stem -> stages of steps -> features -> pool -> [dropout] -> linear

The public methods follow timm (R. Wightman, https://github.com/huggingface/pytorch-image-models,
1.0): ``forward_features``, ``forward_head``, ``forward_intermediates``,
``get_classifier``, ``reset_classifier``, ``num_classes=0``, ``global_pool``.

Stem and stages are sequences of steps on one state. The streams after the last stage are a
*representation* of the image; if every step has an inverse, they determine the image.

Feature maps are the states between the stages. Forward hooks on stages would give the same maps,
but also run the layers after the last one. Only the returned maps, copies of the concatenated
streams, are kept; the stages recompute their activations as usual.

Methods that take images raise a ValueError if their channels or size do not fit.

Shapes: B batch, C channels of all streams together, H, W height and width. Networks of signals and
volumes (:mod:`revzoo.models.dense`) have one or three axes instead of H, W.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice, check_count, check_probability, is_count, size_word
from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    State,
    Step,
    as_state,
    label_steps,
    name_of,
)
from revzoo.core.modes import set_memory
from revzoo.core.words import apply_with_words
from revzoo.layers.sequence import ReversibleSequence, invert_sequence, merged, run_sequence
from revzoo.layers.streams import Merge
from revzoo.models.components import GlobalPool, NormAct
from revzoo.models.lean import run
from revzoo.models.save import SavableNetwork

# Layers that draw in each pass. By name, so that we need not import torchvision; _DropoutNd is the
# base of torch's Dropout* and AlphaDropout*.
DROPS = ("_DropoutNd", "StochasticDepth")


class FeatureInfo(NamedTuple):
    """A feature map: its channels, image side over map side, and the module that returns it."""

    num_chs: int
    reduction: int
    module: str


class Part(NamedTuple):
    """A unit to freeze or to give a learning rate: the modules between two states of a network."""

    name: str
    modules: tuple[nn.Module, ...]
    tensors: tuple[nn.Parameter, ...] = ()  # outside these modules, such as class tokens

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of all its modules, and its own."""
        yield from self.tensors
        for module in self.modules:
            yield from module.parameters()

    def train(self, trained: bool) -> None:
        """Train the part, or freeze it: evaluation mode, no gradients."""
        for p in self.parameters():
            p.requires_grad_(trained)
        for module in self.modules:
            module.train(trained)


class ImageSizeError(ValueError):
    """A network does not take images of a size.

    Args:
        reason: what was got and what is expected.
        remedy: the end of the message; commands replace it, since their options have other names.
        sizes: the nearest sides in pixels that the network takes.
    """

    def __init__(self, reason: str, remedy: str, *, sizes: Sequence[int]) -> None:
        self.reason, self.sizes = reason, sizes
        super().__init__(reason + remedy)


class ImageNetwork(SavableNetwork, ABC):
    """Image classifier, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Subclasses call :meth:`_build` for stem and stages, set ``num_features`` (channels of
    :meth:`forward_features`), call :meth:`_assemble` at the end of their constructor, and define
    the abstract methods.
    """

    default_memory: ClassVar[str]
    """The memory mode for ``memory=None``."""

    convertible: ClassVar[bool] = False
    """Whether its blocks have no inverse and ``reversible_bits`` can make them reversible."""

    streams: ClassVar[int] = 2
    """Number of streams after the stages."""

    channel_dim: ClassVar[int] = 1
    """The dimension along which the streams are merged: 1 of maps, -1 of tokens."""

    dense: bool = False
    """Whether it classifies each position: logits ``(B, num_classes, *sizes)``."""

    size_multiples: Sequence[int]
    """Of a dense network: the sides of an image are multiples of these."""

    classifier: ClassVar[str] = "fc"
    """Path of the last linear layer, of a dense network the last convolution."""

    input_layer: ClassVar[str | None] = None
    """Path of the first convolution, if it can be adapted to other image channels."""

    positions: ClassVar[str | None] = None
    """Path of learned positions (1, N, D), if they can be resized for other images."""

    num_features: int
    stem: ReversibleSequence
    stages: nn.ModuleList

    def __init__(self, *, in_chans: int) -> None:
        super().__init__()
        check_count("in_chans", in_chans)
        self.in_chans = in_chans

    def _build(
        self,
        variant: Any,
        stem: Iterable[Step],
        stages: Iterable[Iterable[Step] | Mapping[str, Step]],
    ) -> None:
        """Set the row, and build stem and stages of these steps, in this order."""
        self.variant = variant
        self.stem = ReversibleSequence(stem, memory=self.default_memory)
        self.stages = nn.ModuleList(
            ReversibleSequence(steps, memory=self.default_memory, dim=self.channel_dim)
            for steps in stages
        )

    def _assemble(
        self, num_classes: int, drop_rate: float, memory: str | None, global_pool: str
    ) -> None:
        """Append pooling, dropout and classifier, name the steps, and set their memory mode."""
        check_probability("drop_rate", drop_rate)
        self.pool = self._pool(global_pool)
        self.drop = nn.Dropout(drop_rate)
        # in a tuple, so that it is not a submodule: it follows the memory mode of the stages
        self._merge: tuple[Invertible] = (Merge(self.channel_dim),)
        self.reset_classifier(num_classes)
        label_steps(self)
        # the subclass has built its sequences in default_memory, which fits; others may raise
        if memory is not None:
            set_memory(self, memory)

    def _pool(self, kind: str) -> GlobalPool:
        return GlobalPool(kind, places=(2, 3) if self.channel_dim == 1 else (1,))

    @property
    @abstractmethod
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The available feature maps, one for each stage."""

    @abstractmethod
    def check_size(self, height: int, width: int) -> None:
        """Raise an ImageSizeError unless the network takes images of ``height`` x ``width``."""

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map ``(B, num_features, H', W')``, or tokens ``(B, N, num_features)``.

        Streams are merged and normalised; :meth:`forward_head` pools the result.
        """
        return self.normed(self.encode(x), last=True)

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        """Merged streams after the ``last`` stage or another, normalised if the widths fit."""
        return z

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_chans, H, W)``."""
        return self.forward_head(self.forward_features(x))

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify the result of :meth:`forward_features`: ``(B, num_classes)``.

        With ``pre_logits``, or if ``num_classes`` is 0, return the pooled features
        ``(B, num_features)`` instead, twice as many for ``global_pool="catavgmax"``.
        """
        pooled: Tensor = self.drop(self.pool(features))
        return pooled if pre_logits else self.get_classifier()(pooled)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The last features and intermediate feature maps, from one pass in any memory mode.

        Args:
            x: images ``(B, in_chans, H, W)``.
            indices: positions in :attr:`feature_info` (negative ones from the end); a number n
                for the last n maps; None for all.
            norm: apply the head's normalisation to the maps that have its width.
            stop_early: stop after the last of the ``indices``.
            output_fmt: ``"NCHW"``; for transformers also ``"NLC"``, tokens.
            intermediates_only: return only the maps.

        Returns:
            The features of :meth:`forward_features` (after an early stop, the last computed map),
            and the maps in the order of the network; or only the maps.

        Raises:
            ValueError: an index is out of range, the format is unknown, or the images do not fit.

        Example:
            >>> model = revzoo.create_model("revnet38")
            >>> features, maps = model.forward_intermediates(torch.zeros(1, 3, 32, 32), indices=2)
            >>> [tuple(m.shape) for m in maps]
            [(1, 64, 16, 16), (1, 112, 8, 8)]
        """
        tokens = ("NLC",) if self.channel_dim == -1 else ()
        check_choice("output_fmt", output_fmt, ("NCHW", *tokens))
        count = len(self.feature_info)
        taken = taken_indices(indices, count)
        last = max(taken) if stop_early else count - 1
        maps: list[Tensor] = []
        for i, state in enumerate(self.stage_states(x)):
            if i in taken or i == last:  # merging copies the streams, so not after every stage
                z = torch.cat(state, dim=self.channel_dim)
                if i in taken:
                    normed = self.normed(z, last=i == count - 1) if norm else z
                    maps.append(self.as_map(normed) if output_fmt == "NCHW" else normed)
            if i == last:
                break  # stage_states is lazy: later stages do not run
        return maps if intermediates_only else (self.normed(z, last=last == count - 1), maps)

    @property
    def classifiers(self) -> tuple[str, ...]:
        """The paths of all classifiers; nearly every network has one."""
        return (self.classifier,)

    def get_classifier(self) -> nn.Module:
        """The classifier: a linear layer, or ``nn.Identity`` if ``num_classes`` is 0."""
        return self.get_submodule(self.classifier)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a fresh one with ``num_classes`` outputs, on the same device.

        Args:
            num_classes: 0 for none: the model then returns the pooled features.
            global_pool: ``"avg"``, ``"max"``, ``"avgmax"``, ``"catavgmax"``, or ``""`` for none,
                which needs ``num_classes=0``; None keeps the present pooling.

        Raises:
            ValueError: ``num_classes`` is not an integer >= 0, or is not 0 without pooling.
        """
        check_count("num_classes", num_classes, least=0)
        pool = self.pool if global_pool is None else self._pool(global_pool)
        if num_classes and not pool.kind and not self.dense:
            raise ValueError(
                f"global_pool='' with num_classes={num_classes}: a linear layer classifies pooled "
                "features; give num_classes=0 for features that are not pooled"
            )
        self.num_classes, self.fresh_head, self.pool = num_classes, True, pool
        if global_pool is not None and self.spec is not None:  # a saved model must be rebuilt alike
            options = {**self.spec.options, "global_pool": global_pool}
            self.spec = self.spec._replace(options=options)
        self.fc = self.new_classifier(num_classes) if num_classes else nn.Identity()
        # device and precision may have changed since creation
        like = next(self.parameters())
        self.fc.to(like.device, like.dtype).train(self.training)

    def new_classifier(self, num_classes: int) -> nn.Module:
        """A fresh layer from the pooled features to logits."""
        layer = nn.Linear(self.num_features * self.pool.widening, num_classes)
        # as in the TensorFlow release of arXiv 1707.04585: uniform of variance 1 / in_features
        bound = math.sqrt(3.0 / layer.in_features)
        nn.init.uniform_(layer.weight, -bound, bound)
        nn.init.zeros_(layer.bias)
        return layer

    @property
    def encoded_channels(self) -> int:
        """Channels of the result of :meth:`encode`."""
        return self.feature_info[-1].num_chs

    @property
    def invertible(self) -> bool:
        """Whether every layer before the head has an inverse, so that :meth:`inverse` works."""
        return all(step.invertible for step in self._steps())

    def encode(self, x: Tensor) -> Tensor:
        """Representation of images ``(B, in_chans, H, W)``: the last stage's streams, merged.

        The head normalises, pools and classifies it. Memory mode ``exact`` rounds the image to the
        grid (multiples of ``2**-23`` do not change), and :meth:`inverse` recovers it bit for bit.
        """
        state = self._last_streams(x)
        if len(state) > 1:
            *_, last = self._steps()
            (merge,) = self._merge
            state = merged(state, last, merge)  # in the memory mode of the last step
        return state[0]

    def _last_streams(self, x: Tensor) -> State:
        """The streams after the last stage."""
        self._check_images(x)
        state: State = (x,)
        for sequence in self._sequences():
            streams = list(state)
            del state  # see run_sequence()
            state = run_sequence(sequence, streams)
        return state

    def inverse(self, z: Tensor) -> Tensor:
        """The images ``(B, in_chans, H, W)`` with representation ``z`` (see :meth:`encode`).

        Raises:
            NotInvertibleError: a layer loses information (the message names it), or the model is in
                training mode and drops activations, with a different mask in each pass.
            TypeError: ``z`` is not a floating-point tensor.
            ValueError: ``z`` has the wrong number of dimensions or channels, like logits.
            RangeError: a stream is too large for exact sums on the grid.
        """
        self._check_invertible()
        if not isinstance(z, Tensor) or not z.is_floating_point():
            got = z.dtype if isinstance(z, Tensor) else type(z).__name__
            raise TypeError(
                f"z of type {got}: expected the floating-point tensor of encode(images)"
            )
        channels = self.encoded_channels
        axes = 2 + self.dims + min(self.channel_dim, 0)
        if z.dim() != axes or z.shape[self.channel_dim] != channels:
            raise ValueError(
                f"z of shape {tuple(z.shape)}: expected the result of encode(images), with "
                f"{channels} channels; logits and pooled features have lost the rest of the image"
            )
        # split into dense streams, as in the forward pass: kernels sum views in another order
        state: State = (z,)
        if self.streams > 1:
            (merge,) = self._merge
            state = apply_with_words(merge.inverse, state)
        for sequence in reversed(self._sequences()):
            streams = list(state)
            del state
            state = invert_sequence(sequence, streams)
        return state[0]

    def stage_states(self, x: Tensor) -> Iterator[State]:
        """Yield the streams after each stage (of a transformer: each block), computed lazily."""
        self._check_images(x)
        state = as_state(self.stem(x))
        for stage in self.stages:
            state = as_state(stage(*state))
            yield state

    def as_map(self, z: Tensor) -> Tensor:
        """Merged streams as a map ``(B, C, H, W)``."""
        return z

    def keep_stages(self, count: int) -> None:
        """Remove the head and all stages after the first ``count``."""
        self.stages = self.stages[:count]  # a slice of a ModuleList keeps its keys
        for name in dict(self.named_children()).keys() - {"stem", "stages"}:
            delattr(self, name)

    def keep_maps(self, indices: Sequence[int]) -> None:
        """Remove what none of these maps (positions in :attr:`feature_info`) needs."""
        self.keep_stages(max(indices) + 1)

    def parts(self) -> tuple[Part, ...]:
        """``stem``, ``stages.0``, ..., ``stages.N`` (with the normalisation after it), ``fc``.

        From image to logits; each parameter is in one part. The order matters: a frozen part still
        saves activations unless all parts before it are frozen, too. Lightning's
        ``BaseFinetuning.flatten_modules`` returns single layers.
        """
        used = ("stem", "stages", self.classifier)
        # the normalisation and layers without parameters read the last stage
        rest = [module for name, module in self.named_children() if name not in used]
        *earlier, last = self.stages
        return (
            # parameters of the network itself go with the first part
            Part("stem", (self.stem,), tuple(self.parameters(recurse=False))),
            *(Part(f"stages.{i}", (stage,)) for i, stage in enumerate(earlier)),
            Part(f"stages.{len(earlier)}", (last, *rest)),
            Part(self.classifier, (self.get_classifier(),)),
        )

    def published_keys(self) -> Iterable[tuple[str, str]]:
        """Pairs: a module or tensor in the file of the network's publisher, and the one here."""
        return ()

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The ``tensors`` of a file under the names of this network's ``state_dict``."""
        names = dict(self.published_keys())
        renamed = {}
        for key, t in tensors.items():
            module, _, leaf = key.rpartition(".")
            inside = f"{names[module]}.{leaf}" if module in names else key
            renamed[names.get(key, inside)] = t
        return renamed

    def _sequences(self) -> list[ReversibleSequence]:
        return cast(list[ReversibleSequence], [self.stem, *self.stages])

    def _steps(self) -> Iterator[Step]:
        return itertools.chain.from_iterable(self._sequences())

    def _check_invertible(self) -> None:
        lossy = [name_of(step) for step in self._steps() if not step.invertible]
        if lossy:  # name all of them: a user may replace some by invertible steps
            raise NotInvertibleError(
                f"{type(self).__name__} cannot be inverted: {', '.join(lossy)} "
                f"{'loses' if len(lossy) == 1 else 'lose'} information. Use an i-RevNet, which is "
                "invertible from end to end, or invert single stages without such a step: "
                "model.stages[i].inverse(...)"
            )
        for name, module in self.stages.named_modules():
            drops = any(kind.__name__ in DROPS for kind in type(module).__mro__)
            if drops and module.training and module.p > 0:
                raise NotInvertibleError(
                    f"stages.{name} drops values with p={module.p} in training mode, different "
                    "values in each pass: call eval() before encode and inverse"
                )

    def _check_images(self, x: object) -> None:
        shape = f"(B, {self.in_chans}, {', '.join(('L', 'HW', 'DHW')[self.dims - 1])})"
        if not isinstance(x, Tensor):
            raise TypeError(
                f"images of type {type(x).__module__}.{type(x).__qualname__}: expected a tensor "
                f"{shape}; prepare an image with model.transforms()(image).unsqueeze(0), or call "
                "revzoo.predict(image, model)"
            )
        got = f"images of shape {tuple(x.shape)}: expected {shape}"
        if x.dim() != 2 + self.dims:
            raise ValueError(f"{got}; give one image a batch dimension, x.unsqueeze(0)")
        if not x.is_floating_point():
            raise ValueError(
                f"images of {x.dtype}: expected normalised images of a floating type; batches of "
                "revzoo.data hold bytes, so pass datamodule=data to the trainer, or call the model "
                "on data.transform(images, training=False)"
            )
        channels, *sizes = x.shape[1:]
        if channels != self.in_chans:
            # NumPy's and Pillow's order, (B, H, W, C)
            if self.dims == 2 and sizes[1] == self.in_chans:
                raise ValueError(f"{got}; put the channels first, x.permute(0, 3, 1, 2)")
            raise ValueError(
                f"images of {channels} channels: expected {self.in_chans}; create the model with "
                f"in_chans={channels}, or convert the images"
            )
        self.check_size(*sizes)


class ConvolutionalClassifier(ImageNetwork):
    """Image classifier whose streams are maps ``(B, C, H, W)``; its head begins with BN-ReLU.

    The image sizes that the strides allow are in the variant: ``size_multiple``.

    Args:
        variant: widths, depths and strides. The keywords are those of :func:`revzoo.create_model`.

    Raises:
        ValueError: an argument is out of range, the variant does not fit ``in_chans``, or the
            memory mode does not fit.
    """

    size_reason: ClassVar[str]
    """The reason in the error message, after "this model": "squeezes them", say."""

    def _append_head(self, norm_act: NormAct, *options: Any) -> None:
        """Append BN-ReLU, then the rest by :meth:`_assemble`, which takes the ``options``."""
        self.norm = norm_act.normalise(self.num_features)
        self.relu = norm_act.activate()
        self._assemble(*options)

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        # The head's normalisation has the width of the last stage. run lets the ReLU work in place,
        # so autograd keeps one tensor, not two.
        return run((self.norm, self.relu), z) if last else z

    def check_size(self, height: int, width: int) -> None:
        multiple = self.variant.size_multiple
        if height < 1 or width < 1 or height % multiple or width % multiple:
            near = [max(multiple, round(n / multiple) * multiple) for n in (height, width)]
            remedy = f"data.image_size={size_word(near)}"
            raise ImageSizeError(
                f"images of {height} x {width} pixels: expected height and width to be positive "
                f"multiples of {multiple}, since this model {self.size_reason}",
                f"; resize or pad the images (a folder of images: {remedy})",
                sizes=near,
            )


class FeatureInfos(tuple[FeatureInfo, ...]):
    """Descriptions of the chosen maps, in the order of ``out_indices``."""

    def channels(self) -> list[int]:
        """Channels of each map."""
        return [info.num_chs for info in self]

    def reduction(self) -> list[int]:
        """Image side over map side, of each map."""
        return [info.reduction for info in self]


class FeatureNet(nn.Module):
    """``(B, in_chans, H, W)`` to a list of maps ``(B, num_chs, H / reduction, W / reduction)``.

    A map is the streams concatenated along the channels, or a level of a pyramid, before the head's
    normalisation. Every memory mode works; gradients may enter at any map.

    Args:
        network: modified in place: loses its head and the stages after the last map.
        out_indices: stages, negative ones counted from the last; a number n for the last n; None
            for all. The maps have this order.

    Raises:
        ValueError: no index, an index out of range, or a stage twice.
    """

    def __init__(
        self, network: ImageNetwork, out_indices: int | Sequence[int] | None = None
    ) -> None:
        super().__init__()
        infos = network.feature_info
        self.out_indices = tuple(taken_indices(out_indices, len(infos)))
        if len(set(self.out_indices)) != len(self.out_indices):
            raise ValueError(f"out_indices={out_indices}: expected each stage at most once")
        self.feature_info = FeatureInfos(infos[i] for i in self.out_indices)
        # DistributedDataParallel raises for parameters that get no gradient
        network.keep_maps(self.out_indices)
        self.network = network

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of images ``x``."""
        order = sorted(self.out_indices)
        maps = self.network.forward_intermediates(
            x, order, stop_early=True, intermediates_only=True
        )
        return [maps[order.index(i)] for i in self.out_indices]


def parts(network: nn.Module) -> tuple[Part, ...]:
    """The parts of ``network``, see :meth:`ImageNetwork.parts`.

    Raises:
        ValueError: ``network`` is not a network of the zoo, so its order is unknown.
    """
    if not isinstance(network, ImageNetwork):
        raise ValueError(
            f"{type(network).__name__} is not an ImageNetwork: expected a model of create_model, "
            "with stem, stages and classifier; freeze other models and group their parameters by "
            "hand"
        )
    return network.parts()


def taken_indices(indices: int | Sequence[int] | None, count: int) -> list[int]:
    """``indices`` as positions from 0, by the rules of timm's ``feature_take_indices``.

    Raises:
        ValueError: no index, or an index out of range.
    """
    if indices is None:
        return list(range(count))
    if is_count(indices) and indices <= count:  # type: ignore[operator]
        return list(range(count - indices, count))  # type: ignore[operator]
    if isinstance(indices, Sequence) and len(indices):
        whole = all(isinstance(i, int) and not isinstance(i, bool) for i in indices)
        if whole and all(-count <= i < count for i in indices):
            return [i % count for i in indices]
    raise ValueError(
        f"indices={indices}: this model has {count} feature maps; expected 1 to {count} for "
        f"the last ones, or a list of indices from {-count} to {count - 1}"
    )


def feature_infos(channels: Iterable[int], reductions: Iterable[int]) -> tuple[FeatureInfo, ...]:
    """The descriptions of the maps after each stage."""
    pairs = zip(channels, reductions, strict=True)
    return tuple(FeatureInfo(c, r, f"stages.{i}") for i, (c, r) in enumerate(pairs))
