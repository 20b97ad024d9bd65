"""Memory of a training step of iUNets against their depth.

    python benchmarks/bench_iunet.py

Counts tensors without allocating them: one volume, float32.
"""

from __future__ import annotations

import argparse

import torch
from measure import environment

import revzoo

CHANNELS = (64, 128, 256, 384)
MODES = ("store", "recompute", "invert", "exact")


def main() -> None:
    """Print the tables: the peak in GiB and what the step keeps in MiB, by depth and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--side", type=int, default=64)
    args = parser.parse_args()
    print(environment())
    heads = [*(f"`{mode}`, peak" for mode in MODES), *(f"`{mode}`, kept" for mode in MODES)]
    print(f"| couplings | parameters | {' | '.join(heads)} |")
    print("|---" * (len(heads) + 2) + "|")
    for depth in args.depths:
        units = (depth,) * len(CHANNELS)
        with torch.device("meta"):
            model = revzoo.create_model("iunet3d", channels=CHANNELS, units=units)
        audits = revzoo.audit(model, model.batch_shape(1, args.side), modes=MODES).audits
        peaks = [f"{audits[mode].peak_bytes / 2**30:.2f}" for mode in MODES]
        kept = [f"{audits[mode].kept_bytes / 2**20:,.0f}" for mode in MODES]
        parameters = sum(p.numel() for p in model.parameters())
        print(f"| {depth} | {parameters:,} | {' | '.join([*peaks, *kept])} |", flush=True)


if __name__ == "__main__":
    main()
