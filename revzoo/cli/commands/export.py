"""``revzoo export NAME``: a network as a file that other programs run.

    revzoo export RUN_DIR                       # pt2: torch.export
    revzoo export revnet38.cifar10 --format onnx
    revzoo export RUN/checkpoints/best.ckpt --format pt2 --batch-size 16
    revzoo export irevnet163 --format pt2       # random weights

The command reads the file back and compares it with the network on random images before it renames
the file. Known classes and normalisation are stored in the file.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._files import file_name
from revzoo.cli.commands._models import (
    add_option,
    add_saved_bits_option,
    check_name,
    check_size,
    trained,
)
from revzoo.cli.commands.list import add_weights_option, weights_table
from revzoo.cli.terminal import folded, status_of
from revzoo.profiling.units import in_units
from revzoo.weights.source import SAVED, checkpoint_of

if TYPE_CHECKING:  # torch is imported when the command runs, not for its help
    from revzoo.interop.export import Export

_FORMATS = ("pt2", "onnx", "safetensors")
# fields of the weights' entry to store in the file; the network has classes and normalisation
_FIELDS = ("name", "license", "recipe", "metrics", "measured_on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "name",
        help="weights (revnet38.cifar10), a .safetensors file, a checkpoint (.ckpt), the folder of "
        "a run, for its best checkpoint, a folder of save_pretrained, or a model, with random "
        "weights",
    )
    help_text = "default: by the suffix of --output, or pt2"
    parser.add_argument("--format", choices=_FORMATS, help=help_text)
    parser.add_argument("--pretrained", action="store_true", help="a model's default weights")
    text = "the file to (over)write (default NAME.FORMAT)"
    add_option(parser, "--output", type=Path, metavar="PATH", help=text)
    text = "images per call (default dynamic: any number)"
    add_option(parser, "--batch-size", type=_batch, help=text)
    add_option(parser, "--image-size", help="size in pixels (default: the weights')")
    parser.add_argument("--opset", type=int, help="ONNX's opset (default: the exporter's)")
    text = "limit of the difference, relative to the largest logit"
    parser.add_argument("--tolerance", type=float, help=text)
    add_saved_bits_option(parser)
    add_weights_option(parser)


def run(args: argparse.Namespace) -> None:
    """Export, and print the file and the difference."""
    check_name(args.name, weights_table(args), weights=True)
    with status_of("loading torch"):
        from revzoo.interop.export import TOLERANCE, export

    stem = args.name.rstrip("/").rpartition("/")[2]
    # names of weights contain a dot, too: Path.stem would cut revnet38.cifar10
    for suffix in (".ckpt", ".safetensors"):
        stem = stem.removesuffix(suffix)
    suffix = args.output.suffix[1:] if args.output else ""
    kind = args.format or (suffix if suffix in _FORMATS else _FORMATS[0])
    path = args.output or Path(f"{file_name(stem)}.{kind}")
    tolerance = TOLERANCE if args.tolerance is None else args.tolerance
    with status_of(f"exporting {args.name}"):
        job = _job(args)
        check_size(job.network, args.image_size)
        largest = export(job, path, kind=kind, tolerance=tolerance)
    size = in_units(path.stat().st_size)
    line = f"{path}  {size}, difference {largest:.1e} of the largest logit (limit {tolerance:g})"
    sys.stdout.write(f"{folded(line, indent=2)}\n")


def _job(args: argparse.Namespace) -> Export:
    from revzoo.interop.export import Export
    from revzoo.models import create_model
    from revzoo.models.registry import MODELS, change_bits

    options = {"batch": args.batch_size, "opset": args.opset}
    if args.name not in MODELS and (checkpoint := checkpoint_of(Path(args.name))):
        restored = trained(checkpoint, args.bits)
        size = args.image_size or restored.image_size
        return Export(network=restored.network, image_size=size, facts=restored.facts, **options)
    # any name except a bare model's means weights
    has_weights = args.pretrained or args.name not in MODELS
    model = create_model(args.name, pretrained=has_weights, table=weights_table(args))
    change_bits(model, args.bits)
    # random weights have no classes and no normalisation
    if model.entry is None:
        return Export(network=model, image_size=args.image_size, **options)
    # with other bits, the accuracy of the entry no longer holds
    fields = _FIELDS if args.bits == SAVED else _FIELDS[:3]
    facts = {name: getattr(model.entry, name) for name in fields}
    size = args.image_size or model.trained_size
    return Export(network=model, image_size=size, facts=facts, **options)


def _batch(text: str) -> int | None:
    if text == "dynamic":
        return None
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected dynamic or a whole number >= 1")
    return int(text)
