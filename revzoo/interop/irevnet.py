"""State dicts of the PyTorch release of i-RevNet (arXiv 1802.07088).

``stack.i.bottleneck_block.j`` is layer j of block i; the head is ``bn1`` and ``linear``. The keys
do not mark stages: a block begins a stage if its first convolution reads fewer channels than its
last one writes (it squeezes), or if the width grows (zeros are appended).
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from revzoo.interop.foreign import Weights
from revzoo.models.components import TripleBranch
from revzoo.models.irevnet import IREVNETS, IRevNetVariant
from revzoo.models.network import ImageNetwork
from revzoo.models.registry import arguments_of

# Index of each layer in a block's Sequential; the gaps are ReLUs and dropout, without tensors.
# The very first block has no leading BN-ReLU.
FIRST_BLOCK = {"conv1": 0, "norm2": 1, "conv2": 3, "norm3": 5, "conv3": 7}
OTHER_BLOCKS = {"norm1": 0, "conv1": 2, "norm2": 3, "conv2": 5, "norm3": 7, "conv3": 9}


def keys(model: ImageNetwork) -> Iterator[tuple[str, str]]:
    """The release's name and ours of each module that holds tensors."""
    branches = (name for name, m in model.named_modules() if isinstance(m, TripleBranch))
    for block, branch in enumerate(branches):
        for layer, place in _places(block).items():
            yield f"stack.{block}.bottleneck_block.{place}", f"{branch}.{layer}"
    yield from (("bn1", "norm"), ("linear", "fc"))


def spec(weights: Weights) -> dict[str, Any]:
    """The arguments of :func:`revzoo.create_model`; assumes images with 3 channels.

    If the first block appends zeros, shapes do not show a squeeze before it. We assume none, as in
    the release's CIFAR networks, unless the width fits a squeezed image.

    Raises:
        KeyError: a layer's weights are missing.
        ValueError: the shapes do not fit any i-RevNet.
    """
    units: list[int] = []
    strides: list[int] = []
    channels: list[int] = []
    # at least 1: without any block the lookup below raises the KeyError
    count = max(1, len({key.split(".")[1] for key in weights if key.startswith("stack.")}))
    for block in range(count):
        reads, writes = _kernel(weights, block, "conv1")[1], _kernel(weights, block, "conv3")[0]
        if block == 0 or reads != writes or writes != channels[-1]:
            units.append(0)
            strides.append(1 if reads == writes else 2)
            channels.append(writes)
        units[-1] += 1
    # the first convolution reads one of the two streams
    squeeze, in_chans = _image(2 * _kernel(weights, 0, "conv1")[1], strides[0])
    variant = IRevNetVariant(
        units=tuple(units),
        strides=tuple(strides),
        channels=tuple(channels),
        squeeze=squeeze,
        # from the last block, where rounding down matters least
        bottleneck=channels[-1] // _kernel(weights, count - 1, "conv1")[0],
    )
    options = {"num_classes": weights["linear.weight"].shape[0], "in_chans": in_chans}
    for row in IREVNETS.values():
        # compare widths, not `channels`: a row may derive them from the image (channels=None);
        # the file does not show dropout
        like = replace(variant, dropout=row.dropout, channels=None)
        if like == replace(row, channels=None) and row.widths(in_chans) == variant.widths(in_chans):
            return arguments_of(row, IREVNETS, **options)
    return arguments_of(variant, IREVNETS, **options)


def _image(width: int, stride: int) -> tuple[int, int]:
    """Squeeze and image channels for a first block that reads ``width`` channels."""
    squeeze = math.isqrt(width // 3)
    if width == 3 * squeeze**2:  # a squeeze by s turns 3 channels into 3 * s**2
        return squeeze, 3
    return (1, 3) if stride == 1 else (1, width)  # a block without stride appended zeros


def _places(block: int) -> dict[str, int]:
    return OTHER_BLOCKS if block else FIRST_BLOCK


def _kernel(weights: Weights, block: int, layer: str) -> tuple[int, ...]:
    place = _places(block)[layer]
    return tuple(weights[f"stack.{block}.bottleneck_block.{place}.weight"].shape)
