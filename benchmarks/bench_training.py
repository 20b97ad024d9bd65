"""Images per second of ``revzoo train`` against bare loops, and the time until the first step.

    python benchmarks/bench_training.py --rounds 21

It uses the trainer of ``revzoo train``, with the default callbacks and loggers, and the model of
the data's experiment. Each round runs a few of its steps and as many steps of two bare loops, on
networks with the same initial weights:

- step alone: batches prepared beforehand;
- with data: same loader, augmentation, loss and optimiser; no metrics, no logs.

A callback runs the bare loops between two steps of Lightning, so a slow moment of a shared machine
hits all three. It times whole cycles of Lightning, with everything between two batches; validation
and checkpoints, once an epoch, are not included. Two clocks measure the time: CPU time of the
process, which other processes hardly change, and wall time.

The images of CIFAR's size are random bytes; the speed does not depend on their content.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from measure import environment
from torch import Tensor

from revzoo.cli.config import compose
from revzoo.cli.run.build import build_data, build_module, build_trainer, for_task
from revzoo.data import ImageData
from revzoo.data.images import TensorImages
from revzoo.training import Classifier, build_optimizer, build_schedule
from revzoo.training.lightning_compat import quiet

ROOT = Path(__file__).parents[1]
Batch = tuple[Tensor, Tensor]
TASKS = {
    "digits": "data=digits",
    "shapes": "experiment=segmentation",
    "blobs3d": "experiment=volumes",
    "cifar": "data=cifar10",
}
LOOPS = ("revzoo train", "bare loop with data", "bare step alone")
FIRST_STEP = (
    "trainer.max_steps=1",
    "trainer.limit_val_batches=0",
    "test=false",
    "callbacks.best_checkpoint=null",
)


class Times(NamedTuple):
    """Seconds of CPU time and of wall time."""

    cpu: float
    wall: float


class RandomCIFAR(ImageData):
    """Random bytes of CIFAR's size, held in memory."""

    count = 2560  # images

    def read(self, split: str) -> TensorImages | None:
        if split == "val":
            return None
        generator = torch.Generator().manual_seed(0)
        size = (self.count, 3, 32, 32)
        images = torch.randint(256, size, dtype=torch.uint8, generator=generator)
        return TensorImages(images, torch.arange(self.count) % 10, classes=list("0123456789"))


class BareLoop:
    """The minimum of a training loop: batch, loss, gradient, step.

    Args:
        module: holds the network and its recipe.
        batches: an endless iterator of augmented, normalised batches on the device.
    """

    def __init__(self, module: Classifier, batches: Iterator[Batch]) -> None:
        self.module, self.batches = module, batches
        self.optimizer = build_optimizer(module.model, module.optim)
        self.schedule = build_schedule(self.optimizer, module.optim, total_steps=100_000)

    def __call__(self, steps: int) -> None:
        for images, labels in islice(self.batches, steps):
            self.optimizer.zero_grad()
            loss, _ = self.module.loss_and_logits(images, labels)
            loss.backward()
            self.optimizer.step()
            self.schedule.step()


class Turns(pl.Callback):
    """Times ``steps`` steps of Lightning, then of each bare loop, in every round."""

    def __init__(self, loops: dict[str, BareLoop], *, steps: int, rounds: int) -> None:
        self.loops, self.steps, self.rounds = loops, steps, rounds
        self.seconds: dict[str, list[Times]] = {name: [] for name in LOOPS}
        self._since = Times(0.0, 0.0)
        self._count = -steps  # the first steps warm up

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if self._count == self.steps:
            self.seconds[LOOPS[0]].append(since(self._since))
            for name, loop in self.loops.items():
                start = now()
                loop(self.steps)
                self.seconds[name].append(since(start))
            trainer.should_stop = len(self.seconds[LOOPS[0]]) == self.rounds
            self._count = 0
        if self._count <= 0:
            self._since = now()
        self._count += 1

    def on_train_epoch_end(self, *args: Any) -> None:
        self._count = 0  # discard a cycle with the end of an epoch, which includes validation


def now() -> Times:
    """The time on both clocks."""
    return Times(time.process_time(), time.perf_counter())


def since(start: Times) -> Times:
    """Seconds by each clock."""
    return Times(*(end - begin for begin, end in zip(start, now(), strict=True)))


def with_data(data: ImageData) -> Iterator[Batch]:
    """An endless iterator of batches, epoch after epoch."""
    while True:
        for images, labels in data.train_dataloader():
            if data.task == "segmentation":
                yield data._augmented_masks(images, labels, None)
            else:
                yield data.transform(images, training=True), labels


def make(task: str, config: dict[str, Any]) -> tuple[ImageData, Classifier]:
    """Data and module; every call returns equal ones."""
    data = build_data(config["data"])
    if task == "cifar":
        data = RandomCIFAR(batch_size=data.batch_size, augment=data.augment)
    data.setup("fit")
    torch.manual_seed(0)
    return data, build_module(for_task(config, data.task), **data.shape)


def compare(task: str, *, steps: int, rounds: int) -> tuple[dict[str, list[Times]], int]:
    """Seconds of each loop in each round, and images a step."""
    # store: what memory=auto chooses with room, and the fastest step
    overrides = (TASKS[task], "memory=store", "trainer=cpu", "trainer.max_epochs=1000")
    config = compose(overrides).config
    data, module = make(task, config)
    fed, fixed = make(task, config), make(task, config)
    loops = {
        LOOPS[1]: BareLoop(fed[1], with_data(fed[0])),
        LOOPS[2]: BareLoop(fixed[1], cycle(list(islice(with_data(fixed[0]), steps)))),
    }
    for loop in loops.values():
        loop(steps)
    turns = Turns(loops, steps=steps, rounds=rounds)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = build_trainer(for_task(config, data.task), run_dir=Path(folder))
        trainer.callbacks.append(turns)
        trainer.fit(module, datamodule=data)
    return turns.seconds, data.batch_size


def rows(task: str, seconds: dict[str, list[Times]], images: int) -> Iterator[str]:
    """The rows of one task: medians, and quartiles of the ratios within a round."""
    base = seconds[LOOPS[-1]]
    for name, times in seconds.items():
        rate = images / statistics.median(t.cpu for t in times)
        pairs = list(zip(base, times, strict=True))
        cpu, wall = (quartiles([alone[i] / t[i] for alone, t in pairs]) for i in range(2))
        yield f"| {task} | {name} | {rate:.0f} | {cpu} | {wall} |"


def quartiles(values: list[float]) -> str:
    """Median and first to third quartile."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def first_step() -> tuple[float, float]:
    """Wall and CPU seconds of a one-step run on digits, from start to exit."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), *FIRST_STEP]
        command += [f"hydra.run.dir={folder}/run", "trainer=cpu"]
        start = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        if status:
            raise RuntimeError(f"{' '.join(command)} ended with status {status}")
        return time.perf_counter() - start, usage.ru_utime + usage.ru_stime


def main() -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--steps", type=int, default=10, help="steps of each loop in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--starts", type=int, default=5)
    args = parser.parse_args()
    print("# Training through revzoo train against bare loops\n")
    print(environment() + f"- n = {args.rounds} rounds of {args.steps} steps\n")
    print("| task | loop | images per CPU second | speed over the step alone | by the wall |")
    print("|---|---|---|---|---|")
    for task in args.tasks:
        seconds, batch = compare(task, steps=args.steps, rounds=args.rounds)
        print("\n".join(rows(task, seconds, batch * args.steps)), flush=True)
    if args.starts:
        starts = [first_step() for _ in range(args.starts)]
        wall, cpu = ([f"{s:.1f}" for s in sorted(column)] for column in zip(*starts, strict=True))
        load = os.getloadavg()[0]
        print(f"\n`python train.py {' '.join(FIRST_STEP)}` on digits, from start to exit, ", end="")
        print(f"n = {args.starts}, load average {load:.1f}: CPU {', '.join(cpu)} s; ", end="")
        print(f"wall {', '.join(wall)} s.")


if __name__ == "__main__":
    main()
