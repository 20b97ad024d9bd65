"""Cost of a RevNet against its baseline ResNet: step time and peak memory.

    python benchmarks/bench_pairs.py --pairs resnet32:revnet38 resnet110:revnet110 --batch 128

A step is the same as in ``bench_modes.py``. The seconds of an epoch follow from the median step,
without data loading. The ResNet stores its activations; the RevNet runs in each of ``--modes``.
"""

from __future__ import annotations

import argparse

import bench_modes
import torch
from measure import MIB, environment, interleaved, step_growth


def table(pair: str, args: argparse.Namespace) -> str:
    """Rows of the report for one pair, as Markdown."""
    plain, reversible = pair.split(":")
    dtype = getattr(torch, args.dtype)
    candidates = [(plain, "store"), *((reversible, mode) for mode in args.modes)]
    steps = {
        " ".join(c): bench_modes.step(bench_modes.build(*c), args.batch, dtype) for c in candidates
    }
    timings = interleaved(steps, args.rounds)
    rows = []
    for (name, mode), t in zip(candidates, timings.values(), strict=True):
        child = ["--memory-of", name, mode, "--batch", str(args.batch), "--dtype", args.dtype]
        mib = step_growth(steps[f"{name} {mode}"], bench_modes.__file__, child) / MIB
        ratio = f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})"
        epoch = t.seconds * args.images / args.batch
        rows.append(f"| {name} | {mode} | {t.seconds:.3g} | {epoch:.3g} | {ratio} | {mib:.0f} |")
    return "\n".join(rows)


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", nargs="+", default=["resnet32:revnet38", "resnet110:revnet110"])
    parser.add_argument("--modes", nargs="+", default=["store", "exact"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--images", type=int, default=50_000, help="images of an epoch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    print("# ResNets and the RevNets made from them\n")
    print(environment() + f"- Batch {args.batch}, {args.dtype}, n = {args.rounds} rounds\n")
    print(
        f"| model | mode | seconds a step | seconds for {args.images} images "
        "| time over the ResNet (quartiles) | peak growth, MiB |"
    )
    print("|---|---|---|---|---|---|")
    for pair in args.pairs:
        print(table(pair, args), flush=True)


if __name__ == "__main__":
    main()
