"""When DistributedDataParallel reduces its buckets, while earlier steps are still replayed.

    python benchmarks/trace_ddp.py

Two gloo processes on the CPU, one thread each. Branches note the time of each replay, a
communication hook that of each bucket. Each row of the picture is the backward pass of process 0.
"""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.multiprocessing as mp
from measure import environment
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import revzoo

MODES = ("store", "recompute", "invert", "exact")
WORLD, STEPS, COUPLINGS, CHANNELS, SIDE, BATCH, BUCKET = 2, 12, 24, 64, 16, 8, 1.0  # MiB
COLUMNS = 80
Spans = list[tuple[float, float]]


class Timed(nn.Module):
    """A branch of two convolutions that notes when it runs."""

    def __init__(self, spans: Spans) -> None:
        super().__init__()
        conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        last = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.layers = nn.Sequential(conv, nn.ReLU(), last)
        self.spans = [spans]  # in a list: not a part of the module's state

    def forward(self, x: Tensor) -> Tensor:
        start = time.perf_counter()
        y: Tensor = self.layers(x)
        self.spans[0].append((start, time.perf_counter()))
        return y


def traced(rank: int, mode: str) -> dict[str, Any]:
    """Replays and reductions of the step with the median time, in ms from the backward pass."""
    torch.manual_seed(0)
    replays: Spans = []
    reductions: Spans = []
    couplings = [revzoo.AdditiveCoupling(Timed(replays)) for _ in range(COUPLINGS)]
    net = revzoo.ReversibleSequence(couplings)
    revzoo.set_memory(net, mode)
    parallel = DistributedDataParallel(net, bucket_cap_mb=BUCKET)

    def reduce(_: object, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        start, tensor = time.perf_counter(), bucket.buffer().div_(WORLD)
        future = distributed.all_reduce(tensor, async_op=True).get_future()

        def done(future: torch.futures.Future[list[Tensor]]) -> Tensor:
            reductions.append((start, time.perf_counter()))
            return future.value()[0]

        return future.then(done)

    parallel.register_comm_hook(None, reduce)
    x = torch.randn(BATCH, 2 * CHANNELS, SIDE, SIDE)
    steps = []
    for _ in range(STEPS):
        loss = parallel(x).square().mean()
        replays.clear()
        reductions.clear()
        distributed.barrier()
        start = time.perf_counter()
        loss.backward()
        seconds = time.perf_counter() - start
        lists = {"replays": replays, "reductions": reductions}
        ms = {
            name: [((a - start) * 1e3, (b - start) * 1e3) for a, b in sorted(spans)]
            for name, spans in lists.items()
        }
        steps.append({"ms": seconds * 1e3, **ms})
    steps = sorted(steps[2:], key=lambda step: step["ms"])  # the first ones build the buckets
    return steps[len(steps) // 2]


def worker(rank: int, port: int, folder: str) -> None:
    """Trace all modes; write the results to ``folder``."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    options: dict[str, Any] = {"rank": rank, "world_size": WORLD, "timeout": timedelta(minutes=1)}
    distributed.init_process_group("gloo", **options)
    torch.save({mode: traced(rank, mode) for mode in MODES}, Path(folder) / f"{rank}.pt")
    distributed.barrier()
    distributed.destroy_process_group()


def drawn(spans: Spans, sign: str, ms: float) -> str:
    """One line of the picture: a sign where one of the spans is."""
    line = [" "] * COLUMNS
    for start, end in spans:
        first, last = (min(int(t / ms * COLUMNS), COLUMNS - 1) for t in (start, end))
        line[first : last + 1] = sign * (last + 1 - first)
    return "".join(line).rstrip()


def main() -> None:
    """Print the report."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with TemporaryDirectory() as folder:
        mp.spawn(worker, (port, folder), nprocs=WORLD)
        steps = torch.load(Path(folder) / "0.pt")
    print("# DDP: buckets are reduced while earlier steps are replayed\n")
    size = f"{BATCH}x{2 * CHANNELS}x{SIDE}x{SIDE}"
    print(environment() + f"- {WORLD} gloo processes, {COUPLINGS} couplings, input {size},")
    print(f"  buckets of {BUCKET:g} MiB; the median of {STEPS - 2} steps\n")
    print("| mode | backward, ms | buckets | reduced before the last replay begins |")
    print("|---|---|---|---|")
    for mode, step in steps.items():
        last = step["replays"][-1][0] if step["replays"] else None
        done = sum(end <= last for _, end in step["reductions"]) if last else "no replays"
        print(f"| `{mode}` | {step['ms']:.0f} | {len(step['reductions'])} | {done} |")
    for mode, step in steps.items():
        if step["replays"]:
            print(f"\nThe backward pass of `{mode}`, {step['ms']:.0f} ms; each line is a bucket:\n")
            print("```text")
            print(f"replay  {drawn(step['replays'], '#', step['ms'])}")
            for span in step["reductions"]:
                print(f"reduce  {drawn([span], '=', step['ms'])}")
            print("```")


if __name__ == "__main__":
    main()
