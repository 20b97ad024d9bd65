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
    """Print two tables, by depth and mode: the peak in GiB, and what the step keeps in MiB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[5, 10, 20, 30])
    parser.add_argument("--side", type=int, default=64)
    args = parser.parse_args()
    print(environment())
    peaks, kept = [], []
    for depth in args.depths:
        units = (depth,) * len(CHANNELS)
        with torch.device("meta"):
            model = revzoo.create_model("iunet3d", channels=CHANNELS, units=units)
        audits = revzoo.audit(model, model.batch_shape(1, args.side), modes=MODES).audits
        parameters = f"{sum(p.numel() for p in model.parameters()):,}"
        peak = [f"{audits[mode].peak_bytes / 2**30:.2f}" for mode in MODES]
        peaks.append([str(depth), *peak, parameters])
        kept.append([str(depth), *(f"{audits[mode].kept_bytes / 2**20:,.0f}" for mode in MODES)])
    modes = ["couplings", *(f"`{mode}`" for mode in MODES)]
    for title, rows in (
        ("peak, GiB", [[*modes, "parameters"], *peaks]),
        ("kept, MiB", [modes, *kept]),
    ):
        lines = [f"| {' | '.join(row)} |" for row in rows]
        print(title, "", lines[0], "|---" * len(rows[0]) + "|", *lines[1:], "", sep="\n")


if __name__ == "__main__":
    main()
