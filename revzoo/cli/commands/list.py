"""``revzoo list 'revnet*'``: names of models; with ``--pretrained``, a table of weights.

    revzoo list                   the models of the zoo; --all: MemCNN's, too
    revzoo list --pretrained      weights: size, accuracy, licence, memory
    revzoo list 'torchvision:*'   networks of torchvision; 'timm:*' of timm

Does not import torch, so it answers at once.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterator, Sequence

from revzoo._checks import did_you_mean, size_word
from revzoo._libraries import LIBRARIES, library_hint, matching_names, unknown_name
from revzoo.cli.schema import model_names
from revzoo.weights.entry import WeightsEntry
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
    parser.add_argument("--pretrained", action="store_true", help="a table of weights instead")
    add_weights_option(parser)


def run(args: argparse.Namespace) -> None:
    """Print the names, one per line; of weights, a table."""
    table = weights_table(args)
    if args.pretrained:
        names = table.names(args.pattern)
    else:
        names = fnmatch.filter(model_names(), args.pattern) + matching_names(args.pattern)
        if not (args.all or "memcnn" in args.pattern):
            names = [name for name in names if not name.endswith("_memcnn")]
    if not names:
        known = table.names() if args.pretrained else model_names()
        raise ValueError(_no_match(args.pattern, known, pretrained=args.pretrained))
    lines = _table([table.entries[name] for name in names]) if args.pretrained else names
    sys.stdout.write("\n".join(lines) + "\n")


_HEADER = ("weights", "params", "side", "top-1", "licence", "store", "exact")


def _table(entries: Sequence[WeightsEntry]) -> Iterator[str]:
    """A line for each entry."""
    rows = [
        (
            entry.name,
            "" if entry.parameters is None else f"{_short(entry.parameters)} M",
            size_word(entry.input_size[1:]),
            f"{entry.metrics['test/acc']:.1%}" if "test/acc" in entry.metrics else "",
            entry.license or "",
            *(_short(entry.mib[mode]) if mode in entry.mib else "" for mode in _HEADER[5:]),
        )
        for entry in entries
    ]
    wide = max(len(name) for name, *_ in rows)
    for name, count, side, top, licence, store, exact in (_HEADER, *rows):
        line = f"{name:{wide}} {count:>7} {side:>4} {top:>6}  {licence:12} {store:>5} {exact:>5}"
        yield line.rstrip()
    yield "store, exact: MiB of activations that training keeps for an image, by mode"


def _short(number: float) -> str:
    """With three digits, or all before the point: 0.06, 1.16, 22.4, 2230."""
    if number >= 100:
        return f"{number:.0f}"
    return f"{number:#.3g}" if number >= 1 else f"{number:.2f}"


def _no_match(pattern: str, known: Sequence[str], *, pretrained: bool) -> str:
    """The message for a pattern that no name matches; a ``known`` name may be near."""
    library, colon, _ = pattern.partition(":")
    of_library = library in LIBRARIES and bool(colon)
    if of_library and not pretrained:
        return unknown_name(pattern)
    what = "weights match" if pretrained else "model matches"
    if of_library:
        hint = f": model.pretrained=true (pretrained=True) loads {library}'s own"
    else:
        hint = library_hint(pattern) or did_you_mean(pattern, known, cutoff=0.6)
        hint = hint or "; revzoo list shows all models of the zoo"
    return f"no {what} {pattern!r}{hint}"
