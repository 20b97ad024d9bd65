"""Test-time augmentation: the mean over an image and its mirror image.

The usual one of image classification (A. Krizhevsky et al. 2012, averaged over mirrored crops).
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

CHOICES = ("flip",)


def flipped_mean(
    network: Callable[[Tensor], Tensor], images: Tensor, task: str | None = None
) -> Tensor:
    """Logits of the mean probabilities of images and of their mirror images.

    Args:
        network: gives logits (B, K), or maps of logits (B, K, *sizes), which are mirrored back.
        images: (B, C, *sizes), mirrored along the last axis.
        task: of several labels, each has its own probability; values of a regression have none,
            and the result is their mean.
    """
    plain, mirrored = network(images), network(images.flip(-1))
    if mirrored.dim() > 2:
        mirrored = mirrored.flip(-1)
    if task == "regression":
        return (plain + mirrored) / 2
    if task == "multilabel":
        return (plain.sigmoid() + mirrored.sigmoid()).div(2).logit(torch.finfo(plain.dtype).eps)
    return torch.logaddexp(plain.log_softmax(1), mirrored.log_softmax(1)) - math.log(2)
