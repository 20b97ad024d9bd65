"""Predicts the time of a data-parallel step from kernels, links and buckets, and checks it on gloo.

    python benchmarks/model_scale.py               # the tables
    python benchmarks/model_scale.py --check       # against two gloo processes on this machine
    python benchmarks/model_scale.py --draw FILE   # the picture

The model. A step is a forward pass of ``t`` seconds and a backward pass of ``2 t``, divided among
the units of a network by their FLOPs; before each unit's backward pass a replay takes ``replay`` of
its forward pass. Gradients fill buckets of 25 MiB (DDP's default) from the last unit to the first.
One all-reduce runs at a time, from when its bucket is full: ``2 (n-1) / n`` of its bytes pass the
slowest link (P. Patarasuk and X. Yuan 2009), and each doubling of ``n`` adds two latencies. A step
ends with its backward pass and its last all-reduce. Not in the model: optimiser, loading,
stragglers, and kernels that slow down while NCCL uses some of the processors.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

import torch
from measure import MIB, environment
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.flop_counter import FlopCounterMode

import revzoo

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from two_processes import run

ROUNDS = 31  # of the check; the first two are not counted
BUCKET = 25 * MIB  # bucket_cap_mb of DistributedDataParallel
NVLINK = 450e9  # bytes a second and direction of an H100 (NVIDIA's data sheet: 900 GB/s in both)
NDR = 50e9  # of one InfiniBand NDR adapter (400 Gb/s); a DGX H100 has one for each GPU
LATENCY = 5e-6  # of one hop: assumed
# FLOPs a second of revnet110 in `store`, bfloat16, on an H200 (results/modes_gpu.md): three times
# the forward pass of 0.51 GFLOPs, 512 images, in 28.3 ms; and ratios of the same table
MEASURED = 3 * 0.51e9 * 512 / 28.3e-3
# of the forward pass: a step is three of them, so 3 * (ratio - 1) of one
REPLAY = {"store": 0.0, "recompute": 3 * 0.28, "invert": 3 * 0.39, "exact": 3 * 0.76}


class Unit(NamedTuple):
    """A part of a network: bytes of its gradients, and FLOPs of its forward pass for one image."""

    bytes: int
    flops: float


class Step(NamedTuple):
    """Seconds: the whole, without communication, and of all its all-reduces."""

    total: float
    computed: float
    communicated: float


def units(model: nn.Module, side: int) -> list[Unit]:
    """One for each module with parameters of its own, in their order."""
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 3, side, side))
    counts = counter.get_flop_counts()
    found = []
    for name, module in model.named_modules():
        if size := sum(p.numel() * 4 for p in module.parameters(recurse=False)):
            flops = sum(counts.get(f"{type(model).__name__}.{name}", {}).values()) / 2
            found.append(Unit(size, flops))
    return found


def transformer(layers: int, width: int, tokens: int) -> list[Unit]:
    """The blocks of a ViT: 12 width^2 weights each; products of queries, keys and values added."""
    weights = 12 * width**2
    flops = 2 * tokens * weights + 4 * tokens**2 * width
    return [Unit(4 * weights, flops)] * layers


def reduce_time(size: float, n: int, bandwidth: float, latency: float) -> float:
    """Seconds of an all-reduce of ``size`` bytes by ``n`` processes."""
    return 2 * (n - 1) / n * size / bandwidth + 2 * math.log2(n) * latency


def predict(
    parts: list[Unit],
    forward: float,
    replay: float,
    n: int,
    bandwidth: float,
    *,
    latency: float = LATENCY,
) -> Step:
    """A step whose forward pass takes ``forward`` seconds."""
    second = forward / sum(unit.flops for unit in parts)
    clock, link, filled, sent = forward, 0.0, 0.0, 0.0
    for i, unit in reversed([*enumerate(parts)]):
        clock += second * unit.flops * (2 + replay)
        filled += unit.bytes
        if filled >= BUCKET or i == 0:
            taken = reduce_time(filled, n, bandwidth, latency)
            link, sent, filled = max(link, clock) + taken, sent + taken, 0.0
    return Step(max(clock, link), clock, sent)


def networks() -> dict[str, tuple[list[Unit], int]]:
    """Units, and images of a GPU's batch."""
    revnet = revzoo.create_model("revnet104", num_classes=1000, memory="store")
    return {"revnet104": (units(revnet, 224), 128), "ViT-H/14": (transformer(32, 1280, 257), 32)}


LINKS = {  # processes, and bytes a second of the slowest link of a ring
    "8 GPUs, NVLink": (8, NVLINK),
    "64 GPUs, 8 adapters a machine": (64, min(NVLINK, 8 * NDR)),
    "512 GPUs, 8 adapters a machine": (512, min(NVLINK, 8 * NDR)),
    "64 GPUs, 1 adapter a machine": (64, NDR),
    "512 GPUs, 1 adapter a machine": (512, NDR),
}


EPOCHS = {  # of 1,281,167 images, by their sides
    "imagenet_short": {160: 12, 192: 4},
    "imagenet_long": {160: 71, 192: 17},
    "imagenet_a3": {160: 100},
    "imagenet_revcol, imagenet_revvit": {224: 300},
}
GFLOPS = {  # an image of 224 pixels, results/zoo.md
    "resnet50": 7.72,
    "revnet56": 8.90,
    "revnet104": 15.89,
    "revcol_tiny": 9.03,
    "revvit_small": 9.15,
}


def hours(gflops: float, sides: dict[int, int], replay: float) -> float:
    """Of training on 8 GPUs with the measured rate; FLOPs grow with the area of images."""
    flops = sum(epochs * (side / 224) ** 2 for side, epochs in sides.items()) * gflops * 1e9
    return 1_281_167 * flops * (3 + replay) / (8 * MEASURED) / 3600


Taken = dict[str, list[tuple[float, float]]]  # seconds of the clock, and of the CPU, by round


def task(rank: int) -> Taken:
    """In one of two processes: all-reduces, and steps alone and under DDP, interleaved."""
    torch.manual_seed(rank)
    # one image: the smaller the kernels, the more of a step is communication
    images, labels = torch.randn(1, 3, 64, 64), torch.randint(10, (1,))
    model = revzoo.create_model("revnet56", memory="store")
    ddp = DistributedDataParallel(model)
    tensors = {size: torch.zeros(size * MIB // 4) for size in (1, 25)}

    def step(network: nn.Module, mode: str) -> None:
        revzoo.set_memory(model, mode)
        with ddp.no_sync() if network is model else nullcontext():
            cross_entropy(network(images), labels).backward()

    work = {f"reduce {s}": lambda t=t: torch.distributed.all_reduce(t) for s, t in tensors.items()}
    for mode in ("store", "exact"):
        work[f"alone {mode}"] = lambda mode=mode: step(model, mode)
        work[f"ddp {mode}"] = lambda mode=mode: step(ddp, mode)
    taken: Taken = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, call in work.items():
            torch.distributed.barrier()
            start = time.perf_counter(), time.process_time()
            call()
            taken[name].append((time.perf_counter() - start[0], time.process_time() - start[1]))
    return {name: values[2:] for name, values in taken.items()}


def check() -> None:
    """Print measured steps of two gloo processes as multiples of the predicted ones."""
    results = run(task)
    parts = units(revzoo.create_model("revnet56", memory="store"), 64)
    size = sum(part.bytes for part in parts)
    # by round: the slower process by the clock, both by the CPU
    both = {name: [*zip(*(r[name] for r in results), strict=True)] for name in results[0]}
    clock = {name: [max(wall for wall, _ in pair) for pair in p] for name, p in both.items()}
    cpu = {name: [sum(used for _, used in pair) for pair in p] for name, p in both.items()}

    def link(taken: dict[str, list[float]]) -> tuple[float, float]:
        """Bytes a second, and seconds of latency."""
        small, large = (median(taken[f"reduce {mib}"]) for mib in (1, 25))
        bandwidth = 24 * MIB / (large - small)
        return bandwidth, max(0.0, (small - MIB / bandwidth) / 2)

    bandwidth, latency = link(clock)
    print(f"gloo: {bandwidth / 1e9:.2f} GB/s, latency {latency * 1e3:.2f} ms\n")
    print("| mode | alone, ms | measured / overlapped | measured / in turn | CPU time / in turn |")
    print("|---|---|---|---|---|")
    for mode in ("store", "exact"):
        rows = []
        sent = size / link(cpu)[0]  # of the CPU, in all its all-reduces
        for i, alone in enumerate(clock[f"alone {mode}"]):
            forward = clock["alone store"][i] / 3
            replay = (alone - clock["alone store"][i]) / forward
            step = predict(parts, forward, replay, 2, bandwidth, latency=latency)
            measured = clock[f"ddp {mode}"][i]
            in_turn = step.computed + step.communicated
            used = cpu[f"ddp {mode}"][i] / (cpu[f"alone {mode}"][i] + sent)
            rows.append((measured / step.total, measured / in_turn, used))
        cells = [f"{1e3 * median(clock[f'alone {mode}']):.0f}"]
        for column in zip(*rows, strict=True):
            low, middle, high = quantiles(column, n=4)
            cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {mode} | {' | '.join(cells)} |")


def draw(path: Path) -> None:
    """Time that communication adds to a step, by speed of the kernels."""
    from matplotlib import pyplot as plt  # only here: an extra

    parts, batch = networks()["ViT-H/14"]
    flops, (n, bandwidth) = sum(u.flops for u in parts), LINKS["512 GPUs, 1 adapter a machine"]
    rates = [MEASURED * 1.3**i for i in range(13)]
    plt.figure(figsize=(6, 3.5), layout="constrained")
    for mode, replay in REPLAY.items():
        steps = [predict(parts, batch * flops / r, replay, n, bandwidth) for r in rates]
        exposed = [1e3 * (step.total - step.computed) for step in steps]
        plt.plot([r / 1e12 for r in rates], exposed, label=mode)
    plt.xlabel("kernels, TFLOPs a second")
    plt.ylabel("exposed communication, ms a step")
    plt.legend()
    plt.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    """Print the tables, the check, or draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--draw", type=Path, metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.draw:
        draw(args.draw)
        return
    print(environment())
    if args.check:
        check()
        return
    print(f"\n| hours in store | {' | '.join(GFLOPS)} | revnet104 in exact |")
    print("|---" * (len(GFLOPS) + 2) + "|")
    for recipe, sides in EPOCHS.items():
        cells = [f"{hours(g, sides, 0):.1f}" for g in GFLOPS.values()]
        cells += [f"{hours(GFLOPS['revnet104'], sides, REPLAY['exact']):.1f}"]
        print(f"| {recipe} | {' | '.join(cells)} |")
    for faster in (1, 10):
        print(f"\n## Kernels of {faster * MEASURED / 1e12:.0f} TFLOPs a second\n")
        print("| network | links | mode | step, ms | exposed communication, ms | all-reduces, ms |")
        print("|---|---|---|---|---|---|")
        for (name, (parts, batch)), links in product(networks().items(), LINKS):
            forward = batch * sum(unit.flops for unit in parts) / (faster * MEASURED)
            for mode in ("store", "exact"):
                step = predict(parts, forward, REPLAY[mode], *LINKS[links])
                cells = (step.total, step.total - step.computed, step.communicated)
                values = " | ".join(f"{1e3 * cell:.1f}" for cell in cells)
                print(f"| {name} | {links} | {mode} | {values} |")


if __name__ == "__main__":
    main()
