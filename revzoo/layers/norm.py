"""Batch normalisation with the constants of the RevNet release.

``torch.nn.BatchNorm2d`` already is the layer; its defaults (momentum 0.1, eps 1e-5) are not the
ones the published RevNets were trained with, and the two frameworks call opposite things
"momentum". The constants therefore live here once, with their conversion.

Source: A. Gomez, M. Ren, R. Urtasun, R. Grosse, "The Reversible Residual Network: Backpropagation
Without Storing Activations", NeurIPS 2017, arXiv 1707.04585, and its TensorFlow release.
"""

from torch import nn

# TensorFlow: running = decay * running + (1 - decay) * batch with decay 0.99;
# torch: running = (1 - momentum) * running + momentum * batch. So momentum = 1 - decay.
MOMENTUM = 0.01
# Default epsilon of the TensorFlow layer the release uses (tf.contrib.layers.batch_norm).
EPSILON = 1e-3


def batch_norm(channels: int) -> nn.BatchNorm2d:
    """``BatchNorm2d`` over ``(B, channels, H, W)`` with the release's momentum and epsilon."""
    return nn.BatchNorm2d(channels, eps=EPSILON, momentum=MOMENTUM)
