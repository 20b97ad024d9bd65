"""``memory=auto`` against every pure mode, at five limits from the leanest plan's need upwards.

    OMP_NUM_THREADS=1 python benchmarks/bench_auto.py \
        revnet38:64 revnet110:64 revnet56:16 revvit_base:2 torchvision:vit_b_16:2 --rounds 7

A network of a library is made reversible with 4 bits. One step is forward, cross-entropy and
backward on random images. The limits go from the least that any plan needs to the need of
``store``; ``auto`` is the plan that ``revzoo train`` makes for each. A pure mode fits if its
counted peak, of all tensors alive in a real step (``revzoo.core.live``), is within the limit.
Times are ratios to the fastest pure mode that fits, of the same round; every round runs all
candidates one after the other. Equal plans are one candidate.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from measure import MIB, environment
from torch import nn

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.profiling.clock import now
from revzoo.profiling.plan import Planner, count_modes

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way from the leanest plan to store


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME:BATCH")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    print(environment(), end="")
    print(f"- float32, n = {args.rounds} rounds; quartiles in brackets\n")
    print("| model | limit, MiB | auto, steps | counted, MiB | fastest pure mode | auto / pure |")
    print("|---|---|---|---|---|---|")
    for text in args.models:
        name, _, batch = text.rpartition(":")
        for row in rows_of(name, int(batch), args.rounds):
            print("| " + " | ".join(row) + " |", flush=True)


def rows_of(name: str, batch: int, rounds: int) -> list[list[str]]:
    """The rows of one model's table."""
    torch.manual_seed(0)
    model = revzoo.create_model(name, **{"reversible_bits": 4} if ":" in name else {})
    images = torch.randn(batch, 3, model.image_size, model.image_size)
    labels = torch.zeros(batch, dtype=torch.int64)
    base = sum(2 * p.nbytes for p in model.parameters()) + images.nbytes
    base += sum(b.nbytes for b in model.buffers())
    planner = Planner(model, tuple(images.shape), clock=False)
    high = planner.pure("store").peak + planner.least - planner.leanest.peak_bytes
    limits = [int(planner.least + share * (high - planner.least)) for share in SHARES]
    plans = [planner.plan(limit) for limit in limits]

    def run(setting: object) -> None:
        revzoo.set_memory(model, setting)
        nn.functional.cross_entropy(model(images), labels).backward()

    settings = {mode: mode for mode in planner.pures()}
    keys = [key_of(plan) for plan in plans]
    # a plan with one mode for all steps is that mode
    settings |= {k: p for k, p in zip(keys, plans, strict=True) if k not in settings}
    counted: dict[str, int] = {}
    for key, setting in settings.items():
        run(setting)
        with LiveMemory() as memory:
            run(setting)
        counted[key] = base + memory.peak
    seconds: dict[str, list[float]] = {key: [] for key in settings}
    for _ in range(rounds):
        for key, setting in settings.items():
            start = now(images.device)
            run(setting)
            seconds[key].append(now(images.device) - start)
    rows = []
    for limit, plan, key in zip(limits, plans, keys, strict=True):
        fitting = [m for m in planner.pures() if counted[m] <= limit]
        best = min(fitting, key=lambda m: statistics.median(seconds[m]), default=None)
        ratio = "none fits"
        if best is not None:
            ratios = [a / b for a, b in zip(seconds[key], seconds[best], strict=True)]
            low, middle, top = statistics.quantiles(ratios, n=4)
            ratio = f"{middle:.2f} ({low:.2f} to {top:.2f})"
        rows.append(
            [
                f"{name}, batch {batch}",
                f"{limit / MIB:.1f}",
                count_modes([*plan.values()]),
                f"{counted[key] / MIB:.1f}",
                best or "",
                ratio,
            ]
        )
    return rows


def key_of(plan: dict[str, str]) -> str:
    """The mode of all steps, or the plan as text."""
    modes = {*plan.values()}
    return modes.pop() if len(modes) == 1 else str(sorted(plan.items()))


if __name__ == "__main__":
    main()
