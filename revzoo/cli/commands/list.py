"""``revzoo list 'revnet*'``: names of models; with ``--pretrained``, of weights. Without torch."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from pathlib import Path

from revzoo.cli.tables import add_table, table_of

# tests/models/test_registry.py holds it equal to the registry
NAMES = Path(__file__).parents[1] / "models" / "names.txt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "pattern", nargs="?", default="*", help="with *, ? or [...]; all by default"
    )
    parser.add_argument("--pretrained", action="store_true", help="names of weights instead")
    add_table(parser)


def run(args: argparse.Namespace) -> None:
    """Print the names, one per line.

    Raises:
        ValueError: nothing matches.
    """
    if args.pretrained:
        names = table_of(args).names(args.pattern)
    else:
        names = sorted(fnmatch.filter(NAMES.read_text().split(), args.pattern))
    if not names:
        what = "weights match" if args.pretrained else "model matches"
        raise ValueError(f"no {what} {args.pattern!r}; revzoo list gives all models")
    sys.stdout.write("\n".join(names) + "\n")
