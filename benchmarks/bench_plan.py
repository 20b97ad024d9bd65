"""Time against memory: our planner's frontier, single modes, and torch's tools.

    MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=0 OMP_NUM_THREADS=1 \
    python benchmarks/bench_plan.py revnet110 --batch 32 --csv revnet110.csv --plot revnet110.png

One step is forward, cross-entropy and backward on random images; gradients exist from the step
before. Every round runs all candidates one after the other. With one CPU thread we
measure the thread's time (``time.thread_time``). Other programs still add to it, through caches and
shared cores, so a candidate's time is the minimum over the rounds; the quartiles of the ratio to
``store`` in the same round show the spread. Three kinds of memory:

    predicted   the plan's ``peak_bytes``
    counted     the peak of all tensors alive in a real step, counted (``revzoo.core.live``);
                of compiled models the growth of this process
    resident    the growth of the peak of a fresh process (VmHWM) in a step, plus the bytes before
                the step; for plans and modes

"checkpoint k" is ``torch.utils.checkpoint`` (non-reentrant) around each of the first k blocks of a
network in mode ``store``. "torch budget b" is ``torch._functorch.config.activation_memory_budget``
under ``torch.compile`` with the backend that partitions without generating code
(``aot_eager_decomp_partition``), with ``--compiled``. Plans invert in mode ``--inverting``, also
"balanced".

``--planning SHARE`` only prints the processor's seconds of the first plan in this process, as
``memory=auto`` makes it, for this share of the bytes that ``store`` needs.
"""

from __future__ import annotations

import argparse
import csv
import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import MIB, environment, growth, in_own_process
from torch import nn
from torch.utils.checkpoint import checkpoint

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.profiling.clock import now
from revzoo.profiling.plan import Planner

Step = Callable[[], None]


def step_of(model: nn.Module, images: torch.Tensor, prepare: Callable[[], object]) -> Step:
    """One training step after ``prepare``, which sets the model's memory mode or checkpoints."""
    labels = torch.zeros(len(images), dtype=torch.int64)

    def run() -> None:
        prepare()
        nn.functional.cross_entropy(model(images), labels).backward()

    return run


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules for torch's checkpoint: the steps of stem and stages."""
    return [block for part in (model.stem, *model.stages) for block in part]


def checkpointed(model: nn.Module, count: int) -> None:
    """Wrap exactly the first ``count`` blocks in torch's checkpoint."""
    revzoo.set_memory(model, "store")
    for i, block in enumerate(blocks_of(model)):
        block.__dict__.pop("forward", None)
        if i < count:
            inner = block.forward
            block.forward = lambda *x, f=inner: checkpoint(f, *x, use_reentrant=False)


def planned(model: nn.Module, setting: object) -> None:
    """Set a memory mode or a plan, without torch's checkpoints."""
    checkpointed(model, 0)
    revzoo.set_memory(model, setting)


def planning_seconds(model: nn.Module, shape: tuple[int, ...], share: float) -> float:
    """Seconds of the processor for a plan, and for the modes that its line in the log compares."""
    import revzoo.cli.run.memory_plan  # noqa: F401  # what a run has imported before it plans

    gc.collect()
    gc.freeze()  # as the first run of a process does
    start = time.thread_time()
    planner = Planner(model, shape, clock=False)
    planner.plan(int(share * (planner.pure("store").peak + planner.reserve)))
    planner.pure(planner.inverting)
    return time.thread_time() - start


def main() -> None:
    """Measure, print a table, draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--size", type=int)
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--checkpoints", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", type=float, nargs="*", default=[])
    parser.add_argument("--inverting", default="invert")
    parser.add_argument("--counted", action="store_true", help="do not measure resident memory")
    parser.add_argument("--alone", type=json.loads, help="print the growth in this plan or mode")
    parser.add_argument("--planning", type=float, metavar="SHARE")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = revzoo.create_model(args.name)
    size = args.size or model.image_size
    images = torch.randn(args.batch, 3, size, size)
    if args.planning:
        print(f"{planning_seconds(model, tuple(images.shape), args.planning):.3f}")
        return
    if args.alone:
        run = step_of(model, images, lambda: planned(model, args.alone))
        run()
        print(growth(run))
        return
    start = time.thread_time()
    planner = Planner(model, tuple(images.shape), inverting=args.inverting)
    planning = time.thread_time() - start
    candidates: dict[str, Step] = {}
    predicted: dict[str, tuple[int, float]] = {}
    budgets: dict[str, int] = {}

    settings: dict[str, str] = {}

    def add(name: str, setting: object, peak: int, seconds: float) -> None:
        settings[name] = json.dumps(setting if isinstance(setting, str) else dict(setting))
        candidates[name] = step_of(model, images, lambda: planned(model, setting))
        predicted[name] = peak, seconds

    for mode in ("store", "recompute", args.inverting):
        if (pure := planner.pure(mode)) is not None:
            add(mode, mode, pure.peak, pure.cost / 1e9)
    balanced = planner.balanced()
    add("balanced", balanced, balanced.peak_bytes, balanced.seconds)
    for i, plan in enumerate(planner.frontier(args.budgets)):
        name = f"plan {i + 1}"
        add(name, plan, plan.peak_bytes, plan.seconds)
        budgets[name] = plan.budget
    blocks = len(blocks_of(model))
    for k in range(1, args.checkpoints + 1):
        count = round(k * blocks / args.checkpoints)
        candidates[f"checkpoint {count}"] = step_of(
            model, images, lambda count=count: checkpointed(model, count)
        )
    for share in args.compiled:
        torch._functorch.config.activation_memory_budget = share
        twin = revzoo.create_model(args.name, memory="store")
        twin.load_state_dict(model.state_dict())
        compiled = torch.compile(twin, backend="aot_eager_decomp_partition")
        candidates[f"torch budget {share:g}"] = run = step_of(compiled, images, lambda: None)
        run()  # compiles with this share
    base = sum(2 * p.nbytes for p in model.parameters()) + images.nbytes
    base += sum(b.nbytes for b in model.buffers())
    counted: dict[str, int] = {}
    resident: dict[str, int] = {}
    for name, run in candidates.items():
        run()
        with LiveMemory() as memory:
            run()
        # the counter would run a compiled model as plain code
        counted[name] = base + (growth(run) if name.startswith("torch") else memory.peak)
    shape = ["--batch", str(args.batch), "--size", str(size)]
    for name, setting in () if args.counted else settings.items():
        alone = in_own_process(__file__, [args.name, *shape, "--alone", setting])
        resident[name] = base + int(alone)
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    device = torch.device("cpu")
    for _ in range(args.rounds):
        for name, run in candidates.items():
            begin = now(device)
            run()
            seconds[name].append(now(device) - begin)
    rows = []
    for name in candidates:
        ratios = [s / b for s, b in zip(seconds[name], seconds["store"], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        peak, expected = predicted.get(name, (None, None))
        rows.append(
            {
                "candidate": name,
                "budget_mib": budgets[name] / MIB if name in budgets else None,
                "predicted_mib": peak / MIB if peak else None,
                "counted_mib": counted[name] / MIB,
                "resident_mib": resident[name] / MIB if name in resident else None,
                "predicted_seconds": expected,
                "seconds": min(seconds[name]),
                "over_store": min(seconds[name]) / min(seconds["store"]),
                "low": low,
                "high": high,
            }
        )
    print(environment(), end="")
    print(f"- {args.name}, batch {args.batch}, {size}x{size}, float32, n = {args.rounds} rounds")
    print(f"- Planning: {planning:.1f} s of the processor, for all {args.budgets} budgets' costs\n")
    print(
        "| candidate | budget, MiB | predicted | counted | resident | predicted s | s | / store |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["candidate"]]
        cells += ["" if row[k] is None else f"{row[k]:.1f}" for k in list(row)[1:5]]
        cells += ["" if row[k] is None else f"{row[k]:.3f}" for k in list(row)[5:7]]
        cells += [f"{row['over_store']:.2f} ({row['low']:.2f} to {row['high']:.2f})"]
        print("| " + " | ".join(cells) + " |")
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        draw(args.name, rows, args.plot)


GREY = "#7d858d"
GROUPS = {  # prefix -> label, colour, style: readable on white and on GitHub's dark background
    "plan": ("plans of revzoo", "#2fa36b", "o-"),
    "checkpoint": ("torch checkpoint, first k blocks", "#d9485f", "s--"),
    "torch": ("torch activation_memory_budget", "#c9a227", "D--"),
}


def draw(name: str, rows: list[dict], path: Path) -> None:
    """Time over ``store`` against counted peak."""
    from matplotlib import pyplot as plt

    grey = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), GREY)
    plt.rcParams.update({**grey, "axes.edgecolor": GREY, "font.size": 12})
    figure, axes = plt.subplots(figsize=(7, 4.4), layout="constrained")
    for prefix, (label, colour, style) in GROUPS.items():
        points = [
            (r["counted_mib"], r["over_store"]) for r in rows if r["candidate"].split()[0] == prefix
        ]
        if points:
            axes.plot(*zip(*sorted(points), strict=True), style, color=colour, label=label, ms=6)
    for row in rows:
        if row["candidate"] in ("store", "recompute", "invert", "exact", "balanced"):
            at = row["counted_mib"], row["over_store"]
            axes.plot(*at, "*" if row["candidate"] == "balanced" else "x", color=GREY, ms=9, mew=2)
            place = (-4, -18) if row["candidate"] == "balanced" else (8, 4)
            axes.annotate(row["candidate"], at, xytext=place, textcoords="offset points")
    axes.set(
        title=name, xlabel="peak memory of a step, MiB", ylabel="time over store", xlim=(0, None)
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150, transparent=True)


if __name__ == "__main__":
    main()
