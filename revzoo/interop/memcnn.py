"""State dicts of MemCNN's ResNets and RevNets (van de Leemput et al., JOSS 2019).

layerN.i.revblock._fn.{Fm,Gm}.{bn,conv}K          a reversible unit; before 1.0 revblock.rev_block
layerN.i.{basicblock,bottleneck}_sub.{bn,conv}K   other units; downsample.{0,1}: projection
conv1, bn1, bn_final, fc                          stem and head
"""

import re
from collections.abc import Iterator
from typing import Any

from revzoo.interop.foreign import Weights
from revzoo.models.components import BOTTLENECK_EXPANSION
from revzoo.models.network import ImageNetwork
from revzoo.models.registry import arguments_of
from revzoo.models.revnet import RESNETS, REVNETS, Variant

_OURS = re.compile(r"stages\.(\d+)\.steps\.(\d+)\.(?:steps\.(\d)\.)?(branch|shortcut)\.(\w+)")
_THEIRS = re.compile(r"layer(\d+)\.(\d+)\.(?:revblock\.\w+\.)?([A-Za-z_]+)\.conv(\d)\.weight")


def keys(model: ImageNetwork) -> Iterator[tuple[str, str]]:
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


def spec(weights: Weights) -> dict[str, Any]:
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
    return arguments_of(variant, names, num_classes=classes, in_chans=stem.shape[1])
