"""The evaluation transforms of weights, built from torchvision's.

torchvision's ``Resize`` takes the length of the shorter side, which is enough for a square crop.
For others, :func:`covering` finds the side that decides.

Why not torchvision's presets (``torchvision.transforms._presets``): they are private and only for
RGB images.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as v2f

_Pixels = TypeVar("_Pixels")


def covering(image: _Pixels, sizes: Sequence[int], crop_pct: float = 1.0) -> _Pixels:
    """Resize an image with its aspect, so that it just covers ``sizes / crop_pct`` pixels.

    ``crop_pct`` is timm's name (R. Wightman) for the share that the crop keeps.
    """
    height, width = (int(size / crop_pct) for size in sizes)  # rounded down, as timm does
    own_height, own_width = v2f.get_size(image)
    if height * own_width >= width * own_height:
        width = int(height * own_width / own_height)
    else:
        height = int(width * own_height / own_width)
    resized: _Pixels = v2f.resize(image, [height, width], antialias=True)
    return resized


def cropped(image: _Pixels, sizes: Sequence[int], crop_pct: float = 1.0) -> _Pixels:
    """The centre, of ``sizes`` pixels, of :func:`covering`."""
    centre: _Pixels = v2f.center_crop(covering(image, sizes, crop_pct), [*sizes])
    return centre


def eval_transforms(
    *,
    input_size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float | None,
) -> v2.Compose:
    """From a Pillow image, or a tensor (..., C, H, W) of bytes or floats in [0, 1], to float32.

    Converts the image to the channels of ``input_size``, resizes it, crops the centre and
    normalises each channel. Works on batches, too.

    Args:
        input_size: channels, height and width of the result.
        mean: per channel, of pixels in [0, 1].
        std: as ``mean``.
        crop_pct: the share of the resized image's side that is kept; None for 1.
    """
    channels, *sizes = input_size
    conversion = {1: v2.Grayscale(), 3: v2.RGB()}  # other channels come as tensors
    return v2.Compose(
        [
            conversion.get(channels, v2.Identity()),
            # resized before the conversion to floats, so Pillow images use Pillow's filter, as in
            # training
            v2.Lambda(partial(cropped, sizes=sizes, crop_pct=crop_pct or 1.0)),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),  # bytes to [0, 1]; floats stay as they are
            v2.Normalize(list(mean), list(std)),
            v2.ToPureTensor(),
        ]
    )
