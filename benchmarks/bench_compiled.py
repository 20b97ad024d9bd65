"""Compiled networks: time and memory of a step, in memory modes, plans and with torch's budget.

    OMP_NUM_THREADS=1 python benchmarks/bench_compiled.py revnet38 --batch 32

One step is forward, cross-entropy and backward on random images, in float32. "Eager" networks are
not compiled. "Compiled" networks use the callback ``compiled_branches``. "torch b" is
``torch.compile`` of the whole network in mode ``store`` with ``activation_memory_budget`` b. Plans
have budgets between the peaks of ``invert`` and ``store``, counted for the eager network.

A fresh process for each candidate runs its steps and steps of eager ``store`` in turn; networks in
one process would share compiled graphs. Memory is the growth of another fresh process's peak in a
step, after the gradients exist. "Compiling" is the time of the first two steps, without caches on
disk.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
import torch._functorch.config
from measure import MIB, environment, growth, in_own_process, interleaved
from torch import nn

import revzoo
from revzoo.profiling.plan import Planner
from revzoo.training import CompiledBranches

SHARES = (1.0, 0.5, 0.3, 0.1)  # torch's budgets
PLANS = (0.1, 0.2, 0.4, 0.7)  # of the way from the peak of invert to the peak of store
MODES = (
    "store",
    "recompute",
    "invert",
    "exact",
    "balanced",
    *(f"plan {share:g}" for share in PLANS),
)
CANDIDATES = (
    *(f"eager {mode}" for mode in MODES),
    *(f"compiled {mode}" for mode in MODES),
    *(f"torch {share:g}" for share in SHARES),
)


def build(candidate: str, args: argparse.Namespace) -> Callable[[], object]:
    """A training step of a candidate, compiled by two calls."""
    torch.manual_seed(0)
    model = revzoo.create_model(args.name, memory="store")
    side = args.size or model.image_size
    images = torch.randn(args.batch, 3, side, side)
    labels = torch.zeros(args.batch, dtype=torch.int64)
    kind, _, mode = candidate.partition(" ")
    if kind != "torch":
        revzoo.set_memory(model, mode_or_plan(model, tuple(images.shape), mode))
    if kind == "compiled":
        # it compiles the children of a module
        CompiledBranches().setup(None, nn.ModuleList([model]), "fit")
    run = model
    if kind == "torch":
        torch._functorch.config.activation_memory_budget = float(mode)
        run = torch.compile(model, dynamic=False)

    def step() -> None:
        nn.functional.cross_entropy(run(images), labels).backward()

    step()
    step()
    return step


def mode_or_plan(model: nn.Module, shape: tuple[int, ...], mode: str) -> object:
    """The argument of ``set_memory`` for one of ``MODES`` and images of this shape."""
    if mode != "balanced" and not mode.startswith("plan"):
        return mode
    planner = Planner(model, shape, inverting="invert")
    if mode == "balanced":
        return planner.balanced()
    least, most = planner.pure("invert"), planner.pure("store")
    assert least is not None
    assert most is not None
    share = float(mode.removeprefix("plan "))
    return planner.plan(int(least.peak + share * (most.peak - least.peak)))


def measured(args: argparse.Namespace) -> object:
    """One figure of one candidate, measured in this process: bytes, or seconds and ratios."""
    (candidate,) = args.only
    start = time.perf_counter()
    step = build(candidate, args)
    compiling = time.perf_counter() - start
    if args.figure == "memory":
        return growth(step)
    steps = {"eager": build("eager store", args), "candidate": step}
    return [compiling, *interleaved(steps, args.rounds)["candidate"]]


def rows(args: argparse.Namespace) -> Iterator[str]:
    """A row for each candidate."""
    options = [args.name, "--batch", str(args.batch), "--rounds", str(args.rounds)]
    options += ["--size", str(args.size)] if args.size else []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            timing, size = (
                json.loads(in_own_process(__file__, [*options, "--figure", figure, "--only", name]))
                for figure in ("time", "memory")
            )
        compiling, seconds, ratio, low, high = timing
        wait = "" if name.startswith("eager") else f"{compiling:.0f}"
        ratios = f"{ratio:.2f} ({low:.2f} to {high:.2f})"
        yield f"| {name} | {seconds:.3f} | {ratios} | {size / MIB:.0f} | {wait} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", default=CANDIDATES, choices=CANDIDATES)
    parser.add_argument("--figure", choices=("time", "memory"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 1000
    if args.figure:
        print(json.dumps(measured(args)))
        return
    print(environment() + f"- n = {args.rounds} rounds\n")
    print("| candidate | s a step | over eager `store` | MiB | compiling, s |")
    print("|---|---|---|---|---|")
    for row in rows(args):
        print(row, flush=True)


if __name__ == "__main__":
    main()
