"""``revzoo pack RUN/checkpoints/best.ckpt revnet38.cifar10``: weights to publish from a training.

Writes ``NAME.safetensors`` and ``NAME.json``. What the checkpoint knows is taken from it: model,
classes, normalisation; the figures of the test from the run's ``summary.json``, where there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported when the command runs, not for its help
    from revzoo.weights.entry import WeightsEntry


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="written by revzoo train")
    parser.add_argument("name", help="architecture.dataset_recipe, e.g. revnet38.cifar10")
    parser.add_argument("--out", type=Path, default=Path(), help="folder to write to (default .)")
    parser.add_argument("--recipe", required=True, help="the exact command that trained it")
    parser.add_argument("--license", required=True, help="SPDX identifier, e.g. MIT")
    parser.add_argument("--measured-on", required=True, help="set, split, images, precision")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--size", type=int, help="side of the images; default: the size trained on")
    parser.add_argument("--url", help="where the file will be downloaded from")
    parser.add_argument("--default", action="store_true", help="what the bare name will mean")


def run(args: argparse.Namespace) -> None:
    """Write both files and print their paths.

    Raises:
        ValueError: a metric is no number.
        WeightsError: the checkpoint is not one, or a field is not valid; nothing is written.
    """
    given = {"license": args.license, "recipe": args.recipe, "measured_on": args.measured_on}
    facts: dict[str, Any] = {**given, "url": args.url, "default": args.default}
    metrics = {**_summary(args.checkpoint), **dict(map(_metric, args.metric))}
    facts |= {"name": args.name, "metrics": metrics}
    from revzoo.cli.run.errors import user_errors

    with user_errors():
        paths = publish(args.checkpoint, args.out, facts, size=args.size)
    sys.stdout.write("".join(f"{path}\n" for path in paths))


def publish(
    checkpoint: Path, folder: Path, facts: Mapping[str, Any], *, size: int | None
) -> list[Path]:
    """Write ``NAME.safetensors`` and ``NAME.json``, the weights before what describes them.

    Args:
        checkpoint: of a run.
        folder: made if need be.
        facts: fields of the entry; ``name`` among them.
        size: side of the images in pixels; None for the size trained on.

    Raises:
        CheckpointError: it is damaged, does not say what it is of, or says more than plain values.
        WeightsError: there is NaN or Inf in it, or a fact is not valid.
    """
    from revzoo.models import ImageNetwork
    from revzoo.models.save import pack
    from revzoo.training.checkpoint.restore import restore

    restored = restore(checkpoint)
    model = restored.module.model
    assert isinstance(model, ImageNetwork), "restore builds models of the zoo"
    side = size or restored.image_size or model.image_size
    described = {**restored.facts, "input_size": (model.in_chans, side, side)}
    name = facts["name"]
    data, entry = pack(model, file=f"{name}.safetensors", facts={**described, **facts})
    return _write(folder, entry, data)


def _write(folder: Path, entry: WeightsEntry, data: bytes) -> list[Path]:
    from revzoo._files import write_atomically
    from revzoo.models.save import json_of

    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{entry.name}{suffix}" for suffix in (".safetensors", ".json")]
    for path, content in zip(paths, (data, json_of(entry)), strict=True):
        write_atomically(path, content)
    return paths


def _summary(checkpoint: Path) -> dict[str, float]:
    """The figures of the run's test."""
    path = checkpoint.absolute().parent.parent / "summary.json"
    if not path.is_file():
        return {}
    figures = json.loads(path.read_text())["metrics"]
    return {k: v for k, v in figures.items() if k.startswith("test/")}


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--metric {text}: expected NAME=VALUE, e.g. test/acc=0.931") from None
