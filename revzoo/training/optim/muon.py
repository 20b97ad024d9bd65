"""Muon: orthogonalised momentum for the weights of hidden layers.

A weight of shape (out, in, ...) counts as the matrix (out, rest). Muon replaces its momentum
``B = U S V^T`` by ``U V^T``, so all directions of a layer learn at the same speed. A few
Newton-Schulz steps compute this with matrix products only. In the same optimiser, SGD with
Nesterov momentum trains the other parameters: norms and biases, which are not matrices, and the
classifier, whose rows are classes.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon. Why not ``torch.optim.Muon``: it takes matrices only, so
no convolutions and no other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the cited source
STEPS = 5


class Muon(Optimizer):
    """Muon for the parameter groups with ``orthogonal=True``, Nesterov SGD for the others.

    Args:
        groups: each ``{"params", "lr", "momentum", "weight_decay", "orthogonal"}``. Weight decay
            is decoupled: weights shrink by ``lr * weight_decay`` per step.

    Raises:
        ValueError: a parameter of an orthogonal group has fewer than two dimensions.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"momentum": 0.9, "weight_decay": 0.0, "orthogonal": False})
        for group in self.param_groups:
            for p in group["params"]:
                if group["orthogonal"] and p.ndim < 2:
                    raise ValueError(
                        f"a parameter of shape {tuple(p.shape)} cannot be orthogonalised: expected "
                        "a weight of two or more dimensions; put it into another group"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; return the loss of ``closure``, or None without one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            # read at every step: the scheduler changes it
            rate = group["lr"]
            for p in group["params"]:
                if p.grad is not None:
                    # Nesterov: the gradient plus the momentum that the next step will apply
                    update = self._momentum(p, group["momentum"])
                    update = _orthogonal(update) if group["orthogonal"] else update
                    # decoupled weight decay, as in AdamW
                    p.mul_(1 - rate * group["weight_decay"]).sub_(update, alpha=rate)
        return loss

    def _momentum(self, p: Tensor, momentum: float) -> Tensor:
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        buffer = state["momentum_buffer"].mul_(momentum).add_(p.grad)
        return p.grad.add(buffer, alpha=momentum)


def _orthogonal(update: Tensor) -> Tensor:
    """Orthogonalise ``update`` as a matrix (out, in), and scale it by ``max(1, sqrt(out / in))``.

    The factor makes the change of a layer's output independent of the number of inputs.
    """
    matrix = update.flatten(1)
    rows, columns = matrix.shape
    # the iteration multiplies matrices of the smaller side
    x = newton_schulz(matrix.T if rows > columns else matrix)
    x = x.T if rows > columns else x
    return (x * math.sqrt(max(1.0, rows / columns))).reshape(update.shape).to(update.dtype)


def newton_schulz(matrix: Tensor) -> Tensor:
    """Approximate ``U V^T`` of a wide matrix ``U S V^T``: its singular values are 0.7 to 1.2.

    The iteration runs in bfloat16, whose error it tolerates. A zero matrix stays zero.
    """
    a, b, c = COEFFICIENTS
    x = matrix.bfloat16()
    # Frobenius norm: all singular values are at most 1, as the iteration needs
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(STEPS):
        # an odd polynomial of x of degree 5, which acts on each singular value separately
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
