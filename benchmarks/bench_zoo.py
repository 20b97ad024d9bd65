"""Costs of each model in the zoo: parameters, forward FLOPs, activation memory per image.

    python benchmarks/bench_zoo.py

The figures are counted, not timed or sampled, so they are the same on every machine. torch counts
the FLOPs. Memory is the peak of all tensors alive during one training step in float32
(revzoo.audit), without weights and their gradients, which exist before the step.
"""

from __future__ import annotations

import argparse
import math

import torch

import revzoo
from revzoo.core.modes import DEVICE_MODES
from revzoo.profiling.count import forward_flops

VARIANTS = ("*_memcnn", "*unet?d")


def row(name: str) -> str:
    """One line of the table."""
    torch.manual_seed(0)
    in_chans = 1 if name == "irevnet13" else 3  # the model for digits
    model = revzoo.create_model(name, in_chans=in_chans, num_classes=classes_of(name))
    size = model.image_size
    images = torch.randn(2 if size > 64 else 8, in_chans, size, size)
    peaks: dict[str, float] = {}
    for mode in DEVICE_MODES if model.default_memory != "store" else ["store", "recompute"]:
        if mode == "exact" and model.default_memory == "recompute":
            continue  # i-ResNets invert in floating point only
        revzoo.set_memory(model, mode)
        revzoo.set_drift_limit(model, math.inf)  # invert drifts in RevCols of many columns
        report = revzoo.audit(model, images.shape, modes=[], real=True)
        peaks[mode] = report.activation_bytes // len(images) / 2**20
    cells = [f"{peaks[mode]:,.2f}" if mode in peaks else "-" for mode in DEVICE_MODES]
    gain = f"{peaks['store'] / peaks['invert']:.1f}x" if "invert" in peaks else "-"
    parameters = sum(p.numel() for p in model.parameters())
    flops = forward_flops(model, images) / 1e9
    image = f"{in_chans}x{size}x{size}"
    cells = [name, image, f"{parameters:,}", f"{flops:,.2f}", *cells, gain]
    return "| " + " | ".join(cells) + " |"


def classes_of(name: str) -> int:
    """1000 for networks published for ImageNet, else 10."""
    return 1000 if revzoo.create_model(name, num_classes=10).image_size >= 224 else 10


def main() -> None:
    """Print the table, memory in MiB per image."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="+", metavar="NAME", help="default: not MemCNN's, not U-Nets"
    )
    args = parser.parse_args()
    heads = ["model", "image", "parameters", "GFLOPs", *(f"`{m}`, MiB" for m in DEVICE_MODES)]
    print(f"| {' | '.join(heads)} | `store` over `invert` |")
    print("|---" * (len(heads) + 1) + "|")
    for name in args.models or sorted(
        set(revzoo.list_models()) - set(revzoo.list_models(VARIANTS))
    ):
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
