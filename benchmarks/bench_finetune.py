"""Fine-tuning with few images against training from scratch: accuracy, time and activations.

    python benchmarks/bench_finetune.py --root DIR

DIR holds ``train/CLASS/*`` and ``test/CLASS/*`` of 3x32x32 pixels. From it, and from the embedded
digits enlarged to 32x32, sets of a few classes with a few images each are drawn; every run trains
on all of these images, in whole epochs, for at least the steps asked for, and is tested with its
last weights on the whole test split of its classes. A seed decides the images, the new
weights and the order. The classes are the same for all seeds.

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
from measure import MIB, environment
from PIL import Image
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image

from revzoo.cli.build import build_data, build_module, build_trainer
from revzoo.cli.overrides import compose_checked, to_plain
from revzoo.cli.telling import quiet
from revzoo.data import Digits
from revzoo.models import create_model
from revzoo.profiling.costs import activation_bytes
from revzoo.training import Finetuning

CONFIGS = Path(__file__).parents[1] / "configs"
TUNED = ("experiment=finetune", "model.pretrained=true")
METHODS: dict[str, tuple[str, ...]] = {
    # at the experiment's rate of 0.05 a classifier alone learns too slowly for so few steps
    "linear probe": (*TUNED, "callbacks.finetuning.unfreeze=null", "optim.lr=0.5"),
    "unfrozen stage by stage": (*TUNED, "callbacks.finetuning.unfreeze=[{sixth},{third}]"),
    "whole, layer decay": (*TUNED, "callbacks.finetuning=null"),
    "from scratch": ("optim=onecycle", "optim.lr=0.1", "callbacks.batch_norm={{momentum: 0.1}}"),
}
SCRATCH = "from scratch"


class Task(NamedTuple):
    """A source of images and what is drawn from it."""

    name: str
    root: Path
    classes: int
    images: int
    flip: bool


def draw_subset(task: Task, folder: Path, *, seed: int) -> None:
    """Link ``task.images`` training images of each class, and all test images, into ``folder``.

    A further image of each class makes the validation split that a folder must have so that no
    training image is held back; it is not used.
    """
    names = sorted(path.name for path in (task.root / "train").iterdir())
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(names[int(i)] for i in order[: task.classes]):
        files = sorted((task.root / "train" / name).iterdir())
        drawn = torch.randperm(len(files), generator=generator)[: task.images + 1]
        if len(drawn) <= task.images:
            raise SystemExit(f"{task.root / 'train' / name} has {len(files)} images: too few")
        train, val = folder / "train" / name, folder / "val" / name
        for target, chosen in ((train, drawn[:-1]), (val, drawn[-1:])):
            target.mkdir(parents=True)
            for i in chosen:
                (target / files[int(i)].name).symlink_to(files[int(i)].absolute())
        (folder / "test").mkdir(exist_ok=True)
        (folder / "test" / name).symlink_to((task.root / "test" / name).absolute())


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


def configuration(method: str, folder: Path, task: Task, args: argparse.Namespace) -> Any:
    """The recipe of ``method``, as the command line composes it."""
    steps = args.scratch_steps if method == SCRATCH else args.steps
    epochs = math.ceil(steps / (task.classes * task.images // args.batch))
    marks = {"sixth": max(1, round(epochs / 6)), "third": max(2, round(epochs / 3))}
    overrides = [
        *(override.format(**marks) for override in METHODS[method]),
        *("model=revnet38", "data=imagefolder", "trainer=cpu", "logger=none"),
        *("precision=bf16", "memory=store"),  # the quickest on a CPU
        *(f"data.root={folder}", f"data.batch_size={args.batch}", f"data.augment.flip={task.flip}"),
        *(f"trainer.max_epochs={epochs}", "trainer.limit_val_batches=0"),
    ]
    config = to_plain(compose_checked(overrides, config_dir=CONFIGS))
    kept = {name: config["callbacks"][name] for name in ("batch_norm", "finetuning")}
    return {**config, "callbacks": kept}


def accuracy(method: str, folder: Path, task: Task, seed: int, args: argparse.Namespace) -> Any:
    """Test accuracy and CPU seconds of the training of one run."""
    config = configuration(method, folder, task, args)
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
    return figures["test/acc"], seconds


def row(task: Task, args: argparse.Namespace, seconds: dict[str, list[float]]) -> str:
    """One row of the table: mean and range over the seeds for each method."""
    found: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            draw_subset(task, folder, seed=seed)
            for method in METHODS:
                value, spent = accuracy(method, folder, task, seed, args)
                told = f"{task.name} {task.classes}x{task.images} seed {seed} {method}:"
                print(told, f"{value:.4f}, {spent:.1f} s", file=sys.stderr, flush=True)
                found[method].append(100 * value)
                seconds[method].append(spent)
    cells = [f"{statistics.mean(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in found.values()]
    return " | ".join([f"| {task.name}", str(task.classes), str(task.images), *cells]) + " |"


def activations(method: str, memory: str, batch: int) -> float:
    """MiB per image that are alive at the peak of a step, with all that the method ever trains."""
    model = create_model("revnet38", memory=memory)
    unfreeze = {"linear probe": None, "unfrozen stage by stage": {0: "stages.1", 1: "stem"}}
    if method in unfreeze:
        module = _as_lightning(model)
        tuning = Finetuning(unfreeze=unfreeze[method])
        trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
        tuning.setup(trainer, module, "fit")
        tuning.on_train_start(trainer, module)
    return activation_bytes(model, torch.randn(batch, 3, 32, 32)) / MIB


def _as_lightning(model: nn.Module) -> pl.LightningModule:
    module = pl.LightningModule()
    module.model = model
    return module


def tasks(args: argparse.Namespace, digits: Path) -> list[Task]:
    """All sets that are compared, the digits first."""
    own = [
        Task(args.name, args.root, classes, images, True)
        for classes in args.classes
        for images in args.images
    ]
    return [*(Task("digits", digits, 10, images, False) for images in args.digits), *own]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--name", default="CIFAR-10", help="what to call the set in the table")
    parser.add_argument("--classes", type=int, nargs="*", default=[2, 5])
    parser.add_argument("--images", type=int, nargs="*", default=[20], help="per class")
    parser.add_argument("--digits", type=int, nargs="*", default=[10], help="per class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--scratch-steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args(arguments)
    print("# Fine-tuning revnet38.cifar10 with few images\n")
    print(environment() + f"- Batch {args.batch}, {args.seeds} seeds\n")
    print(" | ".join(["| set", "classes", "images of each", *METHODS]) + " |")
    print("|---" * (3 + len(METHODS)) + "|", flush=True)
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    with tempfile.TemporaryDirectory() as name:
        write_digits(Path(name))
        for task in tasks(args, Path(name)):
            print(row(task, args, seconds), flush=True)
    print("\n| | steps | CPU seconds of a run | `store`, MiB per image | `invert`, MiB per image |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        steps = args.scratch_steps if method == SCRATCH else args.steps
        mib = [activations(method, memory, args.batch) for memory in ("store", "invert")]
        spent = statistics.median(seconds[method])
        print(f"| {method} | {steps} | {spent:.1f} | {mib[0]:.2f} | {mib[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
