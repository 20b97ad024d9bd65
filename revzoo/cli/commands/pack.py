"""``revzoo pack RUN/checkpoints/best.ckpt revnet38.cifar10``: publish the weights of a run.

Writes ``NAME.safetensors`` and ``NAME.json``. Model, classes and normalisation come from the
checkpoint, the figures of the test from the run's ``summary.json``, if there is one.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from revzoo._checks import Size
from revzoo._files import json_bytes, write_together
from revzoo.cli.commands._models import add_option, trained
from revzoo.cli.terminal import command_line, folded_command, status_of
from revzoo.weights.source import CHECKPOINTS, resolve_source


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("checkpoint", type=Path, help="of revzoo train, or the folder of a run")
    parser.add_argument("name", help="architecture.dataset_recipe, e.g. revnet38.cifar10")
    path = {"type": Path, "metavar": "PATH", "default": Path()}
    add_option(parser, "--output", **path, help="folder to write to (default .)")
    parser.add_argument("--recipe", help="the exact training command (default: of the run)")
    parser.add_argument("--license", required=True, help="SPDX identifier, e.g. MIT")
    parser.add_argument("--measured-on", help="of the figures: set, split, images, precision")
    parser.add_argument("--metric", action="append", default=[], metavar="NAME=VALUE")
    add_option(parser, "--image-size", help="size of the images (default: as in training)")
    parser.add_argument("--url", help="the address of the file, for downloads")
    text = "the weights of the name without a recipe"
    parser.add_argument("--default", action="store_true", help=text)


def run(args: argparse.Namespace) -> None:
    """Write both files; print their paths and a command that uses them."""
    checkpoint = Path(resolve_source(args.checkpoint))
    fields = ("name", "license", "recipe", "measured_on", "url", "default")
    facts: dict[str, Any] = {field: getattr(args, field) for field in fields}
    facts["recipe"] = args.recipe or _recipe(checkpoint)
    # the user's figures replace the run's
    facts["metrics"] = {**_summary(checkpoint), **dict(map(_metric, args.metric))}
    if facts["metrics"] and args.measured_on is None:
        raise ValueError(
            "--measured-on is needed to describe the run's figures, such as --measured-on "
            "'CIFAR-10 test, 10,000 images, float32'"
        )
    paths = publish(checkpoint, args.output, facts, size=args.image_size)
    if not facts["metrics"]:
        sys.stderr.write("no figures: the run did not test this checkpoint; --metric adds yours\n")
    sys.stdout.write("".join(f"{path}\n" for path in paths))
    command = f"{command_line('predict', paths[0])} IMAGES"
    sys.stdout.write(f"{folded_command(f'to classify images: {command}', indent=4)}\n")


def publish(
    checkpoint: Path, folder: Path, facts: Mapping[str, Any], *, size: Size | None
) -> list[Path]:
    """Write ``NAME.safetensors``, then ``NAME.json``, which describes it with these facts.

    ``size``: of the images, in pixels; None for the size in training.
    """
    with status_of("loading torch and Lightning"):
        from revzoo.models.save import pack

    restored = trained(checkpoint)
    model = restored.network
    sized = model.batch_shape(1, size or restored.image_size)[1:]
    # the user's facts replace the checkpoint's
    facts = {**restored.facts, "input_size": sized, **facts}
    data, entry = pack(model, file=f"{facts['name']}.safetensors", facts=facts)
    contents = {".safetensors": data, ".json": json_bytes(entry.plain())}
    files = {folder / f"{entry.name}{suffix}": content for suffix, content in contents.items()}
    write_together(files)
    return list(files)


def _recipe(checkpoint: Path) -> str:
    """The command that started the run."""
    from revzoo.cli.run.folder import SESSIONS_FILE, recorded_words, run_of

    run_dir = run_of(checkpoint)
    if not (run_dir / SESSIONS_FILE).is_file():
        raise ValueError(
            f"--recipe: there is no {run_dir / SESSIONS_FILE}; give the exact training command"
        )
    imports = [word for name in recorded_words(run_dir, "imports") for word in ("--import", name)]
    return shlex.join(["revzoo", "train", *imports, *recorded_words(run_dir, "overrides")])


def _summary(checkpoint: Path) -> dict[str, float]:
    """The figures of the run's test, if it tested this checkpoint."""
    from revzoo.cli.run.folder import SUMMARY_FILE, errors_naming, run_of
    from revzoo.weights.source import LAST

    path = run_of(checkpoint) / SUMMARY_FILE
    if not path.is_file():
        return {}
    with errors_naming(path):
        summary = json.loads(path.read_text())
        # without a best checkpoint, the run tested the last weights
        tested = path.parent / (summary.get("checkpoint") or f"{CHECKPOINTS}/{LAST}")
        if tested.resolve() != checkpoint.resolve():
            return {}
        # validation chose the checkpoint, so its figures are too good
        return {k: v for k, v in summary["metrics"].items() if k.startswith("test/")}


def _metric(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise ValueError(f"--metric {text}: expected NAME=VALUE, e.g. test/acc=0.931") from None
