"""Normalisation and activation between the convolutions of a network.

The layer is ``torch.nn.BatchNorm2d``. But the published RevNets were not trained with its defaults
(momentum 0.1, eps 1e-5), and TensorFlow's decay is one minus torch's momentum. This is the one
place for the constants and their conversion.

Source: A. Gomez, M. Ren, R. Urtasun, R. Grosse, "The Reversible Residual Network: Backpropagation
Without Storing Activations", NeurIPS 2017, arXiv 1707.04585, and its TensorFlow release.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from revzoo._checks import check_choice

# TensorFlow: running = decay * running + (1 - decay) * batch with decay 0.99;
# torch: running = (1 - momentum) * running + momentum * batch. So momentum = 1 - decay.
MOMENTUM = 0.01
# Default epsilon of the TensorFlow layer the release uses (tf.contrib.layers.batch_norm).
EPSILON = 1e-3

# Channels per group. Wu and He 2018 (arXiv 1803.08494) report about the same accuracy for 16
# channels per group as for 32 groups, which would be single channels in a CIFAR network.
GROUP_SIZE = 16

NormKind = Literal["batch", "group", "none"]
NORMS: tuple[NormKind, ...] = get_args(NormKind)
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
}


@dataclass(frozen=True, slots=True)
class NormAct:
    """The normalisation and activation of a network; makes the layers.

    Attributes:
        norm: ``"batch"``, ``"group"`` (groups of 16 channels, or of the largest power of two that
            divides them) or ``"none"``.
        activation: a name in :data:`ACTIVATIONS`.
        momentum: of batch normalisation, in torch's convention.
        epsilon: added to the variance.

    Raises:
        ValueError: unknown normalisation or activation.
    """

    norm: NormKind = "batch"
    activation: str = "relu"
    momentum: float = MOMENTUM
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, NORMS)
        check_choice("activation", self.activation, ACTIVATIONS)

    def normalise(self, channels: int) -> nn.Module:
        """Normalisation of ``(B, channels, H, W)``."""
        if self.norm == "batch":
            return nn.BatchNorm2d(channels, eps=self.epsilon, momentum=self.momentum)
        if self.norm == "group":
            return nn.GroupNorm(channels // math.gcd(channels, GROUP_SIZE), channels, self.epsilon)
        return nn.Identity()

    def activate(self) -> nn.Module:
        """The activation, out of place: its input may be a stream."""
        return ACTIVATIONS[self.activation]()


RELEASE = NormAct()
"""Batch normalisation and ReLU with the constants of the RevNet release."""
