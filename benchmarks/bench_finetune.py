"""Fine-tuning with few images against training from scratch: accuracy, time and memory.

    python benchmarks/bench_finetune.py --root DIR

DIR holds ``train/CLASS/*`` and ``test/CLASS/*`` of 3x32x32 pixels. From it, and from the embedded
digits enlarged to 32x32, sets of a few classes with a few images each are drawn; every run trains
on all of these images, in whole epochs, for at least the steps asked for, and is tested with its
last weights on the whole test split of its classes. A seed decides the images, the new
weights and the order. The classes are the same for all seeds.

Each recipe has a rate of its own on each set: the best of ``RATES`` on training images that were
held back, in a run of a further seed. No rate is chosen on the test split.

``revnet38.cifar10`` has seen CIFAR-10: where DIR is that set, the comparison shows what the recipes
do and cost, and no transfer to unseen data; the digits are classes and images it has not seen.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from bench_modes import step
from measure import MIB, environment, growth, in_own_process
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image

from revzoo.cli.config.build import build_data, build_module, build_trainer
from revzoo.cli.config.compose import compose_checked, to_plain
from revzoo.cli.run.errors import quiet
from revzoo.data import Digits
from revzoo.models import create_model
from revzoo.profiling.costs import activation_bytes
from revzoo.training import Finetuning

CONFIGS = Path(__file__).parents[1] / "configs"
TUNED = ("experiment=finetune", "model.pretrained=true")
METHODS: dict[str, tuple[str, ...]] = {
    "linear probe": (*TUNED, "callbacks.finetuning.unfreeze=null"),
    "unfrozen stage by stage": (*TUNED, "callbacks.finetuning.unfreeze=[{sixth},{third}]"),
    "whole, layer decay": (*TUNED, "callbacks.finetuning=null"),
    "from scratch": ("optim=onecycle", "callbacks.batch_norm={{momentum: 0.1, warmup: false}}"),
}
SCRATCH = "from scratch"
RATES = {  # of new layers and whole networks in so few steps, a factor of three apart
    "linear probe": (0.5, 1.5, 5.0, 15.0),
    "unfrozen stage by stage": (0.05, 0.15, 0.5, 1.5),
    "whole, layer decay": (0.05, 0.15, 0.5),
    SCRATCH: (0.05, 0.15, 0.5),
}
FEWEST_EPOCHS = 6  # so that a sixth and a third of a run are different epochs


class Task(NamedTuple):
    """A source of images and what is drawn from it."""

    name: str
    seen: str
    root: Path
    classes: int
    images: int
    flip: bool


def draw_subset(task: Task, folder: Path, *, seed: int, held_back: int = 0) -> None:
    """Link ``task.images`` training images of each class, and what tests them, into ``folder``.

    That are all test images, or so many ``held_back`` training images of each class. A further
    image of each class makes the validation split that a folder must have so that no training
    image is taken for it; it is not used.
    """
    names = sorted(path.name for path in (task.root / "train").iterdir())
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(names[int(i)] for i in order[: task.classes]):
        files = sorted((task.root / "train" / name).iterdir())
        drawn = torch.randperm(len(files), generator=generator)[: task.images + 1 + held_back]
        if len(drawn) <= task.images + held_back:
            raise SystemExit(f"{task.root / 'train' / name} has {len(files)} images: too few")
        chosen = [files[int(i)] for i in drawn]
        link(chosen[: task.images], folder / "train" / name)
        link(chosen[task.images : task.images + 1], folder / "val" / name)
        tested = sorted((task.root / "test" / name).iterdir())
        link(chosen[task.images + 1 :] if held_back else tested, folder / "test" / name)


def link(files: Sequence[Path], target: Path) -> None:
    """A new folder of links to the files."""
    target.mkdir(parents=True)
    for file in files:
        (target / file.name).symlink_to(file.absolute())


def write_digits(folder: Path) -> None:
    """The embedded digits as 32x32 images in class folders."""
    data = Digits()
    for split in ("train", "test"):
        images = data.read(split)  # type: ignore[arg-type]
        assert images is not None
        for i in range(len(images)):
            pixels, label = images[i]
            target = folder / split / str(int(label))
            target.mkdir(parents=True, exist_ok=True)
            picture = to_pil_image(pixels * 15)  # 16 becomes 240
            picture.resize((32, 32), Image.Resampling.BILINEAR).save(target / f"{i:04}.png")


def recipe(method: str, task: Task, args: argparse.Namespace) -> tuple[int, int]:
    """Epochs and optimiser steps of a run; from scratch twice as many."""
    per_epoch = task.classes * task.images // args.batch
    epochs = max(FEWEST_EPOCHS, math.ceil(args.steps / per_epoch))
    epochs *= 2 if method == SCRATCH else 1
    return epochs, epochs * per_epoch


def configuration(
    method: str, rate: float, folder: Path, task: Task, args: argparse.Namespace
) -> Any:
    """The recipe of ``method``, as the command line composes it."""
    epochs, _ = recipe(method, task, args)
    marks = {"sixth": round(epochs / 6), "third": round(epochs / 3)}
    overrides = [
        *(override.format(**marks) for override in METHODS[method]),
        *(f"optim.lr={rate}", "model=revnet38", "data=imagefolder", "trainer=cpu", "logger=none"),
        *("precision=bf16", "memory=store"),  # the quickest on a CPU
        *(f"data.root={folder}", f"data.batch_size={args.batch}", f"data.augment.flip={task.flip}"),
        *(f"trainer.max_epochs={epochs}", "trainer.limit_val_batches=0"),
    ]
    config = to_plain(compose_checked(overrides))
    kept = {name: config["callbacks"][name] for name in ("batch_norm", "finetuning")}
    return {**config, "callbacks": kept}


class Run(NamedTuple):
    """Accuracy (in parts of one) and loss on what was tested, CPU seconds of the training."""

    accuracy: float
    loss: float
    seconds: float


def train(
    method: str, rate: float, folder: Path, task: Task, seed: int, args: argparse.Namespace
) -> Run:
    """One run on what lies in ``folder``."""
    config = configuration(method, rate, folder, task, args)
    with quiet():
        pl.seed_everything(seed, verbose=False)
        data = build_data(config["data"])
        data.setup("fit")
        module = build_module(config, data)
        trainer = build_trainer(config, run_dir=folder)
        start = time.process_time()
        trainer.fit(module, datamodule=data)
        seconds = time.process_time() - start
        (figures,) = trainer.test(module, datamodule=data, verbose=False)
    run = Run(figures["test/acc"], figures["test/loss"], seconds)
    told = f"{task.name} {task.classes}x{task.images} seed {seed} {method} at {rate}: {run}"
    print(told, file=sys.stderr, flush=True)
    return run


def chosen_rates(task: Task, args: argparse.Namespace) -> dict[str, float]:
    """The rate of each method that is best on held-back images; of equal ones, by the loss."""
    with tempfile.TemporaryDirectory() as name:
        folder, seed = Path(name), args.seeds
        draw_subset(task, folder, seed=seed, held_back=args.held_back)
        chosen = {}
        for method, rates in RATES.items():
            runs = {rate: train(method, rate, folder, task, seed, args) for rate in rates}
            chosen[method] = max(rates, key=lambda r: (runs[r].accuracy, -runs[r].loss))
    return chosen


def rows(task: Task, args: argparse.Namespace) -> str:
    """The rows of a set: for each method mean and range over the seeds."""
    rates = chosen_rates(task, args)
    found: dict[str, list[Run]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            draw_subset(task, Path(name), seed=seed)
            for method, rate in rates.items():
                found[method].append(train(method, rate, Path(name), task, seed, args))
    told = []
    for method, runs in found.items():
        values = [100 * run.accuracy for run in runs]
        cells = [task.name, task.seen, task.classes, task.images, method, rates[method]]
        cells += [recipe(method, task, args)[1]]
        cells += [f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"]
        cells += [f"{statistics.median(run.seconds for run in runs):.1f}"]
        told.append(" | ".join(["|", *map(str, cells), "|"]).replace("| |", "|"))
    return "\n".join(told)


def trained_by(method: str, memory: str) -> nn.Module:
    """The network as ``method`` trains it when most of it is unfrozen."""
    model = create_model("revnet38", memory=memory)
    unfreeze = {"linear probe": None, "unfrozen stage by stage": {0: "stages.1", 1: "stem"}}
    if method in unfreeze:
        Finetuning(unfreeze=unfreeze[method]).freeze(model, epoch=0)
    return model


def memory_row(method: str, args: argparse.Namespace) -> str:
    """What a step of ``method`` keeps: counted, and measured in a process of its own."""
    images = torch.randn(args.memory_batch, 3, 32, 32)
    cells = [method]
    for memory in ("store", "invert"):
        counted = activation_bytes(trained_by(method, memory), images) / MIB
        child = ["--memory-of", method, memory, "--memory-batch", str(args.memory_batch)]
        grown = int(in_own_process(__file__, child)) / MIB
        cells += [f"{counted:.2f}", f"{grown:.0f}"]
    return f"| {' | '.join(cells)} |"


def tasks(args: argparse.Namespace, digits: Path) -> list[Task]:
    """All sets that are compared, the digits first."""
    own = [
        Task(args.name, args.seen, args.root, classes, images, True)
        for images in args.images
        for classes in args.classes
    ]
    shown = [Task("digits", "no", digits, 10, images, False) for images in args.digits]
    return [*shown, *own]


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--name", default="CIFAR-10 (JPEG copy)", help="what DIR holds")
    parser.add_argument("--seen", default="yes, with all ten labels", help="in the pretraining?")
    parser.add_argument("--classes", type=int, nargs="*", default=[2, 5])
    parser.add_argument("--images", type=int, nargs="*", default=[20], help="per class")
    parser.add_argument("--digits", type=int, nargs="*", default=[10], help="per class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="at least; twice from scratch")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--held-back", type=int, default=50, help="per class, to choose rates")
    parser.add_argument("--memory-batch", type=int, default=64)
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "MODE"))
    args = parser.parse_args(arguments)
    if args.root is None and args.memory_of is None:
        parser.error("--root is needed: a folder with train/CLASS/* and test/CLASS/*")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report; with ``--memory-of``, one peak in bytes."""
    args = options(arguments)
    if args.memory_of:
        run = step(trained_by(*args.memory_of), args.memory_batch, torch.float32)
        run()  # the first step also allocates gradients and workspaces
        print(growth(run))
        return
    print("# Fine-tuning revnet38.cifar10 with few images\n")
    print(environment(root=args.root) + f"- Batch {args.batch}; accuracy: mean and range of")
    print(
        f"  {args.seeds} seeds, the last weights on the whole test split of the classes; seconds:"
    )
    print("  median CPU time of a training, bfloat16 autocast, `store`")
    print(f"- Rates: the best of three or four on {args.held_back} held-back training images")
    print("  of each class, in one run each of a further seed\n")
    head = "set | seen in pretraining | classes | images of each | recipe | rate | steps"
    print(f"| {head} | test accuracy, % | CPU seconds |")
    print("|---" * 9 + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        write_digits(Path(name))
        for task in tasks(args, Path(name)):
            print(rows(task, args), flush=True)
    print("\nPeak memory of a step with the most that a recipe ever trains, float32, batch")
    print(f"{args.memory_batch}: activations, counted, and growth of the resident process, which")
    print("also holds gradients and workspaces, each measured in a process of its own.\n")
    columns = [
        f"`{m}`, {what}" for m in ("store", "invert") for what in ("MiB per image", "grown by MiB")
    ]
    print(f"| recipe | {' | '.join(columns)} |\n|---|---|---|---|---|")
    for method in METHODS:
        print(memory_row(method, args), flush=True)


if __name__ == "__main__":
    main()
