"""Overhead of each library: CPU time of a block whose tensors have a few elements.

    python benchmarks/bench_overhead.py

The stack of ``bench_peers.py`` with 4 channels on 2x2 pixels. Kernels take hardly any time, so the
rest is autograd, hooks and Python. The script measures CPU time, not wall time, because other jobs
on the machine hardly change it. Needs the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings

from bench_peers import CANDIDATES, step
from measure import environment


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=100)
    args = parser.parse_args()
    args.batch, args.channels, args.size, args.channels_last = 2, 4, 2, False
    args.dtype = "float32"
    warnings.simplefilter("ignore")  # deprecations in the peers
    steps = {name: step(name, args, args.blocks) for name in CANDIDATES}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, run in steps.items():
            start = time.process_time()
            run()
            seconds[name].append(time.process_time() - start)
    print("# Overhead of a block of two branches\n")
    print(environment() + f"- {args.blocks} blocks, n = {args.rounds} rounds")
    print("\n| candidate | CPU time a block and step, us (quartiles) | over store |")
    print("|---|---|---|")
    base = statistics.median(seconds["revzoo store"])
    for name, values in seconds.items():
        low, median, high = (q / args.blocks * 1e6 for q in statistics.quantiles(values, n=4))
        over = statistics.median(values) / base
        print(f"| {name} | {median:.0f} ({low:.0f} to {high:.0f}) | {over:.2f} |")


if __name__ == "__main__":
    main()
