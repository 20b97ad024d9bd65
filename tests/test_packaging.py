"""pyproject.toml against the tree: packages, data files and dependencies are all declared."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# import name -> distribution, where they differ
DISTRIBUTIONS = {
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "PIL": "pillow",
    "pytorch_lightning": "pytorch-lightning",
    "lightning_fabric": "pytorch-lightning",
}


def test_packages_are_those_of_the_tree() -> None:
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "revzoo").rglob("*.py")}
    found = {".".join(folder.parts) for folder in folders} | {"revzoo.configs"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == found


def test_every_data_file_is_shipped() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]
    folders = {"revzoo.configs": ROOT / "configs"}
    for folder in (ROOT / "revzoo").rglob("__init__.py"):
        folders[".".join(folder.parent.relative_to(ROOT).parts)] = folder.parent
    for package, folder in folders.items():
        shipped = {path for pattern in patterns.get(package, ()) for path in folder.glob(pattern)}
        walk = folder.rglob("*") if package == "revzoo.configs" else folder.glob("*")
        data = {p for p in walk if p.is_file() and p.suffix not in (".py", ".pyc")}
        assert data == shipped, package


def _names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!\[ ]", line)[0].lower() for line in lines}


def test_every_import_is_declared() -> None:
    """What a function imports may belong to an extra, but what a module imports may not."""
    required = _names(PROJECT["project"]["dependencies"])
    extras = PROJECT["project"]["optional-dependencies"]
    optional = _names([line for name in extras if name != "dev" for line in extras[name]])
    for path in (*(ROOT / "revzoo").rglob("*.py"), ROOT / "train.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            declared = required if node in tree.body else required | optional
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in {name.partition(".")[0] for name in names}:
                if name != "revzoo" and name not in sys.stdlib_module_names:
                    assert DISTRIBUTIONS.get(name, name) in declared, f"{path.name}: {name}"
