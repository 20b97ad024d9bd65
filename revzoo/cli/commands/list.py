"""``revzoo list 'revnet*'``: names of models; with ``--pretrained``, of weights.

    revzoo list                   all models of the zoo
    revzoo list 'torchvision:*'   networks of torchvision; 'timm:*' of timm

Does not import torch, so it answers at once.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from importlib.resources import files

from revzoo._libraries import LIBRARIES, library_hint, matching_names, unknown_name
from revzoo.weights.table import SHIPPED, WeightsTable


def model_names() -> list[str]:
    """The names of the models' configuration files: each model of the zoo has one."""
    # files, not the registry of models, which imports torch
    folder = files("revzoo.configs") / "model"
    names = {f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml")}
    return sorted(names.difference(LIBRARIES))  # such a file has the options of all its networks


def add_weights_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--weights``, an option of several subcommands."""
    parser.add_argument(
        "--weights",
        metavar="DIR",
        action="append",
        help="a folder of weights (NAME.json) that replaces the package's table; repeatable",
    )


def weights_table(args: argparse.Namespace) -> WeightsTable:
    """The table of weights from ``--weights``, or the package's."""
    return WeightsTable(*args.weights) if args.weights else SHIPPED


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "pattern", nargs="?", default="*", help="may have *, ? and [...]; all by default"
    )
    parser.add_argument("--pretrained", action="store_true", help="names of weights instead")
    add_weights_option(parser)


def run(args: argparse.Namespace) -> None:
    """Print the names, one per line.

    Raises:
        ValueError: no name matches.
    """
    if args.pretrained:
        names = weights_table(args).names(args.pattern)
    else:
        names = fnmatch.filter(model_names(), args.pattern) + matching_names(args.pattern)
    if not names:
        library, colon, _ = args.pattern.partition(":")
        if library in LIBRARIES and colon and not args.pretrained:
            raise ValueError(unknown_name(args.pattern))
        what = "weights match" if args.pretrained else "model matches"
        hint = library_hint(args.pattern) or "; revzoo list shows all models"
        if library in LIBRARIES and colon:
            hint = f": model.pretrained=true (pretrained=True) loads {library}'s own"
        raise ValueError(f"no {what} {args.pattern!r}{hint}")
    sys.stdout.write("\n".join(names) + "\n")
