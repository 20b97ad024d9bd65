"""Weights for images of other channels or another size, by timm's rules (R. Wightman)."""

import math

from torch import Tensor
from torch.nn import functional


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt a convolution's weights ``(out, C, h, w)`` to ``channels`` input channels.

    For one channel: the sum, which acts like C equal channels. Otherwise: repeat them and scale by
    ``C / channels``, so that the sum over channels stays about the same.
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // old), 1, 1)[:, :channels]  # rounded up, cut off
    return repeated * (old / channels)


def adapt_positions(positions: Tensor, count: int) -> Tensor:
    """Resize embeddings ``(1, N, D)`` of a square of N patches to a square of ``count`` patches.

    Bicubic and antialiased, like timm's ``resample_abs_pos_embed``.
    """
    _, old, width = positions.shape
    # (1, N, D) -> (1, D, side, side), as interpolate expects images; float for half precision
    grid = positions.float().reshape(1, math.isqrt(old), math.isqrt(old), width).permute(0, 3, 1, 2)
    side = math.isqrt(count)
    resized = functional.interpolate(grid, size=(side, side), mode="bicubic", antialias=True)
    return resized.permute(0, 2, 3, 1).reshape(1, count, width).to(positions.dtype)
