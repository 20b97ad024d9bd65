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
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from revzoo._checks import check_choice
from revzoo.cli.schema import CONFIGS, RUN, Chosen, Option, Section, chosen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("group", nargs="*", metavar="GROUP[/CHOICE]", help="all groups by default")


def run(args: argparse.Namespace) -> None:
    """Print the files."""
    if not args.group:
        listed = "\n".join(groups())
        sys.stdout.write(f"{listed}\n\nrevzoo options GROUP shows the options of a group\n")
        return
    sys.stdout.write("\n".join(text for name in args.group for text in texts(name)))


def choices() -> dict[str, list[str]]:
    """The choices of each group, by name."""
    return {
        group.name: sorted(path.stem for path in group.glob("*.yaml"))
        for group in sorted(CONFIGS.iterdir())
        if any(group.glob("*.yaml"))
    }


def groups(*, margin: int = 0) -> list[str]:
    """A line for each group, wrapped to the terminal; without MemCNN's variants of networks."""
    column = 12  # of the choices
    return [
        textwrap.fill(
            f"{name:{column}}{', '.join(n for n in names if not n.endswith('_memcnn'))}",
            shutil.get_terminal_size().columns - margin,
            initial_indent=" " * margin,
            subsequent_indent=" " * (margin + column),
        )
        for name, names in choices().items()
    ]


def texts(name: str) -> list[str]:
    """The options of ``GROUP``, then its files; or those of ``GROUP/CHOICE``, with its values."""
    known = choices()
    # users write data=cifar10 elsewhere
    group, _, choice = name.replace("=", "/").partition("/")
    check_choice("group", group, known)
    if choice:
        check_choice(group, choice, known[group])
    own = {
        stem: (CONFIGS / group / f"{stem}.yaml").read_text().replace("# @package _global_\n", "")
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


def sections(group: str) -> dict[str, Section]:
    """The options of a group: one section, or several with the values that choose them."""
    part = RUN.parts.get(group)
    if part is None:  # experiment, debug: their files set options of all groups
        return {}
    if isinstance(part, Section):
        return {f"{group}, all options": part}
    names = {
        id(known): [yaml_text(name) for name, other in part.sections.items() if other is known]
        for known in part.sections.values()
    }
    dots = "..." if group == "model" else ""
    return {
        f"{group}, all options with {part.by}: {', '.join(f'{n}{dots}' for n in names[id(s)])}": s
        for s in part.sections.values()
    }


def listing(section: Section, values: Mapping[str, Any] | None = None) -> Iterator[str]:
    """The options as lines of YAML, with these values or their defaults, and with comments."""
    for name, option in section.options.items():
        value = option.default if values is None else values.get(name, option.default)
        part = section.parts.get(name)
        about = comment(option)
        if isinstance(part, Chosen) and values is None:
            yield f"{name}:  # {about}"
            for chooser, known in part.sections.items():
                yield f"  # with {part.by}: {chooser}"
                yield from (f"  {line}" for line in listing(known))
        elif part is not None and (values is None or isinstance(value, Mapping)):
            known = part if isinstance(part, Section) else chosen(name, part, value)
            yield f"{name}:{'' if known.options else ' {}'}  # {about}"
            yield from (f"  {line}" for line in listing(known, value if values else None))
        else:
            if isinstance(part, Section) and part.options:  # callbacks.ema: null
                about += f"; options: {', '.join(part.options)}"
            yield f"{name}: {yaml_text(value)}  # {about}"


def yaml_text(value: Any) -> str:
    """A value in one line of YAML."""
    plain = list(value) if isinstance(value, tuple) else value
    return yaml.safe_dump([plain], default_flow_style=True, width=10**6).strip()[1:-1]


def comment(option: Option) -> str:
    """The meaning of an option, and its valid values."""
    words = [option.about]
    if option.choices:
        words.append("one of " + ", ".join("null" if c is None else str(c) for c in option.choices))
    elif option.range:
        words.append(option.within)
    return "; ".join(words)
