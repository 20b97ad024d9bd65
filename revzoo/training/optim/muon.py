"""Muon: orthogonalised momentum for the weights of hidden layers.

A weight of shape (out, in, ...) counts as the matrix (out, rest). Muon replaces its momentum
``B = U S V^T`` by ``U V^T``, so all directions of a layer learn at the same speed. In the same
optimiser, SGD with Nesterov momentum trains norms, biases and the classifier.

Source: K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024,
https://kellerjordan.github.io/posts/muon. Why not ``torch.optim.Muon``: it takes matrices only, so
no convolutions and no other parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the cited source
STEPS = 5
MAX_STACKED = 2**20  # values of the parameters that share calls, which bounds temporary memory


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
            # read at every step: the scheduler changes it; in a CUDA graph a tensor
            rate = group["lr"]
            for parameters in _alike(group["params"], group["orthogonal"]):
                updates = self._nesterov(parameters, group["momentum"])
                if group["orthogonal"]:
                    updates = _orthogonal(updates)
                # decoupled weight decay, as in AdamW
                torch._foreach_mul_(parameters, 1 - rate * group["weight_decay"])
                torch._foreach_mul_(updates, -rate)  # not alpha, which reads a tensor
                torch._foreach_add_(parameters, updates)
        return loss

    def _nesterov(self, parameters: list[Tensor], momentum: float) -> list[Tensor]:
        """The gradients plus the momentum that the next step will apply."""
        gradients = [p.grad for p in parameters if p.grad is not None]  # all, for the type checker
        for p in parameters:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in parameters]
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, gradients)
        return list(torch._foreach_add(gradients, buffers, alpha=momentum))


def _alike(parameters: list[Tensor], as_matrices: bool) -> Iterator[list[Tensor]]:
    """The parameters with gradients, in lists that share calls: of one size, if as matrices."""
    lists: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in parameters:
        if p.grad is None:
            continue
        key: tuple[Any, ...] = p.dtype, p.device
        if as_matrices:
            key += (*p.flatten(1).shape,)
        alike = lists.setdefault(key, [])
        if alike and sum(map(torch.numel, alike)) + p.numel() > MAX_STACKED:
            yield lists.pop(key)
            alike = lists.setdefault(key, [])
        alike.append(p)
    yield from lists.values()


def _orthogonal(updates: list[Tensor]) -> list[Tensor]:
    """Orthogonalise updates of one size as matrices (out, in), and scale by ``sqrt(out / in)``.

    The factor is at least 1.
    """
    stack = torch.stack([update.flatten(1) for update in updates])
    _, rows, columns = stack.shape
    # the iteration multiplies matrices of the smaller side
    x = newton_schulz(stack.mT if rows > columns else stack)
    x = x.mT if rows > columns else x
    x = (x * math.sqrt(max(1.0, rows / max(columns, 1)))).to(stack.dtype)
    return [matrix.reshape(update.shape) for matrix, update in zip(x, updates, strict=True)]


def newton_schulz(matrices: Tensor) -> Tensor:
    """Approximate ``U V^T`` of wide matrices ``U S V^T``: its singular values are 0.7 to 1.2.

    The iteration runs in bfloat16, whose error it tolerates. Shapes (..., out, in).
    """
    a, b, c = COEFFICIENTS
    x = matrices.bfloat16()
    # Frobenius norm: all singular values are at most 1, as the iteration needs
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
