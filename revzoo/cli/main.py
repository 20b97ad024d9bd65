"""The program ``revzoo``: one subcommand per file, one row per subcommand.

Only the chosen subcommand's module is imported, so that ``revzoo list`` need not wait for torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple, Protocol

from revzoo.weights.errors import WeightsError


class Row(NamedTuple):
    """Where a subcommand is, and what it does."""

    module: str
    help: str


class Command(Protocol):
    """What the module of a subcommand offers."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the arguments."""

    def run(self, args: argparse.Namespace) -> None:
        """Do it; ValueError and WeightsError tell what is wrong, and are told without traceback."""


COMMANDS: dict[str, Row] = {
    "list": Row("list", "names of models, or of pretrained weights"),
    "info": Row("info", "a model's weights, parameters, FLOPs and memory"),
    "check": Row("check", "every image of a folder: which cannot be read"),
    "convert": Row("convert", "published weights of other programs to ours"),
    "export": Row("export", "a network as a file: torch.export, ONNX or safetensors"),
    "pack": Row("pack", "weights and their entry from a checkpoint of training"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script.

    Raises:
        SystemExit: always for wrong arguments or what the subcommand cannot do, with a message.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    lines = [f"  {name:10}{row.help}" for name, row in COMMANDS.items()]
    overview = argparse.ArgumentParser(
        prog="revzoo",
        usage="revzoo COMMAND ...",
        epilog="commands:\n" + "\n".join(lines) + "\n\nrevzoo COMMAND --help tells more",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    overview.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    name = overview.parse_args(arguments[:1] or ["--help"]).command
    command: Command = import_module(f"revzoo.cli.commands.{COMMANDS[name].module}")
    parser = argparse.ArgumentParser(prog=f"revzoo {name}", description=COMMANDS[name].help)
    command.add_arguments(parser)
    try:
        command.run(parser.parse_args(arguments[1:]))
    except (OSError, ValueError, WeightsError) as error:
        sys.exit(f"revzoo: {error}")


if __name__ == "__main__":
    main()
