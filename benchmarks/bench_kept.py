"""Bytes kept between forward and backward pass, and peak, where torch's layers keep too much.

    python benchmarks/bench_kept.py

Counts live storages (:class:`revzoo.core.live.LiveMemory`), so the figures are the same on
every machine. Without parameters, their gradients and the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from measure import environment
from torch import Tensor, nn

import revzoo
from revzoo.core.live import LiveMemory

MODES = ("store", "recompute", "invert", "exact")


def fine_tuned(model: nn.Module, *, norms: bool, weights: bool) -> nn.Module:
    """``model`` with frozen normalisations in eval mode, or with all other weights frozen."""
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.train(not norms).requires_grad_(not norms)
        elif weights:
            for p in m.parameters(recurse=False):
                p.requires_grad_(False)
    return model


def revnet(**options: object) -> nn.Module:
    """revnet38 with options."""
    return revzoo.create_model("revnet38", **options)


def actnorms() -> nn.Module:
    """A sequence of eight frozen ActNorms."""
    steps = [revzoo.ActNorm(16) for _ in range(8)]
    return revzoo.ReversibleSequence(steps).requires_grad_(False)


IMAGES = (16, 3, 32, 32)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "revnet38": (revnet, IMAGES),
    "revnet38, norms frozen in eval mode": (
        lambda: fine_tuned(revnet(), norms=True, weights=False),
        IMAGES,
    ),
    "revnet38, convolutions frozen": (
        lambda: fine_tuned(revnet(), norms=False, weights=True),
        IMAGES,
    ),
    "revnet38, leaky_relu": (lambda: revnet(activation="leaky_relu"), IMAGES),
    "revnet38, elu": (lambda: revnet(activation="elu"), IMAGES),
    "revnet38, dropout 0.1": (lambda: revnet(dropout=0.1), IMAGES),
    "revvit_cifar": (lambda: revzoo.create_model("revvit_cifar"), IMAGES),
    "irevnet163": (lambda: revzoo.create_model("irevnet163"), IMAGES),
    "eight frozen ActNorms": (actnorms, (16, 16, 32, 32)),
}


def counted(model: nn.Module, x: Tensor) -> tuple[int, int]:
    """Bytes kept after the forward pass, and peak bytes of the step."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    x = x.clone().requires_grad_()
    with LiveMemory() as memory:
        total = model(x).sum()
        kept = memory.now
        total.backward()
    return kept, memory.peak


def main() -> None:
    """Print the report."""
    print("# What a training step keeps\n")
    print(environment())
    print("KiB kept, and at the peak:\n")
    print(f"| case | {' | '.join(MODES)} |")
    print("|---" * (len(MODES) + 1) + "|")
    for name, (build, shape) in CASES.items():
        cells = []
        for mode in MODES:
            torch.manual_seed(0)
            model, x = build(), torch.randn(shape)
            try:
                revzoo.set_memory(model, mode)
            except ValueError:
                cells.append("-")
                continue
            counted(model, x)  # an ActNorm takes its values from the first batch
            kept, peak = counted(model, x)
            cells.append(f"{kept / 1024:,.0f}, {peak / 1024:,.0f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
