"""Pixels to normalised floats.

We measure mean and standard deviation on the training images (including the validation split, never
the test split), exactly, from a histogram of the 2**8 or 2**16 values, in units of the stored ones.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_CHUNK = 4096  # images per histogram update; bounds the copy that selecting one channel makes


class Normalisation:
    """``(x - mean) / std`` per channel.

    Args:
        mean: one value per channel, in units of the stored pixels.
        std: as ``mean``; all positive.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean = torch.tensor(mean, dtype=torch.float32).view(-1, 1, 1)
        self.std = torch.tensor(std, dtype=torch.float32).view(-1, 1, 1)

    @classmethod
    def measure(cls, images: Tensor) -> "Normalisation":
        """Mean and standard deviation of each channel of (N, C, *sizes), 8 or 16 bits."""
        levels = 2 ** (8 * images.dtype.itemsize)
        values = torch.arange(levels, dtype=torch.float64)
        counts = torch.zeros(images.shape[1], levels, dtype=torch.float64)
        for chunk in torch.split(images, _CHUNK):
            chunk = chunk.int() if images.dtype == torch.uint16 else chunk  # bincount has no uint16
            for channel, count in enumerate(counts):
                count += torch.bincount(chunk[:, channel].flatten(), minlength=levels)
        share = counts / counts.sum(dim=1, keepdim=True)
        mean = share @ values
        # E[x^2] - E[x]^2 in float64; rounding can make it slightly negative
        std = (share @ values.square() - mean.square()).clamp_min(0).sqrt()
        # a constant channel becomes zero instead of a division by zero
        std = torch.where(std > 1e-6, std, 1.0)
        return cls(mean.tolist(), std.tolist())

    def __call__(self, images: Tensor) -> Tensor:
        """Map images (B, C, *sizes) of any dtype to normalised float32 on the same device."""
        if self.mean.device != images.device:  # once per run: no copy to the device in each step
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        # a copy, also of float32 images: the caller's images must not change
        mean, std = (_along(images, t) for t in (self.mean, self.std))
        return images.to(torch.float32, copy=True).sub_(mean).div_(std)

    def inverse(self, images: Tensor) -> Tensor:
        """Normalised images (B, C, *sizes) back to units of the stored pixels, float32."""
        mean, std = (_along(images, t.to(images.device)) for t in (self.mean, self.std))
        return images.float() * std + mean

    def state_dict(self) -> dict[str, list[float]]:
        """Plain lists, so that a checkpoint loads with ``weights_only=True``."""
        return {"mean": self.mean.flatten().tolist(), "std": self.std.flatten().tolist()}


def _along(images: Tensor, values: Tensor) -> Tensor:
    """A value for each channel, in the shape that broadcasts over images (B, C, *sizes)."""
    return values.view(-1, *[1] * (images.dim() - 2))
