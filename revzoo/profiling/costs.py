"""The training step to count and time, and its floating-point operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from revzoo.core.evaluation import evaluation_mode


def default_loss(outputs: Any) -> Tensor:
    """Cross-entropy of logits ``(B, classes)``; the sum of any other output.

    Raises:
        ValueError: no output requires gradient.
    """
    trained = [t for t in tree_iter(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not trained:
        kind = "tensor" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the model returned a {kind}, in which nothing requires gradient: expected a tensor, "
            "or a tuple, list or dictionary of tensors, that depends on parameters; look for "
            "detach() and torch.no_grad() in its forward pass"
        )
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and not outputs.is_complex():
        labels = torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        return nn.functional.cross_entropy(outputs, labels)
    # a loss is real
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in trained]
    return torch.stack([t.sum() for t in parts]).sum()


def training_step(model: nn.Module, images: Tensor) -> None:
    """One forward and backward pass."""
    torch.autograd.backward(default_loss(model(images)))


def forward_flops(model: nn.Module, images: Tensor) -> int:
    """Floating-point operations of a forward pass in evaluation mode, per image.

    Counted by torch: matrix products and convolutions, with two operations per multiply-add.
    """
    with evaluation_mode(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops() // len(images)
