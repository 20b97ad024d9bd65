"""Distance of a step's gradient from the float64 gradient, in ``store`` and on fixed-point streams.

    python benchmarks/bench_precision.py --models revnet110 irevnet163 --seeds 3

Initial weights, random images, BatchNorm in training, no dropout. The distance is the norm of the
difference of all gradients over the norm of the float64 gradients.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator

import torch
from measure import environment
from torch import Tensor, nn

import revzoo

CASES = {  # mode, autocast
    "store": ("store", False),
    "exact": ("exact", False),
    "store, bf16 autocast": ("store", True),
    "exact, bf16 autocast": ("exact", True),
}


def gradient(model: nn.Module, images: Tensor, labels: Tensor, *, bf16: bool) -> Tensor:
    """All gradients of one step as one vector in float64."""
    model = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = nn.functional.cross_entropy(model(images), labels)
    found = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.double().flatten() for g in found])


def distances(name: str, seed: int, batch: int) -> Iterator[float]:
    """One for each case."""
    torch.manual_seed(seed)
    model = revzoo.create_model(name, memory="store")
    for m in model.modules():
        if isinstance(m, nn.Dropout):
            m.p = 0.0
    images, labels = torch.randn(batch, 3, 32, 32), torch.randint(10, (batch,))
    wide = gradient(copy.deepcopy(model).double(), images.double(), labels, bf16=False)
    for mode, bf16 in CASES.values():
        revzoo.set_memory(model, mode)
        yield ((gradient(model, images, labels, bf16=bf16) - wide).norm() / wide.norm()).item()


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["revnet38", "revnet110", "irevnet163"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    print("# Distance of gradients from float64's\n")
    print(environment() + f"- Batch {args.batch}, n = {args.seeds} seeds: median (least to most)\n")
    print(f"| model | {' | '.join(CASES)} |")
    print("|---" * (len(CASES) + 1) + "|")
    for name in args.models:
        rows = [list(distances(name, seed, args.batch)) for seed in range(args.seeds)]
        cells = [
            f"{statistics.median(column):.2g} ({min(column):.2g} to {max(column):.2g})"
            for column in zip(*rows, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
