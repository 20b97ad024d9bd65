"""Show the options of a configuration group with their comments.

  revzoo options               the groups and their choices
  revzoo options callbacks     every option of every choice of a group
  revzoo options data/cifar10  one choice

Each option has its default, or the choice's value, its meaning and its range. Set values as
GROUP.OPTION=VALUE.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from importlib.resources import files
from pathlib import Path

from revzoo._checks import check_choice
from revzoo.cli.commands._yaml_comments import wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("group", nargs="*", metavar="GROUP[/CHOICE]", help="all groups by default")


def run(args: argparse.Namespace) -> None:
    """Print the files.

    Raises:
        ValueError: there is no such group or choice.
    """
    folder = Path(str(files("revzoo.configs")))
    if not args.group:
        listed = "\n".join(groups(folder))
        sys.stdout.write(f"{listed}\n\nrevzoo options GROUP shows the options of a group\n")
        return
    width = shutil.get_terminal_size().columns
    shown = [wrapped(text, width) for name in args.group for text in texts(folder, name)]
    sys.stdout.write("\n".join(shown))


def choices(folder: Path) -> dict[str, list[str]]:
    """The choices of each group, by name."""
    return {
        group.name: sorted(path.stem for path in group.glob("*.yaml"))
        for group in sorted(folder.iterdir())
        if any(group.glob("*.yaml"))
    }


def groups(folder: Path, *, margin: int = 0) -> list[str]:
    """A line for each group, wrapped to the terminal; without MemCNN's variants of networks.

    Args:
        folder: of the groups.
        margin: columns to leave free on both sides.
    """
    column = 12  # of the choices
    return [
        textwrap.fill(
            f"{name:{column}}{', '.join(n for n in names if not n.endswith('_memcnn'))}",
            shutil.get_terminal_size().columns - margin,
            initial_indent=" " * margin,
            subsequent_indent=" " * (margin + column),
        )
        for name, names in choices(folder).items()
    ]


def texts(folder: Path, name: str) -> list[str]:
    """The options of ``GROUP``, then its files; or those of ``GROUP/CHOICE``, with its values.

    Raises:
        ValueError: there is no such group or choice; the message names the nearest.
    """
    # here: the help of revzoo train imports this module
    from revzoo.cli.commands._schema_text import listing, sections
    from revzoo.cli.schema import RUN, chosen

    known = choices(folder)
    # users write data=cifar10 elsewhere
    group, _, choice = name.replace("=", "/").partition("/")
    check_choice("group", group, known)
    if choice:
        check_choice(group, choice, known[group])
    own = {
        stem: (folder / group / f"{stem}.yaml").read_text().replace("# @package _global_\n", "")
        for stem in ([choice] if choice else known[group])
    }
    if choice and group in RUN.options:
        from revzoo.cli.config import compose

        values = compose([f"{group}={choice}"], complete=False).config[group]
        about = [line for line in own[choice].splitlines() if line.startswith("#")]
        known_here = chosen(group, RUN.parts[group], values)
        return ["\n".join([f"== {group}/{choice}", *about, *listing(known_here, values), ""])]
    listed = [
        "\n".join([f"== {title}", *listing(part), ""]) for title, part in sections(group).items()
    ]
    return listed + [f"== {group}/{stem}\n{text}" for stem, text in own.items()]
