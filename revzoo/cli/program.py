"""How the user has started this program, for messages and for the processes it starts."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "train.py"  # of a checkout: the same as ``revzoo train``


def command_line(command: str, *arguments: object) -> str:
    """The text of a command that works where the user is: ``revzoo eval ckpt=...``."""
    script, python = Path(sys.argv[0]).name, _as_typed("python", sys.executable)
    if _module() is None and script == SCRIPT and command == "train":
        words = [python, sys.argv[0]]
    elif _module() is None and script == "revzoo":
        words = [_as_typed("revzoo", sys.argv[0]), command]
    elif _module() is None and shutil.which("revzoo"):
        words = ["revzoo", command]
    else:
        words = [python, "-m", "revzoo", command]
    return shlex.join([*words, *map(str, arguments)])


def tool_line(name: str, *arguments: object) -> str:
    """The text of a command of another package of this environment: ``tensorboard ...``."""
    return shlex.join(
        [_as_typed(name, str(Path(sys.executable).parent / name)), *map(str, arguments)]
    )


def _as_typed(name: str, path: str) -> str:
    """``name`` if the shell finds the program at ``path`` by it; otherwise ``path``, kept short.

    In an environment that is not activated, ``name`` is another environment's program, or none.
    """
    found, place = shutil.which(name), Path(path).absolute()
    if not Path(path).name.startswith(name) or (found and Path(found).parent == place.parent):
        return name
    here = Path.cwd()
    return str(place.relative_to(here) if place.is_relative_to(here) else place)


def process_of(command: str) -> list[str]:
    """The beginning of a process that runs ``command`` as this one was started."""
    script = Path(sys.argv[0])
    if _module() is None and script.name == SCRIPT and command == "train":
        return [sys.executable, str(script.absolute())]
    if _module() is None and script.name == "revzoo":
        return [sys.executable, str(script.absolute()), command]
    return [sys.executable, "-m", "revzoo", command]


def _module() -> str | None:
    """The module of this package that ``python -m`` has started."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return str(spec.name) if spec is not None and spec.name.startswith("revzoo") else None
