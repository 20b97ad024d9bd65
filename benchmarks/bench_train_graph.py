"""An epoch of ``revzoo train`` with and without ``trainer.cuda_graph``.

    python benchmarks/bench_train_graph.py --models revnet38 --batch 512 --precision bf16

Each run trains two epochs on random images of CIFAR's size, with the default callbacks but no
validation; the second epoch counts. The runs take turns. Without a GPU both run without a graph.
"Over its kernels" divides the epoch by as many replays of the graph alone: what is above 1 is the
time of the trainer, the loader and the logs.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from bench_training import RandomCIFAR, quartiles
from measure import environment

from revzoo.cli.config import compose
from revzoo.cli.run.build import apply_precision, build_module, build_trainer
from revzoo.profiling.clock import now
from revzoo.training.callbacks.cuda_graph import CudaGraph
from revzoo.training.lightning_compat import callbacks_of, quiet

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


REPLAYS = 50


class Epoch(NamedTuple):
    """One run: seconds of its second epoch; of as many replays, NaN without a graph."""

    seconds: float
    kernels: float
    captures: int


class Replays(pl.Callback):
    """Times the graph alone when training has ended."""

    seconds = math.nan  # of one replay

    def on_train_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Replay the last step; the weights change once more."""
        for graph in callbacks_of(trainer, CudaGraph):
            if graph._replay is not None:
                device = trainer.strategy.root_device
                start = now(device)
                for _ in range(REPLAYS):
                    graph._replay()
                self.seconds = (now(device) - start) / REPLAYS


def epoch(overrides: tuple[str, ...], graph: str) -> Epoch:
    """Train with and without a graph."""
    config: dict[str, Any] = compose((*QUIET, *overrides, f"trainer.cuda_graph={graph}")).config
    apply_precision(config["precision"])
    torch.manual_seed(0)
    data = RandomCIFAR(batch_size=config["data"]["batch_size"], augment=config["data"]["augment"])
    data.setup("fit")
    module = build_module(config, **data.shape)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = build_trainer(config, run_dir=Path(folder))
        trainer.callbacks.append(replays := Replays())
        trainer.fit(module, datamodule=data)
    captures = sum(c.captures for c in callbacks_of(trainer, CudaGraph))
    seconds = float(trainer.callback_metrics["footprint/epoch_seconds"])
    return Epoch(seconds, replays.seconds * int(trainer.num_training_batches), captures)


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
    print(
        "| model | mode | cuda_graph | captures | s an epoch | time over false (quartiles) "
        "| over its kernels |"
    )
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        for mode in args.modes:
            sizes = (f"data.batch_size={args.batch}", f"precision={args.precision}")
            overrides = (f"model={model}", f"memory={mode}", *sizes)
            found: dict[str, list[Epoch]] = {"false": [], "auto": []}
            for _ in range(args.rounds):
                for graph, runs in found.items():
                    runs.append(epoch(overrides, graph))
            base = [run.seconds for run in found["false"]]
            kernels = statistics.median(run.kernels for run in found["auto"])
            for graph, runs in found.items():
                times = [run.seconds for run in runs]
                ratio = quartiles([t / b for t, b in zip(times, base, strict=True)])
                middle, captures = statistics.median(times), runs[-1].captures
                row = f"| {model} | {mode} | {graph} | {captures} | {middle:.3g} | {ratio} "
                print(row + f"| {middle / kernels:.2f} |", flush=True)


if __name__ == "__main__":
    main()
