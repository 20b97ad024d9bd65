"""An epoch of ``revzoo train`` with and without ``trainer.cuda_graph``.

    python benchmarks/bench_train_graph.py --models revnet38 --batch 512 --precision bf16

Each run trains two epochs on random images of CIFAR's size, with the default callbacks but no
validation; the second epoch counts. The runs take turns. Without a GPU both run without a graph.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from bench_training import RandomCIFAR, quartiles
from measure import environment

from revzoo.cli.config import compose
from revzoo.cli.run.build import apply_precision, build_module, build_trainer
from revzoo.training.callbacks.cuda_graph import CudaGraph
from revzoo.training.lightning_compat import quiet

QUIET = (
    "data=cifar10",
    "data.augment.chunk=32",
    "logger=none",
    "callbacks.best_checkpoint=null",
    "callbacks.last_checkpoint=null",
    "callbacks.progress_bar=null",
    # it changes the first 890 steps, which would run without the graph
    "callbacks.batch_norm.warmup=false",
    "trainer.limit_val_batches=0",
    "trainer.max_epochs=2",
)


def epoch(overrides: tuple[str, ...], graph: str) -> tuple[float, int]:
    """Seconds of the second epoch, and how often a graph was captured."""
    config: dict[str, Any] = compose((*QUIET, *overrides, f"trainer.cuda_graph={graph}")).config
    apply_precision(config["precision"])
    torch.manual_seed(0)
    data = RandomCIFAR(batch_size=config["data"]["batch_size"], augment=config["data"]["augment"])
    data.setup("fit")
    module = build_module(config, **data.shape)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = build_trainer(config, run_dir=Path(folder))
        trainer.fit(module, datamodule=data)
    captures = sum(c.captures for c in trainer.callbacks if isinstance(c, CudaGraph))
    return float(trainer.callback_metrics["footprint/epoch_seconds"]), captures


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["revnet38", "revnet110"])
    parser.add_argument("--modes", nargs="+", default=["store", "exact"])
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--images", type=int, default=51200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", default="bf16", choices=["fp32", "bf16"])
    args = parser.parse_args()
    RandomCIFAR.count = args.images
    print("# Epochs of revzoo train as CUDA graphs\n")
    print(environment() + f"- Batch {args.batch}, {args.precision}, n = {args.rounds} rounds\n")
    print("| model | mode | cuda_graph | captures | s an epoch | time over false (quartiles) |")
    print("|---|---|---|---|---|---|")
    for model in args.models:
        for mode in args.modes:
            sizes = (f"data.batch_size={args.batch}", f"precision={args.precision}")
            overrides = (f"model={model}", f"memory={mode}", *sizes)
            found: dict[str, list[tuple[float, int]]] = {"false": [], "auto": []}
            for _ in range(args.rounds):
                for graph, runs in found.items():
                    runs.append(epoch(overrides, graph))
            base = [seconds for seconds, _ in found["false"]]
            for graph, runs in found.items():
                times = [seconds for seconds, _ in runs]
                ratio = quartiles([t / b for t, b in zip(times, base, strict=True)])
                middle, captures = statistics.median(times), runs[-1][1]
                row = f"| {model} | {mode} | {graph} | {captures} | {middle:.3g} | {ratio} |"
                print(row, flush=True)


if __name__ == "__main__":
    main()
