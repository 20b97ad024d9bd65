"""``revzoo list 'revnet*'``: names of models; with ``--pretrained``, of weights.

    revzoo list                   the models of the zoo; --all: MemCNN's, too
    revzoo list 'torchvision:*'   networks of torchvision; 'timm:*' of timm

Does not import torch, so it answers at once.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys

from revzoo._libraries import LIBRARIES, library_hint, matching_names, unknown_name
from revzoo.cli.schema import model_names
from revzoo.weights.table import SHIPPED, WeightsTable


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
    parser.add_argument("--all", action="store_true", help="variants ending in _memcnn, too")
    parser.add_argument("--pretrained", action="store_true", help="names of weights instead")
    add_weights_option(parser)


def run(args: argparse.Namespace) -> None:
    """Print the names, one per line."""
    if args.pretrained:
        names = weights_table(args).names(args.pattern)
    else:
        names = fnmatch.filter(model_names(), args.pattern) + matching_names(args.pattern)
        if not (args.all or "memcnn" in args.pattern):
            names = [name for name in names if not name.endswith("_memcnn")]
    if not names:
        raise ValueError(_no_match(args.pattern, pretrained=args.pretrained))
    sys.stdout.write("\n".join(names) + "\n")


def _no_match(pattern: str, *, pretrained: bool) -> str:
    """The message for a pattern that no name matches."""
    library, colon, _ = pattern.partition(":")
    of_library = library in LIBRARIES and bool(colon)
    if of_library and not pretrained:
        return unknown_name(pattern)
    what = "weights match" if pretrained else "model matches"
    if of_library:
        hint = f": model.pretrained=true (pretrained=True) loads {library}'s own"
    else:
        hint = library_hint(pattern) or "; revzoo list shows all models of the zoo"
    return f"no {what} {pattern!r}{hint}"
