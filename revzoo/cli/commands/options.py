"""Show the options of a configuration group with their comments.

  revzoo options               the groups and their choices
  revzoo options callbacks     every option of every choice of a group
  revzoo options data/cifar10  one choice

Prints the configuration files themselves. Set values as GROUP.OPTION=VALUE.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from importlib.resources import files
from pathlib import Path

from revzoo._checks import check_choice
from revzoo.cli.config.signatures import with_bases


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
        width = shutil.get_terminal_size().columns
        rows = [textwrap.fill(g, width, subsequent_indent=" " * 12) for g in groups(folder)]
        listed = "\n".join(rows)
        sys.stdout.write(f"{listed}\n\nrevzoo options GROUP shows the options of a group\n")
        return
    shown = [_wrapped(text) for name in args.group for text in texts(folder, name)]
    sys.stdout.write("\n".join(shown))


def choices(folder: Path) -> dict[str, list[str]]:
    """The choices of each group, by name."""
    return {
        group.name: sorted(path.stem for path in group.glob("*.yaml"))
        for group in sorted(folder.iterdir())
        if any(group.glob("*.yaml"))
    }


def groups(folder: Path) -> list[str]:
    """A line for each group."""
    return [f"{name:12}{', '.join(names)}" for name, names in choices(folder).items()]


def texts(folder: Path, name: str) -> list[str]:
    """The files of ``GROUP`` or ``GROUP/CHOICE`` with their names as headings.

    The files that they inherit from come first: most options of a model stand there.

    Raises:
        ValueError: there is no such group or choice; the message names the nearest.
    """
    known = choices(folder)
    # data=cifar10 is what a user types elsewhere
    group, _, choice = name.replace("=", "/").partition("/")
    check_choice("group", group, known)
    if choice:
        check_choice(group, choice, known[group])
    chosen = [folder / group / f"{stem}.yaml" for stem in ([choice] if choice else known[group])]
    bases = dict.fromkeys(base for path in chosen for base in with_bases(path)[:-1])
    paths = [*bases, *chosen]
    return [
        f"== {path.relative_to(folder).with_suffix('')}\n"
        # a directive of Hydra, no comment for readers
        + path.read_text().replace("# @package _global_\n", "")
        for path in paths
    ]


def _wrapped(text: str) -> str:
    """YAML with its comments wrapped to the terminal; each line of a comment begins with #."""
    width = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in _joined(text.splitlines(), width):
        lines += [line] if len(line) <= width else _folded(line, width)
    return "\n".join([*lines, ""])


def _joined(lines: list[str], width: int) -> list[str]:
    """Lines of YAML; a comment that is too long takes in the lines that continue it.

    Then it is wrapped as one paragraph, not line by line.
    """
    joined: list[str] = []
    for line in lines:
        words = re.match(r"# (\S.*)", line)
        before = joined[-1] if joined else ""
        # a sentence goes on in small letters, or it has not ended
        goes_on = words and (re.match(r"[a-z0-9(]", words[1]) or re.search(r"(,| [a-z]+)$", before))
        if words and goes_on and re.match(r"# \S", before) and len(before) > width:
            joined[-1] = f"{before} {words[1]}"
        else:
            joined.append(line)
    return joined


def _folded(line: str, width: int) -> list[str]:
    """The lines of a line of YAML that is too long, by the kind of its comment."""
    if command := re.fullmatch(r"(\s*#\s\s+)(\S.*?)(?:\s+# (.*))?", line):
        # a command stays whole, so that it can be copied
        margin = f"{command[1]}  "
        return [command[1] + command[2], *_filled(margin + (command[3] or ""), width, margin)]
    comment = re.search(r"(^|(?<=\s))# ", line)
    if comment is None:
        return [line]
    start = comment.start()
    if start <= width // 2:
        return _filled(line, width, f"{' ' * start}# ")
    # beside a long value the column would be narrow: above it
    margin = " " * (len(line) - len(line.lstrip())) + "# "
    return [*_filled(margin + line[comment.end() :], width, margin), line[:start].rstrip()]


def _filled(line: str, width: int, margin: str) -> list[str]:
    """The line, wrapped; further lines begin with ``margin``. Nothing for an empty margin."""
    # no-break spaces keep `quoted words` and numbers with their % together
    glued = re.sub(r"`[^`]*`|\d %", lambda match: match[0].replace(" ", "\xa0"), line)
    lines = textwrap.wrap(
        glued,
        width,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [row.replace("\xa0", " ") for row in lines if row.strip() != margin.strip()]
