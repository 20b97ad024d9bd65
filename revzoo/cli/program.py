"""The command that started this program, for messages and for further processes."""

from __future__ import annotations

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
    script, python = Path(sys.argv[0]).name, _as_typed("python", sys.executable)
    if _module() is None and script == SCRIPT and command == "train":
        words = [python, sys.argv[0]]
    elif _module() is None and script == "revzoo":
        words = [_as_typed("revzoo", sys.argv[0]), command]
    elif _module() is None and shutil.which("revzoo"):
        words = ["revzoo", command]
    else:
        words = [python, "-m", "revzoo", command]
    return shlex.join([*words, *import_arguments(), *map(str, arguments)])


def tool_line(name: str, *arguments: object) -> str:
    """The text of another package's command in this environment: ``tensorboard ...``."""
    return shlex.join(
        [_as_typed(name, str(Path(sys.executable).parent / name)), *map(str, arguments)]
    )


def _as_typed(name: str, path: str) -> str:
    """``name`` if the shell finds the program at ``path`` under it; otherwise ``path``, kept short.

    Without an activated environment, ``name`` may be missing or another environment's program.
    """
    in_path, program = shutil.which(name), Path(path).absolute()
    if not program.name.startswith(name) or (in_path and Path(in_path).parent == program.parent):
        return name
    here = Path.cwd()
    return str(program.relative_to(here) if program.is_relative_to(here) else program)


def process_of(command: str) -> list[str]:
    """The first words of a command line that runs ``command`` the way this process was started.

    They repeat this process's ``--import``.
    """
    script = Path(sys.argv[0])
    if _module() is None and script.name == SCRIPT and command == "train":
        words = [sys.executable, str(script.absolute())]
    elif _module() is None and script.name == "revzoo":
        words = [sys.executable, str(script.absolute()), command]
    else:
        words = [sys.executable, "-m", "revzoo", command]
    return [*words, *import_arguments()]


def _module() -> str | None:
    """The module of this package that ``python -m`` started, if any."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name) if spec is not None and spec.name.startswith("revzoo") else None
