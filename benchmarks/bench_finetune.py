"""Fine-tuning with few images against training from scratch: accuracy, time and memory.

    python benchmarks/bench_finetune.py --root DIR

DIR holds ``train/CLASS/*`` and ``test/CLASS/*`` with images of 3x32x32 pixels. The script draws
sets with a few classes and a few images of each, from DIR and from the embedded digits (enlarged
to 32x32). Every run trains on all images of its set, in whole epochs, for at least ``--steps``
steps, and tests its last weights on the whole test split of these classes. A seed decides the
images, the new weights and the order. All seeds use the same classes.

The learning rate of a recipe on a set is the best of ``RATES`` on held-back training images, in
one run with a further seed. No rate is chosen on the test split.

``revnet38.cifar10`` was pretrained on CIFAR-10. If DIR is that set, the comparison shows the cost
and effect of the recipes, but no transfer to unseen data. The digits and their classes are unseen.
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

from revzoo.cli.config import compose
from revzoo.cli.run.build import build_data, build_module, build_trainer
from revzoo.data import Digits
from revzoo.models import create_model
from revzoo.profiling.audit import audit
from revzoo.training import Finetuning
from revzoo.training.lightning_compat import quiet

CONFIGS = Path(__file__).parents[1] / "configs"
TUNED = ("experiment=finetune", "model.pretrained=true")
METHODS: dict[str, tuple[str, ...]] = {
    "linear probe": (*TUNED, "callbacks.finetuning.unfreeze=null"),
    "unfrozen stage by stage": (*TUNED, "callbacks.finetuning.unfreeze=[{sixth},{third}]"),
    "whole, layer decay": (*TUNED, "callbacks.finetuning=null"),
    "from scratch": ("optim=onecycle", "callbacks.batch_norm={{momentum: 0.1, warmup: false}}"),
}
SCRATCH = "from scratch"
RATES = {  # a factor of three apart
    "linear probe": (0.5, 1.5, 5.0, 15.0),
    "unfrozen stage by stage": (0.05, 0.15, 0.5, 1.5),
    "whole, layer decay": (0.05, 0.15, 0.5),
    SCRATCH: (0.05, 0.15, 0.5),
}
FEWEST_EPOCHS = 6  # a sixth and a third of a run must be different epochs


class Task(NamedTuple):
    """A source of images and the size of the set drawn from it."""

    name: str
    seen: str
    root: Path
    classes: int
    images: int
    flip: bool


def draw_subset(task: Task, folder: Path, *, seed: int, held_back: int = 0) -> None:
    """Link ``task.images`` training images of each class, and images to test on, into ``folder``.

    The images to test on are the whole test split, or ``held_back`` training images of each class.
    One more image of each class fills the validation split. It is not used, but without it the
    data module would split validation images off the training images.
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
    """Make the folder ``target`` with a link to each file."""
    target.mkdir(parents=True)
    for file in files:
        (target / file.name).symlink_to(file.absolute())


def write_digits(folder: Path) -> None:
    """Write the embedded digits as 32x32 images in class folders."""
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
    """Epochs and optimiser steps of a run; training from scratch takes twice as many."""
    per_epoch = task.classes * task.images // args.batch
    epochs = max(FEWEST_EPOCHS, math.ceil(args.steps / per_epoch))
    epochs *= 2 if method == SCRATCH else 1
    return epochs, epochs * per_epoch


def configuration(
    method: str, rate: float, folder: Path, task: Task, args: argparse.Namespace
) -> Any:
    """The configuration of a run, composed as on the command line."""
    epochs, _ = recipe(method, task, args)
    marks = {"sixth": round(epochs / 6), "third": round(epochs / 3)}
    overrides = [
        *(override.format(**marks) for override in METHODS[method]),
        *(f"optim.lr={rate}", "model=revnet38", "data=imagefolder", "trainer=cpu", "logger=none"),
        *("precision=bf16", "memory=store"),  # the fastest on a CPU
        *(f"data.root={folder}", f"data.batch_size={args.batch}", f"data.augment.flip={task.flip}"),
        *(f"trainer.max_epochs={epochs}", "trainer.limit_val_batches=0"),
    ]
    config = compose(overrides).config
    kept = {name: config["callbacks"][name] for name in ("batch_norm", "finetuning")}
    return {**config, "callbacks": kept}


class Run(NamedTuple):
    """Accuracy (0 to 1) and loss on the tested images, CPU seconds of the training."""

    accuracy: float
    loss: float
    seconds: float


def train(
    method: str, rate: float, folder: Path, task: Task, seed: int, args: argparse.Namespace
) -> Run:
    """Train and test once on the images in ``folder``."""
    config = configuration(method, rate, folder, task, args)
    with quiet():
        pl.seed_everything(seed, verbose=False)
        data = build_data(config["data"])
        data.setup("fit")
        module = build_module(config, **data.shape)
        trainer = build_trainer(config, run_dir=folder)
        start = time.process_time()
        trainer.fit(module, datamodule=data)
        seconds = time.process_time() - start
        (figures,) = trainer.test(module, datamodule=data, verbose=False)
    run = Run(figures["test/acc"], figures["test/loss"], seconds)
    line = f"{task.name} {task.classes}x{task.images} seed {seed} {method} at {rate}: {run}"
    print(line, file=sys.stderr, flush=True)
    return run


def chosen_rates(task: Task, args: argparse.Namespace) -> dict[str, float]:
    """The best rate of each method on held-back images; ties go to the lower loss."""
    with tempfile.TemporaryDirectory() as name:
        folder, seed = Path(name), args.seeds
        draw_subset(task, folder, seed=seed, held_back=args.held_back)
        chosen = {}
        for method, rates in RATES.items():
            runs = {rate: train(method, rate, folder, task, seed, args) for rate in rates}
            chosen[method] = max(rates, key=lambda r: (runs[r].accuracy, -runs[r].loss))
    return chosen


def rows(task: Task, args: argparse.Namespace) -> str:
    """The rows of one set: mean and range over the seeds, for each method."""
    rates = chosen_rates(task, args)
    found: dict[str, list[Run]] = {method: [] for method in METHODS}
    for seed in range(args.seeds):
        with tempfile.TemporaryDirectory() as name:
            draw_subset(task, Path(name), seed=seed)
            for method, rate in rates.items():
                found[method].append(train(method, rate, Path(name), task, seed, args))
    lines = []
    for method, runs in found.items():
        values = [100 * run.accuracy for run in runs]
        cells = [task.name, task.seen, task.classes, task.images, method, rates[method]]
        cells += [recipe(method, task, args)[1]]
        cells += [f"{statistics.mean(values):.1f} ({min(values):.1f} to {max(values):.1f})"]
        cells += [f"{statistics.median(run.seconds for run in runs):.1f}"]
        lines.append(" | ".join(["|", *map(str, cells), "|"]).replace("| |", "|"))
    return "\n".join(lines)


def trained_by(method: str, memory: str) -> nn.Module:
    """The network with the largest set of parameters that ``method`` ever trains."""
    model = create_model("revnet38", memory=memory)
    unfreeze = {"linear probe": None, "unfrozen stage by stage": {0: "stages.1", 1: "stem"}}
    if method in unfreeze:
        Finetuning(unfreeze=unfreeze[method]).freeze(model, epoch=0)
    return model


def memory_row(method: str, args: argparse.Namespace) -> str:
    """Activations of a step of ``method``: counted, and measured in a fresh process."""
    shape = (args.memory_batch, 3, 32, 32)
    cells = [method]
    for memory in ("store", "invert"):
        report = audit(trained_by(method, memory), shape, modes=[], real=True)
        counted = report.activation_bytes // shape[0] / MIB
        child = ["--memory-of", method, memory, "--memory-batch", str(args.memory_batch)]
        grown = int(in_own_process(__file__, child)) / MIB
        cells += [f"{counted:.2f}", f"{grown:.0f}"]
    return f"| {' | '.join(cells)} |"


def tasks(args: argparse.Namespace, digits: Path) -> list[Task]:
    """All sets, the digits first."""
    own = [
        Task(args.name, args.seen, args.root, classes, images, True)
        for images in args.images
        for classes in args.classes
    ]
    shown = [Task("digits", "no", digits, 10, images, False) for images in args.digits]
    return [*shown, *own]


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path)
    parser.add_argument("--name", default="CIFAR-10 (JPEG copy)", help="name of the set in DIR")
    parser.add_argument("--seen", default="yes, with all ten labels", help="by the pretraining?")
    parser.add_argument("--classes", type=int, nargs="*", default=[2, 5])
    parser.add_argument("--images", type=int, nargs="*", default=[20], help="per class")
    parser.add_argument("--digits", type=int, nargs="*", default=[10], help="per class")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50, help="at least; doubled from scratch")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--held-back", type=int, default=50, help="per class, for choosing rates")
    parser.add_argument("--memory-batch", type=int, default=64)
    parser.add_argument("--memory-of", nargs=2, metavar=("METHOD", "MODE"))
    args = parser.parse_args(arguments)
    if args.root is None and args.memory_of is None:
        parser.error("--root is missing: give a folder with train/CLASS/* and test/CLASS/*")
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
    print(environment(root=args.root) + f"- Batch {args.batch}, bfloat16 autocast, `store`")
    print(f"- n = {args.seeds} seeds. Accuracy: mean and range of the last weights on the whole")
    print("  test split of the classes. CPU seconds: median of the trainings")
    print(f"- Rates: the best of three or four on {args.held_back} held-back training images of")
    print("  each class, one run each with a further seed\n")
    head = "set | seen in pretraining | classes | images of each | recipe | rate | steps"
    print(f"| {head} | test accuracy, % | CPU seconds |")
    print("|---" * 9 + "|", flush=True)
    with tempfile.TemporaryDirectory() as name:
        write_digits(Path(name))
        for task in tasks(args, Path(name)):
            print(rows(task, args), flush=True)
    print("\n## Memory\n\nPeak memory of one step with the largest set of parameters that a")
    print(f"recipe ever trains, float32, batch {args.memory_batch}. The first figure counts")
    print("activations. The second is the growth of the resident process, which also holds")
    print("gradients and workspaces; each is measured in a separate process.\n")
    columns = [
        f"`{m}`, {what}" for m in ("store", "invert") for what in ("MiB per image", "grown by MiB")
    ]
    print(f"| recipe | {' | '.join(columns)} |\n|---|---|---|---|---|")
    for method in METHODS:
        print(memory_row(method, args), flush=True)


if __name__ == "__main__":
    main()
