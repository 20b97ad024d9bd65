"""Published weights of other programs, as models of the zoo.

=============  ===================================================================================
``irevnet``    the PyTorch release of i-RevNet (arXiv 1802.07088)
``memcnn``     the ResNets and RevNets of MemCNN (van de Leemput et al., JOSS 2019)
``revnet``     the TensorFlow release of RevNet (arXiv 1707.04585): its RevNets and ResNets
=============  ===================================================================================

The architecture follows from the shapes of the tensors. Shapes do not show the strides of MemCNN's
stages, an i-RevNet's squeeze before zero padding, or dropout; the defaults are the published
networks', and keywords change them. :mod:`revzoo.models.weights_file` reads the files, and runs no
code in them. The networks translate the names (``published_keys``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from revzoo._checks import check_choice, shortened
from revzoo.models.irevnet import FIRST_BLOCK, IREVNETS, OTHER_BLOCKS, IRevNetVariant
from revzoo.models.network import ImageNetwork
from revzoo.models.pretrained import load_weights
from revzoo.models.registry import MODELS, create_model
from revzoo.models.revnet import BOTTLENECK_EXPANSION, RESNETS, REVNETS, Variant
from revzoo.models.weights_file import TensorFile, read_state_dict, read_tensorflow
from revzoo.weights.errors import StateMismatchError, UnreadableWeightsError

Weights = Mapping[str, Tensor]


class ConversionError(ValueError):
    """The file is not a checkpoint of the expected kind, or cannot be read safely."""


def load_published(
    path: str | Path, source: str, *, name: str | None = None, **overrides: Any
) -> ImageNetwork:
    """The model in a checkpoint of another program, in evaluation mode, on the CPU.

    Args:
        path: the checkpoint; for ``"revnet"`` its index, ``model.ckpt-N.index``, with
            ``model.ckpt-N.data-00000-of-00001`` beside it, or a ``.tar.gz`` archive of both.
        source: ``"irevnet"``, ``"memcnn"`` or ``"revnet"``.
        name: the network (see :func:`revzoo.list_models`); None to derive it from the tensors.
        overrides: arguments of :func:`revzoo.create_model` that replace derived ones, such as
            ``memory="exact"``, ``strides=(1, 1, 2)`` or ``convention="memcnn_fix"``.

    Raises:
        OSError: the file cannot be read.
        ConversionError: it is not a checkpoint of ``source``, or holds a network other than
            ``name``.
        NotFiniteError: it has NaN or Inf.
        ValueError: unknown ``source``, ``name`` or override.

    Example:
        ``docs/guide/weights.md`` loads a file of MemCNN. A file of another program raises:

        >>> torch.save({"weight": torch.zeros(3)}, "other.pt")
        >>> revzoo.load_published("other.pt", "memcnn")
        Traceback (most recent call last):
        ...
        revzoo.interop.published.ConversionError: other.pt is not a checkpoint of 'memcnn': ...
    """
    check_choice("source", source, SOURCES)
    read, spec_of = SOURCES[source]
    path = Path(path)
    path.stat()  # a missing file is an OSError, an unreadable one a ConversionError
    try:
        file = read(path)
    except UnreadableWeightsError as error:
        raise ConversionError(str(error)) from None
    try:
        spec = spec_of(file.tensors)
    # what unexpected names or shapes raise
    except (KeyError, IndexError, ValueError, ZeroDivisionError) as error:
        raise ConversionError(
            f"{path} is not a checkpoint of {source!r}: its tensors are "
            f"{shortened(sorted(file.tensors), 3)}"
        ) from error
    if name is not None:
        kept = ("num_classes", "in_chans", "convention")  # whatever the network is
        spec = {"name": name, **{key: spec[key] for key in kept if key in spec}}
    # last, so that the caller decides where shapes do not
    model = create_model(**(spec | overrides)).eval()
    try:
        load_weights(model, file._replace(architecture=None))
    except StateMismatchError as error:
        raise ConversionError(
            f"{error}\nName its network (name=...), or pass the differing options as keywords"
        ) from None
    return model


def _arguments(variant: Any, names: Iterable[str], **arguments: Any) -> dict[str, Any]:
    """Arguments of :func:`revzoo.create_model` for a network like ``variant``."""
    names = list(names)
    name = next((name for name in names if MODELS[name].variant == variant), names[0])
    row = MODELS[name].variant
    # fields without compare, such as an i-RevNet's image_size, do not shape the network
    values = {f.name: getattr(variant, f.name) for f in fields(variant) if f.compare}
    differing = {key: value for key, value in values.items() if value != getattr(row, key)}
    return {"name": name, **arguments, **differing}


def irevnet_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`; assumes images with 3 channels.

    The keys do not mark stages: a block begins a stage if its first convolution reads fewer
    channels than its last one writes (it squeezes), or if the width grows (zeros are appended). If
    the first block appends zeros, shapes do not show a squeeze before it. We assume none, as in the
    release's CIFAR networks, unless the width fits a squeezed image.

    Raises:
        KeyError: a layer's weights are missing.
        ValueError: the shapes do not fit any i-RevNet.
    """

    def kernel(block: int, layer: str) -> tuple[int, ...]:
        place = (OTHER_BLOCKS if block else FIRST_BLOCK)[layer]
        return tuple(weights[f"stack.{block}.bottleneck_block.{place}.weight"].shape)

    units: list[int] = []
    strides: list[int] = []
    channels: list[int] = []
    # at least 1: without any block the lookup below raises the KeyError
    count = max(1, len({key.split(".")[1] for key in weights if key.startswith("stack.")}))
    for block in range(count):
        reads, writes = kernel(block, "conv1")[1], kernel(block, "conv3")[0]
        if block == 0 or reads != writes or writes != channels[-1]:
            units.append(0)
            strides.append(1 if reads == writes else 2)
            channels.append(writes)
        units[-1] += 1
    # the first convolution reads one of the two streams
    squeeze, in_chans = _image(2 * kernel(0, "conv1")[1], strides[0])
    variant = IRevNetVariant(
        units=tuple(units),
        strides=tuple(strides),
        channels=tuple(channels),
        squeeze=squeeze,
        # from the last block, where rounding down matters least
        bottleneck=channels[-1] // kernel(count - 1, "conv1")[0],
    )
    for row in IREVNETS.values():
        # compare widths, not `channels`: a row may derive them from the image (channels=None);
        # the file does not show dropout
        like = replace(variant, dropout=row.dropout, channels=None)
        if like == replace(row, channels=None) and row.widths(in_chans) == variant.widths(in_chans):
            variant = row
            break
    classes = weights["linear.weight"].shape[0]
    return _arguments(variant, IREVNETS, num_classes=classes, in_chans=in_chans)


def _image(width: int, stride: int) -> tuple[int, int]:
    """Squeeze and image channels for a first block that reads ``width`` channels."""
    squeeze = math.isqrt(width // 3)
    if width == 3 * squeeze**2:  # a squeeze by s turns 3 channels into 3 * s**2
        return squeeze, 3
    return (1, 3) if stride == 1 else (1, width)  # a block without stride appended zeros


# convolutions of the branches F, or of the only one: stage, unit, F of a RevNet, number
_MEMCNN = re.compile(r"layer(\d+)\.(\d+)\.(?:revblock\.\w+\.(Fm)|\w+_sub)\.conv(\d)\.weight")
_RELEASE = re.compile(r"unit_(\d+)_(\d+)/(f/)?sub(\d)/conv\d\.weight")


def memcnn_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`.

    Shapes do not show strides. We assume 1 for the first stage and where there is no projection,
    and 2 otherwise, as in MemCNN's CIFAR networks. Normalisation is as in its CIFAR configurations;
    pass ``convention="memcnn_fix"`` for its ``batch_norm_fix=True``.

    Raises:
        KeyError: the stem, the classifier or a stage is missing.
        ValueError: the shapes do not fit any network of MemCNN.
    """
    variant, table, in_chans = _residual_network(weights, _MEMCNN, stem="conv1")
    strides = tuple(
        stride if f"layer{stage}.0.downsample.0.weight" in weights else 1
        for stage, stride in enumerate(variant.strides, 1)
    )
    variant = replace(variant, strides=strides, convention="memcnn")
    names = [name for name in table if name.endswith("_memcnn")]
    classes = weights["fc.weight"].shape[0]
    return _arguments(variant, names, num_classes=classes, in_chans=in_chans)


def release_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`.

    Shapes do not show strides. We assume 1 for the first stage and 2 for the others, as in all
    configurations of the release.

    Raises:
        KeyError: the stem, the classifier or a stage is missing.
        ValueError: the shapes do not fit any network of the release.
    """
    variant, table, in_chans = _residual_network(weights, _RELEASE, stem="init/init_conv")
    classes = weights["logit.weight"].shape[0]
    spec = _arguments(variant, table, num_classes=classes, in_chans=in_chans)
    return spec | {"convention": "gomez_same"}


def _residual_network(
    weights: Weights, pattern: re.Pattern[str], *, stem: str
) -> tuple[Variant, dict[str, Variant], int]:
    """The network by its shapes, with strides 1, 2, 2, ...; its table; the image's channels."""
    convolutions = [(match, t) for key, t in weights.items() if (match := pattern.fullmatch(key))]
    # a basic branch has two convolutions, a bottleneck three
    last = max((match[4] for match, _ in convolutions), default="2")
    expansion = BOTTLENECK_EXPANSION if last == "3" else 1
    units: dict[int, int] = {}
    widths: dict[int, int] = {}
    for match, t in convolutions:
        if match[4] == last:  # it writes the unit's width, or one stream of it
            stage, streams = int(match[1]), 2 if match[3] else 1
            units[stage] = units.get(stage, 0) + 1
            widths[stage] = streams * t.shape[0] // expansion
    stages = range(1, len(units) + 1)
    first = weights[f"{stem}.weight"]
    variant = Variant(
        stem_width=first.shape[0],
        widths=tuple(widths[stage] for stage in stages),
        units=tuple(units[stage] for stage in stages),
        strides=tuple(1 if stage == 1 else 2 for stage in stages),
        branch="bottleneck" if expansion > 1 else "basic",
        downsampling_stem=first.shape[2] == 7,  # 7x7 for ImageNet, 3x3 for CIFAR
    )
    reversible = any(match[3] for match, _ in convolutions)
    return variant, REVNETS if reversible else RESNETS, first.shape[1]


# for each program: how to read a file, and the arguments of create_model for its tensors
SOURCES: Mapping[str, tuple[Callable[[Path], TensorFile], Callable[[Weights], dict[str, Any]]]] = {
    "irevnet": (read_state_dict, irevnet_spec),
    "memcnn": (read_state_dict, memcnn_spec),
    "revnet": (read_tensorflow, release_spec),
}
