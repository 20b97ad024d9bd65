"""``revzoo convert``: converts published weights of other programs to a folder for the zoo.

    revzoo convert irevnet irevnet.pt my_irevnet

The folder is the same as from ``save_pretrained``; ``revzoo.from_pretrained("my_irevnet")`` loads
the model.
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

from revzoo.cli.terminal import status_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("source", help="the program that wrote the file: irevnet, memcnn or revnet")
    parser.add_argument("path", type=Path, help="its file: a state_dict, NAME.index or NAME.tar.gz")
    parser.add_argument("folder", type=Path, help="the folder to write: weights, entry and card")
    parser.add_argument("--name", help="the network, if its shapes are ambiguous")
    parser.add_argument(
        "overrides",
        nargs="*",
        type=_override,
        metavar="KEY=VALUE",
        help="arguments of create_model, such as strides=1,1,2",
    )


def run(args: argparse.Namespace) -> None:
    """Convert one file."""
    with status_of("loading torch"):
        from revzoo.interop.published import load_published

    model = load_published(args.path, args.source, name=args.name, **dict(args.overrides))
    recipe = f"converted from a checkpoint of {args.source}, {args.path.name}"
    entry = model.save_pretrained(args.folder, recipe=recipe)
    sys.stdout.write(f"{args.folder}: {entry.architecture}, {entry.num_classes} classes\n")


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: expected KEY=VALUE")
    try:
        # numbers, tuples and None; any other text stays a string
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value
