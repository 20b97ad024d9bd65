"""Published weights of other programs, as models of the zoo.

=============  ===================================================================================
``irevnet``    the PyTorch release of i-RevNet (arXiv 1802.07088)
``memcnn``     the ResNets and RevNets of MemCNN (van de Leemput et al., JOSS 2019)
``revnet``     the TensorFlow release of RevNet (arXiv 1707.04585): its RevNets and ResNets
=============  ===================================================================================

The architecture follows from the shapes of the tensors. Shapes do not show the strides of MemCNN's
stages, an i-RevNet's squeeze before zero padding, or dropout; the defaults are the published
networks', and keywords change them. :mod:`revzoo.models.weights_file` reads files of torch,
:mod:`revzoo.interop.tensor_bundle` those of TensorFlow; neither runs code in them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo._checks import check_choice, shortened
from revzoo.interop.tensor_bundle import read_tensor_bundle
from revzoo.models.components import Branch
from revzoo.models.irevnet import IREVNETS, IRevNetVariant
from revzoo.models.network import ImageNetwork
from revzoo.models.pretrained import load_weights
from revzoo.models.registry import MODELS, create_model
from revzoo.models.revnet import BOTTLENECK_EXPANSION, RESNETS, REVNETS, Variant
from revzoo.models.weights_file import TensorFile, read_state_dict
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
            ``model.ckpt-N.data-00000-of-00001`` beside it.
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
    read, spec_of, keys_of = SOURCES[source]
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
    modules = dict(keys_of(model))
    renamed = {}
    for key, value in file.tensors.items():
        module, _, leaf = key.rpartition(".")
        # the suffix keeps an unknown key from passing as one of revzoo's names
        known = f"{modules[module]}.{leaf}" if module in modules else f"{key} (as in the file)"
        renamed[known] = value
    try:
        load_weights(model, file._replace(tensors=renamed, architecture=None))
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


# i-RevNet: stack.i.bottleneck_block.j is layer j of block i; the head is bn1 and linear. The keys
# do not mark stages: a block begins a stage if its first convolution reads fewer channels than its
# last one writes (it squeezes), or if the width grows (zeros are appended).
#
# Index of each layer in a block's Sequential; the gaps are ReLUs and dropout, without tensors.
# The very first block has no leading BN-ReLU.
FIRST_BLOCK = {"conv1": 0, "norm2": 1, "conv2": 3, "norm3": 5, "conv3": 7}
OTHER_BLOCKS = {"norm1": 0, "conv1": 2, "norm2": 3, "conv2": 5, "norm3": 7, "conv3": 9}


def irevnet_keys(model: ImageNetwork) -> Iterator[tuple[str, str]]:
    """The release's name and ours of each module that holds tensors."""
    branches = (name for name, m in model.named_modules() if isinstance(m, Branch))
    for block, branch in enumerate(branches):
        for layer, place in (OTHER_BLOCKS if block else FIRST_BLOCK).items():
            yield f"stack.{block}.bottleneck_block.{place}", f"{branch}.{layer}"
    yield from (("bn1", "norm"), ("linear", "fc"))


def irevnet_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`; assumes images with 3 channels.

    If the first block appends zeros, shapes do not show a squeeze before it. We assume none, as in
    the release's CIFAR networks, unless the width fits a squeezed image.

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


# MemCNN:
# layerN.i.revblock._fn.{Fm,Gm}.{bn,conv}K          a reversible unit; before 1.0 revblock.rev_block
# layerN.i.{basicblock,bottleneck}_sub.{bn,conv}K   other units; downsample.{0,1}: projection
# conv1, bn1, bn_final, fc                          stem and head
_OURS = re.compile(r"stages\.(\d+)\.steps\.(\d+)\.(?:steps\.(\d)\.)?(branch|shortcut)\.(\w+)")
_THEIRS = re.compile(r"layer(\d+)\.(\d+)\.(?:revblock\.\w+\.)?([A-Za-z_]+)\.conv(\d)\.weight")


def memcnn_keys(model: ImageNetwork) -> Iterator[tuple[str, str]]:
    """MemCNN's names and ours of each module that holds tensors."""
    ends = {"conv1": "stem.steps.0.conv", "bn1": "stem.steps.0.norm", "bn_final": "norm"}
    yield from (*ends.items(), ("fc", "fc"))
    for path, _ in model.named_modules():
        if (match := _OURS.fullmatch(path)) is None:
            continue
        stage, unit, side, kind, layer = match.groups()
        start = f"layer{int(stage) + 1}.{unit}"
        theirs = layer.replace("norm", "bn")
        if kind == "shortcut":
            yield f"{start}.downsample.{layer}", path
        elif side is None:
            for block in ("basicblock_sub", "bottleneck_sub"):
                yield f"{start}.{block}.{theirs}", path
        else:
            # MemCNN 1.0 renamed rev_block to _fn: both names lead to our layer
            for wrapper in ("_fn", "rev_block"):
                yield f"{start}.revblock.{wrapper}.{'FG'[int(side)]}m.{theirs}", path


def memcnn_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`.

    Shapes do not show strides. We assume 1 for the first stage and where there is no projection,
    and 2 otherwise, as in MemCNN's CIFAR networks. Normalisation is as in its CIFAR configurations;
    pass ``convention="memcnn_fix"`` for its ``batch_norm_fix=True``.

    Raises:
        KeyError: the stem, the classifier or a stage is missing.
        ValueError: the shapes do not fit any network of MemCNN.
    """
    units: dict[int, set[int]] = {}
    widths: dict[int, int] = {}
    convolutions = [(match, key) for key in weights if (match := _THEIRS.fullmatch(key))]
    # a basic branch has two convolutions, a bottleneck three
    last = max((int(match[4]) for match, _ in convolutions), default=2)
    expansion = BOTTLENECK_EXPANSION if last == 3 else 1
    for match, key in convolutions:
        stage, unit = int(match[1]), int(match[2])
        units.setdefault(stage, set()).add(unit)
        if int(match[4]) == last:  # it writes the unit's width, or one stream of it
            streams = 2 if match[3] in ("Fm", "Gm") else 1
            widths[stage] = streams * weights[key].shape[0] // expansion
    stages = range(1, len(units) + 1)
    stem = weights["conv1.weight"]
    variant = Variant(
        stem_width=stem.shape[0],
        widths=tuple(widths[stage] for stage in stages),
        units=tuple(len(units[stage]) for stage in stages),
        strides=tuple(
            2 if stage > 1 and f"layer{stage}.0.downsample.0.weight" in weights else 1
            for stage in stages
        ),
        branch="bottleneck" if expansion > 1 else "basic",
        downsampling_stem=stem.shape[2] == 7,  # 7x7 for ImageNet, 3x3 for CIFAR
        convention="memcnn",
    )
    table = REVNETS if any(".revblock." in key for key in weights) else RESNETS
    names = [name for name in table if name.endswith("_memcnn")]
    classes = weights["fc.weight"].shape[0]
    return _arguments(variant, names, num_classes=classes, in_chans=stem.shape[1])


# The TensorFlow release of RevNet, below the scope "Model":
# unit_S_U/{f,g}/subK/{bn,conv}K          unit U of stage S, from 1 and 0; a ResNet has no f and g
# unit_S_U/{x1,x2}_bottleneck/project     shortcuts of a bottleneck; unit_S_U/project in a ResNet
# init/{init_conv,init_bn}, unit_last/final_bn, logit
_LEAVES = {
    "w": "weight",
    "b": "bias",
    "gamma": "weight",
    "beta": "bias",
    "ema_mean": "running_mean",
    "ema_var": "running_var",
}
# our place of a branch or shortcut, and its scope
_SCOPES = {
    "steps.0.branch": "f/",
    "steps.1.branch": "g/",
    "f": "f/",
    "g": "g/",
    "branch": "",
    "shortcut": "",
    "shortcut1": "x1_bottleneck/",
    "shortcut2": "x2_bottleneck/",
}
_UNITS = re.compile(rf"stages\.(\d+)\.steps\.(\d+)\.({'|'.join(_SCOPES)})(?:\.(norm|conv)(\d))?")
_UNIT = re.compile(r"unit_(\d+)_(\d+)/(f/)?sub(\d)/conv\d\.weight")
_STATE = ("Momentum", "global_step", "learn_rate")  # of the training


def read_release(path: Path) -> TensorFile:
    """The network's variables in torch's layout, ``SCOPES/LAYER.weight`` and others by name.

    Raises:
        OSError: a file cannot be opened.
        UnreadableWeightsError: see :func:`~revzoo.interop.tensor_bundle.read_tensor_bundle`.
    """
    tensors = {}
    for name, array in read_tensor_bundle(path).items():
        module, _, leaf = name.removeprefix("Model/").rpartition("/")
        if leaf in _STATE:
            continue
        tensor = torch.from_numpy(array)
        if tensor.dim() == 4:  # kernels: height, width, in, out
            tensor = tensor.permute(3, 2, 0, 1)
        elif tensor.dim() == 2:  # the classifier: in, out
            tensor = tensor.T
        tensors[f"{module}.{_LEAVES.get(leaf, leaf)}"] = tensor.contiguous()
    return TensorFile(tensors, str(path))


def release_keys(model: ImageNetwork) -> Iterator[tuple[str, str]]:
    """The release's names and ours of each module that holds tensors."""
    ends = {"init/init_conv": "stem.steps.0.conv", "init/init_bn": "stem.steps.0.norm"}
    yield from (*ends.items(), ("unit_last/final_bn", "norm"), ("logit", "fc"))
    for path, _ in model.named_modules():
        if (match := _UNITS.fullmatch(path)) is None:
            continue
        stage, unit, place, layer, number = match.groups()
        start = f"unit_{int(stage) + 1}_{unit}"
        if place.startswith("shortcut"):
            yield f"{start}/{_SCOPES[place]}project", path
        elif layer:
            kind = layer.replace("norm", "bn")
            yield f"{start}/{_SCOPES[place]}sub{number}/{kind}{number}", path


def release_spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`.

    Shapes do not show strides. We assume 1 for the first stage and 2 for the others, as in all
    configurations of the release.

    Raises:
        KeyError: the stem, the classifier or a stage is missing.
        ValueError: the shapes do not fit any network of the release.
    """
    convolutions = [(match, key) for key in weights if (match := _UNIT.match(key))]
    last = max((match[4] for match, _ in convolutions), default="2")  # of a branch
    units: dict[int, int] = {}
    widths: dict[int, int] = {}
    streams, expansion = 1, BOTTLENECK_EXPANSION if last == "3" else 1
    for match, key in convolutions:
        if match[4] == last:
            stage, streams = int(match[1]), 2 if match[3] else 1
            units[stage] = units.get(stage, 0) + 1
            widths[stage] = streams * weights[key].shape[0] // expansion
    stages = range(1, len(units) + 1)
    stem = weights["init/init_conv.weight"]
    variant = Variant(
        stem_width=stem.shape[0],
        widths=tuple(widths[stage] for stage in stages),
        units=tuple(units[stage] for stage in stages),
        strides=tuple(1 if stage == 1 else 2 for stage in stages),
        branch="bottleneck" if expansion > 1 else "basic",
        downsampling_stem=stem.shape[2] == 7,
    )
    table = REVNETS if streams == 2 else RESNETS
    classes = weights["logit.weight"].shape[0]
    spec = _arguments(variant, table, num_classes=classes, in_chans=stem.shape[1])
    return spec | {"convention": "gomez_same"}


# for each program: how to read a file, the arguments of create_model for its tensors, and pairs
# (their name, our name) of the modules that hold tensors
SOURCES: Mapping[
    str,
    tuple[
        Callable[[Path], TensorFile],
        Callable[[Weights], dict[str, Any]],
        Callable[[ImageNetwork], Iterator[tuple[str, str]]],
    ],
] = {
    "irevnet": (read_state_dict, irevnet_spec, irevnet_keys),
    "memcnn": (read_state_dict, memcnn_spec, memcnn_keys),
    "revnet": (read_release, release_spec, release_keys),
}
