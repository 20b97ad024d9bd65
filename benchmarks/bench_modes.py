"""Step time and peak memory of whole models in each memory mode.

    python benchmarks/bench_modes.py --models revnet38 revnet110 --batch 128

One step is forward, cross-entropy and backward on random images, by default of CIFAR's size.
Networks of torchvision and timm, such as ``torchvision:resnet50``, are made reversible. Times are
medians over interleaved rounds, with the quartiles of the ratio to ``store``. The row "store and
one more forward pass" is a lower bound for every mode that recomputes all branches. With
``--graph`` a CUDA graph holds each step, which leaves the time of the kernels; the drift guard is
off then, and ``offload`` is left out. ``--compiled`` compiles the branches, and whole networks in
``store``, as the callback ``compiled_branches`` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from measure import MIB, environment, growth, interleaved, step_growth
from torch import nn

import revzoo
from revzoo.core.guard import set_drift_limit
from revzoo.core.modes import MODES
from revzoo.training import CompiledBranches
from revzoo.training.graphed_step import captured

FLOOR = "store and one more forward pass"


def step(
    model: nn.Module, batch: int, dtype: torch.dtype, size: int = 32, *, forwards: int = 1
) -> Callable[[], None]:
    """One training step on random images, under autocast unless ``dtype`` is float32.

    Forward passes before the last of ``forwards`` run without recording.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch, 3, size, size, generator=generator).to(device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,), generator=generator).to(device)

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            for _ in range(forwards - 1):
                with torch.no_grad():
                    model(images)
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()

    return run


def build(name: str, mode: str, size: int, *, compiled: bool = False) -> nn.Module:
    """The model in training mode and channels-last layout, on a GPU if there is one."""
    torch.manual_seed(0)
    options = {"reversible_bits": 4, "reversible_size": size} if ":" in name else {}
    model = revzoo.create_model(name, memory=mode, **options)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device, memory_format=torch.channels_last)
    if compiled:
        # it compiles the children of a module
        CompiledBranches(backend="inductor" if device == "cuda" else "aot_eager").setup(
            None, nn.ModuleList([model]), "fit"
        )
    return model


def table(name: str, args: argparse.Namespace) -> str:
    """Rows of the report for one model, as Markdown."""
    dtype = getattr(torch, args.dtype)
    left_out = {"offload"} if args.graph else set()
    left_out |= {"invert"} if ":" in name else set()  # side bits are of words
    modes = [mode for mode in MODES if mode not in left_out]
    models = {
        row: build(name, "store" if row == FLOOR else row, args.size, compiled=args.compiled)
        for row in (*modes, FLOOR)
    }
    eager = {
        row: step(model, args.batch, dtype, args.size, forwards=1 + (row == FLOOR))
        for row, model in models.items()
    }
    steps, failures = {}, {}
    for row, run in eager.items():
        try:
            if args.graph:
                set_drift_limit(models[row], None)  # the guard reads values, which a graph cannot
            steps[row] = captured(run) if args.graph else run
            steps[row]()
        except revzoo.DriftError as error:  # part of the result
            failures[row] = f"| {name} | {row} | DriftError: {error.reason} | | |"
    timings = interleaved(steps, args.rounds)
    rows = []
    for mode, t in timings.items():
        child = [
            "--memory-of",
            name,
            "store" if mode == FLOOR else mode,
            "--batch",
            str(args.batch),
            "--dtype",
            args.dtype,
            "--size",
            str(args.size),
            *["--compiled"] * args.compiled,
        ]
        mib = step_growth(eager[mode], __file__, child) / MIB
        rows.append(
            f"| {name} | {mode} | {t.seconds:.3g} | {t.ratio:.2f} ({t.low:.2f} to {t.high:.2f}) "
            f"| {mib:.0f} |"
        )
    return "\n".join((*rows, *failures.values()))


def main() -> None:
    """Print the report; with ``--memory-of``, one peak in bytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["revnet38", "revnet110"])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--size", type=int, default=32, help="pixels a side (default 32)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--graph", action="store_true", help="time CUDA graphs")
    parser.add_argument("--compiled", action="store_true", help="compile the branches")
    parser.add_argument("--memory-of", nargs=2, metavar=("MODEL", "MODE"))
    args = parser.parse_args()
    if args.memory_of:
        model = build(*args.memory_of, args.size, compiled=args.compiled)
        run = step(model, args.batch, getattr(torch, args.dtype), args.size)
        run()  # the first step also allocates gradients and workspaces
        print(growth(run))
        return
    print("# Memory modes of whole models\n")
    print(
        environment()
        + f"- Batch {args.batch} of {args.size} pixels, {args.dtype}, n = {args.rounds} rounds"
    )
    print("- Branches are compiled\n" if args.compiled else "", end="")
    print("- Each step is a CUDA graph; the drift guard is off\n" if args.graph else "")
    print("| model | mode | seconds a step | time over store (quartiles) | peak growth, MiB |")
    print("|---|---|---|---|---|")
    for name in args.models:
        print(table(name, args), flush=True)


if __name__ == "__main__":
    main()
