"""One stack of RevNet branches in every reversible library: step time and peak memory.

    python benchmarks/bench_peers.py --blocks 4 12 --batch 64

All candidates hold the same branches (BN-ReLU-conv, twice) on streams of half the channels. One
step is forward and backward of a fixed gradient. Times are medians over interleaved rounds, with
ratios to plain backprop; for memory, see ``measure.py``. If a library fails, the report shows its
error. Needs the ``bench`` extra.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import warnings
from collections.abc import Callable

import torch
from measure import MIB, environment, growth, interleaved, step_growth
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from revzoo import ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core.guard import set_drift_limit

Pairs = list[tuple[nn.Module, nn.Module]]


def branch(channels: int) -> nn.Module:
    """The basic branch of a RevNet."""
    layers: list[nn.Module] = []
    for _ in range(2):
        conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        layers += [nn.BatchNorm2d(channels), nn.ReLU(), conv]
    return nn.Sequential(*layers)


def revzoo_stack(mode: str) -> Callable[[Pairs], nn.Module]:
    """The stack of this package in a memory mode.

    ``invert, last stored`` stores the activations of the last branch, which backward needs first;
    ``invert, no guard`` does not compare reconstructions.
    """

    def build(pairs: Pairs) -> nn.Module:
        net = ReversibleSequence([ReversibleBlock(f, g) for f, g in pairs])
        set_memory(net, mode.split(",")[0])
        if mode.endswith("last stored"):
            set_memory(net[len(net) - 1][1], "store")
        if mode.endswith("no guard"):
            set_drift_limit(net, None)
        return net

    return build


class TorchCheckpoint(nn.Module):
    """Each block under ``torch.utils.checkpoint``, non-reentrant."""

    def __init__(self, pairs: Pairs) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList(pair) for pair in pairs)

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        for f, g in self.blocks:
            x1, x2 = checkpoint(_block, f, g, x1, x2, use_reentrant=False)
        return torch.cat((x1, x2), dim=1)


def _block(f: nn.Module, g: nn.Module, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    y1 = x1 + f(x2)
    return y1, x2 + g(y1)


def memcnn_stack(pairs: Pairs) -> nn.Module:
    """MemCNN's wrapper around its additive coupling, one per block."""
    import memcnn

    couplings = [memcnn.AdditiveCoupling(f, g) for f, g in pairs]
    return nn.Sequential(*(memcnn.InvertibleModuleWrapper(c, keep_input=False) for c in couplings))


def revtorch_stack(pairs: Pairs) -> nn.Module:
    """RevTorch's sequence of its blocks."""
    import revtorch

    return revtorch.ReversibleSequence(
        nn.ModuleList(revtorch.ReversibleBlock(f, g, split_along_dim=1) for f, g in pairs)
    )


def invtorch_stack(pairs: Pairs) -> nn.Module:
    """InvTorch has no coupling: one of its modules, with forward and inverse, per block."""
    import invtorch.nn as invtorch_nn

    class Block(invtorch_nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self, f: nn.Module, g: nn.Module) -> None:
            super().__init__()
            self.f, self.g = f, g

        def function(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
            return _block(self.f, self.g, x1, x2)

        def inverse(self, y1: Tensor, y2: Tensor) -> tuple[Tensor, Tensor]:
            x2 = y2 - self.g(y1)
            return y1 - self.f(x2), x2

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(f, g) for f, g in pairs)

        def forward(self, x: Tensor) -> Tensor:
            state = x.chunk(2, dim=1)
            for block in self.blocks:
                state = block(*state)
            return torch.cat(state, dim=1)

    return Stack()


CANDIDATES: dict[str, Callable[[Pairs], nn.Module]] = {
    "revzoo store": revzoo_stack("store"),
    "revzoo recompute": revzoo_stack("recompute"),
    "revzoo invert": revzoo_stack("invert"),
    "revzoo invert, last stored": revzoo_stack("invert, last stored"),
    "revzoo invert, no guard": revzoo_stack("invert, no guard"),
    "revzoo exact": revzoo_stack("exact"),
    "torch checkpoint": TorchCheckpoint,
    "memcnn": memcnn_stack,
    "revtorch": revtorch_stack,
    "invtorch": invtorch_stack,
}


def step(name: str, args: argparse.Namespace, blocks: int) -> Callable[[], None]:
    """Forward and backward of candidate ``name`` on the same weights and images."""
    torch.manual_seed(0)
    half = args.channels // 2
    pairs = [(branch(half), branch(half)) for _ in range(blocks)]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layout = torch.channels_last if args.channels_last else torch.contiguous_format
    net = CANDIDATES[name](copy.deepcopy(pairs)).to(device, memory_format=layout)
    size = (args.batch, args.channels, args.size, args.size)
    generator = torch.Generator().manual_seed(1)
    images, gradient = (
        torch.randn(size, generator=generator).to(device, memory_format=layout) for _ in range(2)
    )

    dtype = getattr(torch, args.dtype)

    def run() -> None:
        net.zero_grad(set_to_none=False)
        # A new leaf each time: some peers resize the storage of their input to zero.
        x = images.clone().requires_grad_()
        with torch.autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            y = net(x)
        loss = (y * gradient).sum()  # does not save the output
        del y
        loss.backward()

    return run


def report(args: argparse.Namespace, blocks: int) -> None:
    """Print the table of one depth."""
    steps, failures = {}, {}
    for name in CANDIDATES:
        try:
            run = step(name, args, blocks)
            run()
            steps[name] = run
        except Exception as error:  # a peer that fails is part of the result
            failures[name] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
    timings = interleaved(steps, args.rounds)
    print(f"\n## {blocks} blocks\n")
    print("| candidate | ms a step | time over store (quartiles) | peak growth, MiB |")
    print("|---|---|---|---|")
    for name, t in timings.items():
        child = ["--memory-of", name, "--blocks", str(blocks), "--batch", str(args.batch)]
        child += ["--channels", str(args.channels), "--size", str(args.size)]
        child += ["--channels-last"] * args.channels_last + ["--dtype", args.dtype]
        mib = step_growth(steps[name], __file__, child) / MIB
        ratio = f"{t.ratio:.2f} ({t.low:.2f} to {t.high:.2f})"
        print(f"| {name} | {t.seconds * 1e3:.3g} | {ratio} | {mib:.1f} |", flush=True)
    for name, error in failures.items():
        print(f"| {name} | fails: {error} | | |")


def main() -> None:
    """Print the report; with ``--memory-of``, one peak in bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--channels-last", action="store_true", help="NHWC layout")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--memory-of", metavar="CANDIDATE")
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # deprecations in the peers
    if args.memory_of:
        run = step(args.memory_of, args, args.blocks[0])
        run()
        print(growth(run))
        return
    peers = ("memcnn", "revtorch", "invtorch")
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in peers)
    print("# One stack of branches in every library\n")
    print(environment() + f"- Peers: {versions}")
    print(
        f"- Batch {args.batch}, {args.channels} channels, {args.size}x{args.size}, {args.dtype}, "
        f"n = {args.rounds} rounds"
    )
    for blocks in args.blocks:
        report(args, blocks)


if __name__ == "__main__":
    main()
