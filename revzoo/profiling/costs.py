"""Floating-point operations and bytes of activations per image."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from revzoo.profiling.live import LiveMemory


def forward_flops(model: nn.Module, images: Tensor) -> int:
    """Floating-point operations of a forward pass in evaluation mode, per image.

    Counted by torch: matrix products and convolutions, with two operations per multiply-add.
    """
    training = model.training
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.eval()(images)
    model.train(training)
    return counter.get_total_flops() // len(images)


def activation_bytes(model: nn.Module, images: Tensor) -> int:
    """Peak bytes of all tensors alive during a training step, per image.

    Counted, not sampled (see :mod:`revzoo.profiling.live`), so equal on every machine. Without
    weights and gradients.

    Args:
        model: maps images (B, C, H, W) to logits (B, classes), in its memory mode.
        images: a batch; in small batches, bytes that do not grow with the batch distort the result.
    """
    labels = torch.zeros(len(images), dtype=torch.long)

    def step() -> None:
        torch.autograd.backward(nn.functional.cross_entropy(model(images), labels))

    step()  # allocates the gradients
    with LiveMemory() as memory:
        step()
    return memory.peak // len(images)
