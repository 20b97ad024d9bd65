"""How the user has started this program, for messages and for the processes it starts."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

SCRIPT = "train.py"  # of a checkout: the same as ``revzoo train``


def command_line(command: str, *arguments: object) -> str:
    """The text of a command that works where the user is: ``revzoo eval ckpt=...``."""
    script = Path(sys.argv[0]).name
    if _module() is None and script == SCRIPT and command == "train":
        words = ["python", sys.argv[0]]
    elif _module() is None and (script == "revzoo" or shutil.which("revzoo")):
        words = ["revzoo", command]
    else:
        words = ["python", "-m", "revzoo", command]
    return shlex.join([*words, *map(str, arguments)])


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
