"""Muon: momentum whose update is made orthogonal, for the weights of hidden layers.

A weight of shape (out, in, ...) is seen as the matrix (out, rest). Its momentum ``B = U S V^T`` is
replaced by ``U V^T``, so that all directions of the layer learn at one speed; a few Newton-Schulz
steps do that with matrix products alone. Norms and biases are no matrices, and a
classifier's rows are classes: SGD with Nesterov momentum trains
these parameters in the same optimiser.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon. ``torch.optim.Muon`` takes matrices only, hence neither
convolutions nor the rest of a network.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from revzoo.training.optim.optimizers import OptimSpec

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the cited source
STEPS = 5


class Muon(Optimizer):
    """Muon on the parameter groups with ``orthogonal=True``, Nesterov SGD on the others.

    Args:
        groups: each ``{"params", "lr", "momentum", "weight_decay", "orthogonal"}``. The weight
            decay is decoupled: weights shrink by ``lr * weight_decay`` a step.

    Raises:
        ValueError: a parameter of an orthogonal group is no matrix.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"momentum": 0.9, "weight_decay": 0.0, "orthogonal": False})
        for group in self.param_groups:
            for p in group["params"]:
                if group["orthogonal"] and p.ndim < 2:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} cannot be made orthogonal: "
                        "expected a weight of two or more dimensions; put it into another group"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure``, if given, returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            rate = group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    update = self._momentum(p, group["momentum"])
                    update = _orthogonal(update) if group["orthogonal"] else update
                    p.mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate)
        return loss

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].mul_(momentum).add_(p.grad)
        return p.grad.add(buffer, alpha=momentum)


def muon_groups(
    weights: list[nn.Parameter], others: list[nn.Parameter], spec: OptimSpec
) -> list[dict[str, Any]]:
    """Hidden weights to be made orthogonal at ``spec.lr``; the rest at ``spec.sgd_lr``."""
    hidden, classifier = weights[:-1], weights[-1:]  # the head is the last part of a network
    orthogonal = {"orthogonal": True, "weight_decay": spec.weight_decay}
    return [
        {"params": hidden, "lr": spec.lr, "momentum": spec.momentum, **orthogonal},
        {"params": [*others, *classifier], "lr": spec.sgd_lr, "momentum": spec.momentum},
    ]


def _orthogonal(update: Tensor) -> Tensor:
    """``update`` as a matrix with all singular values near 1, times ``sqrt(out / in)`` if above 1.

    The factor keeps the change of a layer's output the same for wide and narrow inputs.
    """
    matrix = update.flatten(1)
    rows, columns = matrix.shape
    x = newton_schulz(matrix.T if rows > columns else matrix)
    x = x.T if rows > columns else x
    return (x * math.sqrt(max(1.0, rows / columns))).reshape(update.shape).to(update.dtype)


def newton_schulz(matrix: Tensor) -> Tensor:
    """``U V^T`` of a wide matrix ``U S V^T``, roughly: singular values end between 0.7 and 1.2.

    Computed in bfloat16, which the iteration tolerates; a zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
