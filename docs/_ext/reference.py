"""Pages made when the site is built: the API, the commands, the configuration groups.

They are written into ``docs/reference``, beside the notebooks, from docstrings, from each command's
``--help`` and from the YAML files, so that none of them can differ from the program.
"""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from revzoo.cli.commands.options import choices, texts
from revzoo.cli.main import COMMANDS, main

FENCE = "```"
INDEX = f"""# Reference

The models with their figures, and what is made from the code itself.

{FENCE}{{toctree}}
:maxdepth: 1

../guide/models
{FENCE}

{FENCE}{{toctree}}
:maxdepth: 1

api
commands
configuration
{FENCE}
"""
API = """# API

Every name below is an attribute of `revzoo`. The examples assume `import torch, revzoo` and
`from torch import nn`.
"""
ROOT = Path(__file__).parents[2]
CONFIGS, NOTEBOOKS = ROOT / "configs", ROOT / "notebooks"


def write(folder: Path) -> None:
    """Write every page that is made."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["COLUMNS"] = "88"
    made = {"api": api(), "commands": commands(), "configuration": configuration()}
    pages = {"index": INDEX, **made}
    for name, text in pages.items():
        path = folder / f"{name}.md"
        if not path.exists() or path.read_text() != text:  # else Sphinx would read it again
            path.write_text(text)
    for notebook in NOTEBOOKS.glob("*.ipynb"):  # with the outputs that are kept in them
        path = folder / notebook.name
        if not path.exists() or path.read_bytes() != notebook.read_bytes():
            path.write_bytes(notebook.read_bytes())


def api() -> str:
    """A section for each public name, from its docstring."""
    module = import_module("revzoo.api")
    lines = [API]
    for name in module.__all__:
        kind = "autoclass" if isinstance(getattr(module, name), type) else "autofunction"
        value = getattr(module, name)
        target = f"{value.__module__}.{value.__qualname__}"
        options = [":members:", ":show-inheritance:"] if kind == "autoclass" else []
        lines += [
            f"## {name}", "", f"{FENCE}{{eval-rst}}", f".. {kind}:: {target}",
            *(f"   {option}" for option in options), FENCE, "",
        ]  # fmt: skip
    return "\n".join(lines)


def commands() -> str:
    """The help of every command."""
    lines = ["# Commands", ""]
    for name in COMMANDS:
        text = io.StringIO()
        with redirect_stdout(text), suppress(SystemExit):
            main([name, "--help"])
        lines += [f"## revzoo {name}", "", f"{FENCE}text", text.getvalue().rstrip(), FENCE, ""]
    return "\n".join(lines)


def configuration() -> str:
    """The files of every group, with their comments."""
    lines = ["# Configuration", "", "Set with `GROUP=CHOICE` and `GROUP.OPTION=VALUE`.", ""]
    for group in choices(CONFIGS):
        lines += [f"## {group}", ""]
        for text in texts(CONFIGS, group):
            head, _, body = text.partition("\n")
            title = head.removeprefix("== ")
            lines += [f"### {title}", "", f"{FENCE}yaml", body.rstrip(), FENCE, ""]
    return "\n".join(lines)


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.connect("builder-inited", lambda app: write(Path(app.srcdir) / "reference"))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
