"""A training loop with and without a CUDA graph, against the kernels alone.

    python benchmarks/bench_graphed.py --models revnet38 revnet110 --batch 512 --dtype bfloat16

Images and labels lie on the device. "Loop" is forward, cross-entropy, backward and a fused SGD;
"graphed" is :func:`revzoo.graphed_step` with the same. Without a GPU the graphed step runs as the
loop does. The ratio is to the loop in the same mode and round; an epoch is 50,000 images.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import environment, interleaved
from torch import nn

import revzoo


def steps(name: str, mode: str, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """The two training steps of one model in one mode, with separate weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, args.dtype)
    images = torch.randn(args.batch, 3, 32, 32, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch,), device=device)
    autocast = torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32)
    nets = [revzoo.create_model(name, memory=mode).to(device) for _ in range(2)]
    nets = [net.to(memory_format=torch.channels_last) for net in nets]
    optimizers = [torch.optim.SGD(n.parameters(), 1e-3, momentum=0.9, fused=True) for n in nets]
    loss = nn.functional.cross_entropy

    def loop() -> None:
        optimizers[0].zero_grad()
        with autocast:
            value = loss(nets[0](images), labels)
        value.backward()
        optimizers[0].step()

    with autocast:
        graphed = revzoo.graphed_step(nets[1], loss, optimizers[1], (images, labels))
    print(f"<!-- {name} {mode}: {graphed.reason or 'a graph'} -->")
    return {"loop": loop, "graphed": lambda: graphed(images, labels)}


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["revnet38", "revnet110"])
    parser.add_argument("--modes", nargs="+", default=["store", "recompute", "invert", "exact"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    args = parser.parse_args()
    print("# Training steps as CUDA graphs\n")
    print(environment() + f"- Batch {args.batch}, {args.dtype}, n = {args.rounds} rounds\n")
    print("| model | mode | step | ms a step | time over the loop (quartiles) | s an epoch |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        for mode in args.modes:
            for kind, t in interleaved(steps(name, mode, args), args.rounds).items():
                ratio = f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})"
                epoch = 50_000 / args.batch * t.seconds
                row = (
                    f"| {name} | {mode} | {kind} | {t.seconds * 1e3:.3g} | {ratio} | {epoch:.3g} |"
                )
                print(row, flush=True)


if __name__ == "__main__":
    main()
