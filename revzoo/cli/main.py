"""The program ``revzoo``: a table of subcommands, each in its module.

It imports only the module of the chosen subcommand, and torch only if the command needs it. So
help, ``revzoo list`` and the answer to a typo are fast.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import select
import signal
import sys
import textwrap
import traceback
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.metadata import entry_points
from itertools import groupby
from types import FrameType, ModuleType
from typing import Any, NamedTuple, NoReturn

from revzoo._checks import did_you_mean
from revzoo._version import __version__
from revzoo.cli.terminal import folded, imported, user_errors

INTERRUPTED = "revzoo: interrupted\n"


class Row(NamedTuple):
    """A subcommand."""

    module: str  # below revzoo.cli
    help: str
    builds: bool = True  # models or data, and so needs the plugins


COMMANDS: dict[str, Row] = {
    "train": Row("commands.train", "train a model, or resume a run"),
    "eval": Row("commands.evaluate", "evaluate a trained model"),
    "predict": Row("commands.predict", "classify images"),
    "sweep": Row("commands.sweep", "search for hyper-parameters"),
    # builds=False: importing plugins would make these slow for nothing
    "list": Row("commands.list", "names of models, or of pretrained weights", builds=False),
    "options": Row("commands.options", "options of a run, with comments", builds=False),
    "info": Row("commands.info", "a model's weights, parameters, FLOPs and memory"),
    "audit": Row("commands.audit", "memory of a training step, by memory mode"),
    "plan": Row("commands.plan", "the fastest memory mode of each step within a budget of bytes"),
    "bench": Row("commands.bench", "time and memory of a training step, by memory mode"),
    "check": Row("commands.check", "check that each image of a folder can be read", builds=False),
    "export": Row("commands.export", "a network as a file: torch.export, ONNX or safetensors"),
    "convert": Row("commands.convert", "published weights of other programs to ours"),
    "pack-data": Row("commands.pack_data", "images as shards, to stream them", builds=False),
    "pack": Row("commands.pack", "weights and their entry from a checkpoint of training"),
}

# commands of other programs, such as Lightning's, and ours for the same purpose
COUNTERPARTS = {
    "resume": "train --resume RUN_DIR",
    "fit": "train",
    "finetune": "train",
    "test": "eval",
    "validate": "eval",
    "models": "list",
    "summary": "info",
    "infer": "predict",
    "inference": "predict",
    "profile": "audit",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script.

    Raises:
        SystemExit: for wrong arguments or a failed subcommand, with a message; 130 after Ctrl-C;
            141 without a message if the reader of the output ended, as ``| head`` does.
    """
    # By default OpenMP threads wait for each other in a busy loop: with other programs on the same
    # cores, a training step took 7.0 s instead of 2.0 s (docs/experiments.md).
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it at import
    sys.stdout = sys.stdout or io.StringIO()  # closed by the shell: revzoo list >&-
    if isinstance(sys.stdout, io.TextIOWrapper):  # the name of a file may hold any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    # a background job of a shell ignores Ctrl-C, and Python sets handlers in the main thread only
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, _interrupt)
    try:
        with user_errors(), closed_output():
            command, args = parse(sys.argv[1:] if arguments is None else list(arguments))
            # only commands that build something have --import
            modules = getattr(args, "imports", None)
            imported[:] = dict.fromkeys(modules or ())
            if modules is not None:
                # metadata only: the registries would import torch
                plugins = entry_points(group="revzoo.plugins")
                if modules or plugins:
                    from revzoo.cli.plugins import load_plugins

                    load_plugins(modules, plugins)
            command.run(args)
    except KeyboardInterrupt:  # outside of a run, which handles it
        sys.stderr.write(INTERRUPTED)
        sys.exit(130)  # 128 + SIGINT, as in a shell
    finally:
        imported.clear()  # what else runs in a notebook needs no --import


@contextmanager
def closed_output() -> Iterator[None]:
    """End without a message if nobody reads standard output any more."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        if not any(event & select.POLLERR for _, event in output.poll(0)):
            raise  # another pipe
        # Python flushes again as it exits, and would print an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)  # as in a shell


def _interrupt(signum: int, frame: FrameType | None) -> None:
    """End the process at once if a module is being imported; otherwise raise KeyboardInterrupt.

    An exception in the middle of an import leaves half a module behind. Libraries catch it and
    import again, which ended in a RecursionError of NumPy, or in a crash of the interpreter.
    """
    for outer, _ in traceback.walk_stack(frame):
        if outer.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, INTERRUPTED.encode())
            os._exit(130)
    raise KeyboardInterrupt


def parse(arguments: list[str]) -> tuple[ModuleType, argparse.Namespace]:
    """The subcommand's module and its arguments."""
    # `revzoo` alone shows the help
    name = _command(["--help"] if arguments[:1] in ([], ["help"]) else arguments[:1])
    row = COMMANDS[name]
    command = import_module(f"revzoo.cli.{row.module}")
    # the help is the module's docstring, without its notes for developers; python -OO has none
    about = (getattr(command, "__doc__", None) or row.help).partition("\nNOTE")[0]
    parser = _Parser(
        prog=f"revzoo {name}",
        description=about,
        formatter_class=_Help,
        # a new option would change the meaning of an abbreviation
        allow_abbrev=False,
    )
    command.add_arguments(parser)
    if {"-h", "--help"} & {*arguments} and hasattr(command, "epilog"):
        parser.epilog = command.epilog()
    if row.builds:
        parser.add_argument(
            "--import",
            dest="imports",
            action="append",
            default=[],
            metavar="MODULE",
            help="import a module that registers models, data, callbacks, optimisers; repeatable",
        )
    if "" in arguments:  # an empty path would mean the working directory
        parser.error("one of the arguments is empty (is a variable of the shell empty?)")
    words, known = arguments[1:], parser._option_string_actions  # there is no public list
    for word in words:  # argparse would first ask for the required option that is misspelt
        key = word.partition("=")[0]
        if not word.startswith("-") or key in known:
            continue
        if hint := did_you_mean(key, known, cutoff=0.8):  # --epochs is not near --resume
            parser.error(f"unrecognized arguments: {word}{hint}")
    if any(action.dest == "overrides" for action in parser._actions):
        words = list(_as_overrides(words, known))
    # intermixed: options may stand between overrides, as in `train lr=1 --import m data=x`
    args, unknown = parser.parse_known_intermixed_args(words)
    if unknown:
        overridable = hasattr(args, "overrides")
        hint = "; set values as KEY=VALUE, such as trainer.max_epochs=3" if overridable else ""
        # after an unknown option, argparse may take no KEY=VALUE: they are not to blame
        unknown = [word for word in unknown if word.startswith("-")] or unknown
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return command, args


def _as_overrides(words: Iterable[str], known: Collection[str]) -> Iterator[str]:
    """``words`` with ``--model revnet38`` and ``--seed=1`` as ``model=revnet38`` and ``seed=1``.

    Options that are ``known`` stay. An option without a value becomes ``KEY=true``.
    """
    rest = deque(words)
    while rest:
        word = rest.popleft()
        key, equals, value = word.partition("=")
        if not re.match(r"--\w", word) or key in known:
            yield word
            continue
        if not equals:
            is_flag = not rest or rest[0].startswith("-") or "=" in rest[0]
            value = "true" if is_flag else rest.popleft()
        yield f"{key[2:].replace('-', '_')}={value}"


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest choice, and folds errors to the terminal."""

    # argparse before Python 3.14 suggests nothing
    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += did_you_mean(value, action.choices or ())
            raise

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, folded(f"{self.prog}: error: {message}", indent=2) + "\n")


class _Help(argparse.RawDescriptionHelpFormatter):
    """Wraps a docstring's prose to the terminal; keeps indented lines, such as commands."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = text.replace("``", "").splitlines()
        blocks = groupby(lines, key=lambda line: bool(line) and not line.startswith(" "))
        return "\n".join(
            textwrap.fill(" ".join(block), width) if is_prose else "\n".join(block)
            for is_prose, block in blocks
        )


def _command(arguments: list[str]) -> str:
    lines = [f"  {name:10}{row.help}" for name, row in COMMANDS.items()]
    overview = _Parser(
        prog="revzoo",
        usage="revzoo COMMAND ...",
        epilog="commands:\n" + "\n".join(lines) + "\n\nrevzoo COMMAND --help shows its arguments",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    overview.add_argument(
        "--version", action="version", version=__version__, help="show the version and exit"
    )
    # no choices=...: before Python 3.14, argparse does not suggest a near name
    overview.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    name: str = overview.parse_args(arguments).command
    if name not in COMMANDS:
        listed = ", ".join(COMMANDS)
        ours = COUNTERPARTS.get(name)
        hint = f"; use revzoo {ours}" if ours else did_you_mean(name, COMMANDS)
        overview.error(f"argument COMMAND: invalid choice: {name!r} (choose from {listed}){hint}")
    return name


if __name__ == "__main__":
    main()
