"""The evaluation transforms of weights, built from torchvision's.

Why not torchvision's presets (``torchvision.transforms._presets``): they are private and only for
RGB images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchvision.transforms import v2


def eval_transforms(
    *,
    input_size: Sequence[int],
    mean: Sequence[float],
    std: Sequence[float],
    crop_pct: float | None,
) -> v2.Compose:
    """From a Pillow image, or a tensor (..., C, H, W) of bytes or floats in [0, 1], to float32.

    Converts the image to the channels of ``input_size``, resizes its shorter side, crops the centre
    and normalises each channel. Works on batches, too.

    Args:
        input_size: channels, height and width of the result; height and width are equal.
        mean: per channel, of pixels in [0, 1].
        std: as ``mean``.
        crop_pct: the share of the shorter side that is kept; None for 1.
    """
    channels, side = input_size[0], input_size[-1]
    conversion = {1: v2.Grayscale(), 3: v2.RGB()}  # other channels come as tensors
    shorter = round(side / (crop_pct or 1.0))
    return v2.Compose(
        [
            conversion.get(channels, v2.Identity()),
            # resized before the conversion to floats, so Pillow images use Pillow's filter, as in
            # training
            v2.Resize(shorter, antialias=True),
            v2.CenterCrop(side),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),  # bytes to [0, 1]; floats stay as they are
            v2.Normalize(list(mean), list(std)),
            v2.ToPureTensor(),
        ]
    )
