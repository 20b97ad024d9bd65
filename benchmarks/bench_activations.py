"""Peak bytes of all tensors alive during one training step, per image: a table for the README.

    python benchmarks/bench_activations.py

Counted, not sampled: the figures are the same on every machine (see revzoo.profiling.live).
Weights and their gradients exist before and are left out.
"""

from __future__ import annotations

import torch

import revzoo
from revzoo.profiling.costs import activation_bytes

MODELS = ("resnet32", "revnet38", "resnet110", "revnet110", "resnet164", "revnet164")
MODES = ("store", "recompute", "invert", "exact")
BATCH = 8


def peak(name: str, mode: str) -> int:
    """Bytes per image of 3x32x32 in float32."""
    torch.manual_seed(0)
    model = revzoo.create_model(name, memory=mode)
    return activation_bytes(model, torch.randn(BATCH, 3, 32, 32))


def main() -> None:
    """Print the table, in KiB per image."""
    print(f"| KiB per image | {' | '.join(f'`{m}`' for m in MODES)} | `store` over `invert` |")
    print("|---" * (len(MODES) + 2) + "|")
    for name in MODELS:
        modes = [m for m in MODES if name.startswith("revnet") or m not in ("invert", "exact")]
        peaks = {mode: peak(name, mode) / 1024 for mode in modes}
        cells = [f"{peaks[m]:,.0f}" if m in peaks else "-" for m in MODES]
        gain = f"{peaks['store'] / peaks['invert']:.1f}x" if "invert" in peaks else "-"
        print(f"| {name} | {' | '.join(cells)} | {gain} |", flush=True)


if __name__ == "__main__":
    main()
