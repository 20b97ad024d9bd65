"""Mixing images of a batch, and their labels in the same shares: Mixup and CutMix.

Mixup adds two images (Zhang et al. 2018, arXiv 1710.09412), CutMix puts a box of one into the other
(Yun et al. 2019, arXiv 1905.04899). ``torchvision.transforms.v2`` does both, with one share per
batch; where both are wanted, each batch draws one of them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.transforms import v2


def mix(
    images: Tensor, labels: Tensor, *, num_classes: int, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """The batch as it is if both are 0, else mixed.

    Args:
        images: float (B, C, S, S).
        labels: int64 (B,).
        num_classes: number of classes.
        mixup: alpha of the Beta distribution that Mixup draws the share from; 0 for no Mixup.
        cutmix: the same of CutMix.

    Returns:
        Images of the same shape, and labels as shares of the classes: (B, num_classes), of the
        images' dtype.
    """
    chosen = [
        kind(alpha=alpha, num_classes=num_classes)
        for kind, alpha in ((v2.MixUp, mixup), (v2.CutMix, cutmix))
        if alpha
    ]
    if not chosen:
        return images, labels
    kind = chosen[int(torch.randint(len(chosen), ()))]
    images, labels = kind(images, labels)
    return images, labels.to(images.dtype)
