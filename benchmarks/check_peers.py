"""Checks gradients, BatchNorm, dropout and autocast in each library of ``bench_peers.py``.

    python benchmarks/check_peers.py

Every library runs the same blocks; plain backprop on a copy of them is the reference. Each cell is
the outcome of one small test in float64 on the CPU. Needs the ``bench`` extra.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from bench_peers import CANDIDATES, branch
from measure import environment
from torch import Tensor, nn

from revzoo import set_memory
from revzoo.core.kernels import DEFAULT_BITS

CHANNELS, BLOCKS = 8, 3
NAMES = ("revzoo invert", "revzoo exact", "torch checkpoint", "memcnn", "revtorch", "invtorch")


class Counted(nn.Module):
    """A branch that counts its evaluations."""

    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(branch(CHANNELS // 2), nn.Dropout(dropout))
        self.count = itertools.count()  # revzoo puts attributes back after a replay

    @property
    def calls(self) -> int:
        """The evaluations so far."""
        return next(copy.copy(self.count))

    def forward(self, x: Tensor) -> Tensor:
        next(self.count)
        return self.body(x)


def built(name: str, *, dropout: float = 0.0) -> tuple[nn.Module, list[Counted]]:
    """The stack of ``name`` and its branches, the same weights for every name."""
    torch.manual_seed(0)
    branches = [Counted(dropout=dropout).double() for _ in range(2 * BLOCKS)]
    return CANDIDATES[name](list(zip(branches[::2], branches[1::2], strict=True))), branches


def images(*, requires_grad: bool = True) -> Tensor:
    """A batch that no other call shares: some peers free their input."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, CHANNELS, 8, 8, dtype=torch.float64, generator=generator)
    return x.requires_grad_(requires_grad)


def gradients(
    name: str, *, grid: int | None = None, dropout: float = 0.0, autocast: bool = False
) -> list[Tensor]:
    """The gradient of each parameter after one step, branch by branch."""
    net, branches = built(name, dropout=dropout)
    if grid is not None:
        set_memory(net, "store", grid=grid)
    torch.manual_seed(2)
    dtype = torch.float32 if autocast else torch.float64
    x = images().to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = net.to(dtype)(x)
    y.double().square().sum().backward()
    return [p.grad for branch in branches for p in branch.parameters()]


def error(**options: Any) -> Callable[[str], str]:
    """Largest relative error of a parameter's gradient against plain backprop.

    ``exact`` computes with rounded branch values, so its reference is plain backprop that rounds.
    """

    def test(name: str) -> str:
        grid = DEFAULT_BITS if name == "revzoo exact" else None
        reference = gradients("revzoo store", grid=grid, **options)
        pairs = zip(gradients(name, **options), reference, strict=True)
        return f"{max(float((a - b).norm() / b.norm()) for a, b in pairs):.0e}"

    return test


def evaluations(name: str) -> str:
    """Evaluations of each branch in one step, the forward pass included."""
    net, branches = built(name)
    net(images().clone()).sum().backward()
    return _range([branch.calls for branch in branches])


def updates(name: str) -> str:
    """Updates of BatchNorm's running statistics in one step."""
    net, _ = built(name)
    net(images().clone()).sum().backward()
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    return _range([int(m.num_batches_tracked) for m in norms])


def autograd_grad(name: str) -> str:
    """Whether ``torch.autograd.grad`` works."""
    net, _ = built(name)
    torch.autograd.grad(net(images().clone()).sum(), list(net.parameters()))
    return "yes"


def no_input_gradient(name: str) -> str:
    """Whether parameters get gradients if the input requires none."""
    net, _ = built(name)
    net(images(requires_grad=False)).sum().backward()
    return "yes" if all(p.grad is not None for p in net.parameters()) else "no"


def input_kept(name: str) -> str:
    """Whether the caller's tensor can still be read after the forward pass."""
    net, _ = built(name)
    x = images().clone()
    expected = x.detach().clone()
    net(x)
    return "yes" if x.untyped_storage().nbytes() and torch.equal(x, expected) else "no"


def double_backward(name: str) -> str:
    """Whether gradients of gradients work."""
    net, _ = built(name)
    x = images()
    (gradient,) = torch.autograd.grad(net(x.clone()).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()
    return "yes"


def _range(counts: list[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low} to {high}"


TESTS: dict[str, Callable[[str], str]] = {
    "evaluations of a branch in a step": evaluations,
    "updates of BatchNorm's statistics in a step": updates,
    "error of gradients": error(),
    "the same, with dropout": error(dropout=0.5),
    "the same, under bfloat16 autocast": error(autocast=True),
    "`torch.autograd.grad`": autograd_grad,
    "input without gradient": no_input_gradient,
    "input can be read afterwards": input_kept,
    "double backward": double_backward,
}


def outcome(test: Callable[[str], str], name: str) -> str:
    """A cell of the table; a failure is part of the result."""
    try:
        return test(name)
    except Exception as failure:
        return f"raises {type(failure).__name__}"


def main() -> None:
    """Print the report."""
    warnings.simplefilter("ignore")  # peers' deprecations
    print("# What each library gets right\n")
    print(environment())
    print(f"| | {' | '.join(NAMES)} |")
    print("|---" * (len(NAMES) + 1) + "|")
    for title, test in TESTS.items():
        print(f"| {title} | {' | '.join(outcome(test, name) for name in NAMES)} |", flush=True)


if __name__ == "__main__":
    main()
