"""Weights of classes in the training loss, for sets whose classes have unequal numbers of images.

The loss of an image is multiplied by the weight of its class. ``balanced`` computes the weights
from the n training images of C classes as scikit-learn's ``class_weight="balanced"`` does
(G. King and L. Zeng, "Logistic Regression in Rare Events Data", Political Analysis 2001):

    w_c = n / (C n_c)

The sum over a batch is divided by the number of its images. Torch's ``cross_entropy(weight=...)``
divides by the sum of their weights if labels are indices: the gradient of an image would depend on
the others in its batch, and the mean over batches would not be the mean over all images.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from revzoo._checks import shortened
from revzoo.data import DataError
from revzoo.training.optim.optimizers import BALANCED


def balanced_weights(labels: Tensor, classes: Sequence[str]) -> Tensor:
    """The weights (C,) in float64 for training images with ``labels`` (n,)."""
    counts = torch.bincount(labels, minlength=len(classes)).double()
    if empty := [name for name, n in zip(classes, counts.tolist(), strict=True) if not n]:
        raise DataError(
            f"optim.class_weights={BALANCED} divides by the number of images of each class, but "
            f"there are no training images of {shortened(empty)}: add some, or give a list of "
            "numbers, one for each class"
        )
    return counts.sum() / (len(classes) * counts)
