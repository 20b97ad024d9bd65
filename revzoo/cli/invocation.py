"""How the user started revzoo, so that messages and new processes use the same command."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from pathlib import Path

from revzoo.cli.plugins import import_arguments

SCRIPT = "train.py"  # in a checkout; the same as ``revzoo train``


def command_line(command: str, *arguments: object) -> str:
    """The text of a command that works in the user's environment: ``revzoo eval ckpt=...``.

    It repeats this process's ``--import``.
    """
    script, python = _script(), _as_typed("python", sys.executable)
    if script == SCRIPT and command == "train":
        words = [python, sys.argv[0]]
    elif script == "revzoo":
        words = [_as_typed("revzoo", sys.argv[0]), command]
    elif script is not None and shutil.which("revzoo"):  # in a notebook, or a script of the user
        words = ["revzoo", command]
    else:
        words = [python, "-m", "revzoo", command]
    return shlex.join([*words, *import_arguments(), *map(str, arguments)])


def override_argument(text: str) -> str:
    """An override of the command line, ``KEY=VALUE``; a value with letters outside ASCII in quotes.

    Hydra's grammar knows such letters only in quotes; lists and functions stay as they are.
    """
    key, equals, value = text.partition("=")
    is_plain = value.isascii() or re.search(r"""['"\\$,(){}\[\]]""", value)
    return text if is_plain else f"{key}{equals}'{value}'"


def tensorboard_line(folder: object) -> str:
    """The text of the command that shows ``folder`` in this environment's TensorBoard."""
    program = Path(sys.executable).parent / "tensorboard"
    return shlex.join([_as_typed("tensorboard", str(program)), "--logdir", str(folder)])


def _as_typed(name: str, path: str) -> str:
    """``name`` if the shell finds the program at ``path`` under it; otherwise ``path``, kept short.

    Without an activated environment, ``name`` may be missing or another environment's program.
    """
    # absolute, not resolved: a virtual environment's python is a link
    in_path, program = shutil.which(name), Path(path).absolute()
    if not program.name.startswith(name) or (in_path and Path(in_path).parent == program.parent):
        return name
    return str(short_path(program))


def train_words() -> list[str]:
    """The first words of a command line that trains, as this process was started.

    They repeat this process's ``--import``.
    """
    script, path = _script(), str(Path(sys.argv[0]).absolute())  # the command may change folders
    if script == SCRIPT:
        words = [sys.executable, path]
    elif script == "revzoo":
        words = [sys.executable, path, "train"]
    else:
        words = [sys.executable, "-m", "revzoo", "train"]
    return [*words, *import_arguments()]


def _script() -> str | None:
    """The name of the script that runs; None after ``python -m revzoo``.

    There ``sys.argv[0]`` is the path of a module, which may be ``.../commands/train.py``.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # None for a script
    by_module = spec is not None and spec.name.startswith("revzoo")
    return None if by_module else Path(sys.argv[0]).name


def short_path(path: str | Path) -> Path:
    """The path relative to the working directory if it is below it; otherwise absolute."""
    path, here = Path(path).absolute(), Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
