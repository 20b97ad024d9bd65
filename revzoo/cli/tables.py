"""The option ``--weights DIR``, which several subcommands share."""

from __future__ import annotations

import argparse

from revzoo.weights.table import SHIPPED, WeightsTable


def add_table(parser: argparse.ArgumentParser) -> None:
    """Declare ``--weights``."""
    parser.add_argument(
        "--weights",
        metavar="DIR",
        action="append",
        help="folder with entries of weights (NAME.json) instead of the package's; repeatable",
    )


def table_of(args: argparse.Namespace) -> WeightsTable:
    """The entries that the arguments choose."""
    return WeightsTable(*args.weights) if args.weights else SHIPPED
