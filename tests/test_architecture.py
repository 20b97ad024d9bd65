"""The floors: imports go downward only, libraries stay on their floor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "revzoo"
FLOORS = {
    "_checks": -1,
    "_files": -1,
    "_libraries": -1,
    "_version": -1,
    "core": 0,
    "weights": 0,
    "layers": 1,
    "models": 2,
    "private": 2,
    "per_sample": 3,
    "data": 2,
    "interop": 3,
    "compat": 3,
    "profiling": 3,
    "integrations": 3,
    "training": 4,
    "private.callback": 4,
    "private.sample_norms": 4,
    "cli": 5,
}
# floors of the same height that know nothing of each other
STRANGERS = {
    frozenset(pair)
    for rooms in (
        ("core", "weights"),
        ("models", "private", "data"),
        ("compat", "integrations", "interop", "per_sample", "profiling"),
    )
    for pair in combinations(rooms, 2)
}
# where a library may be imported at all
CONFINED = {
    "pytorch_lightning": {"data", "training", "private.callback", "private.sample_norms", "cli"},
    "lightning_fabric": {"data", "training", "cli"},
    "torchmetrics": {"training"},
    "hydra": {"cli"},
    "omegaconf": {"cli"},
    "optuna": {"cli"},
    "backpack": {"private"},
    "opacus": {"private", "private.callback"},
}


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[str]:
    """Dotted names of the modules that a file imports; relative ones made absolute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *filter(None, [node.module])))
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def floor_of(path: Path) -> str:
    """The floor a file belongs to; the facade's is an empty string."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    if (file := ".".join(parts[:2])) in FLOORS:
        return file
    top = parts[0]
    return top if top in FLOORS or (PACKAGE / top).is_dir() else ""


def violations(floor: str, imported: str) -> str | None:
    """The fault in importing a module on a floor, if there is one."""
    top, _, rest = imported.partition(".")
    if top in CONFINED and floor not in CONFINED[top]:
        return f"{top} belongs to {sorted(CONFINED[top])}"
    if top != "revzoo":
        return None
    file, other = ".".join(rest.split(".")[:2]), rest.partition(".")[0]
    other = file if file in FLOORS else other
    if other not in FLOORS:
        return "the facade is for users; import from the floor" if floor else None
    if not floor or other == floor:
        return None
    if FLOORS[other] > FLOORS[floor] or frozenset({floor, other}) in STRANGERS:
        return f"{floor} does not stand on {other}"
    return None


def check(source: str, floor: str, package: tuple[str, ...]) -> list[str]:
    found = {name: violations(floor, name) for name in imports(ast.parse(source), package)}
    return [f"{name}: {why}" for name, why in sorted(found.items()) if why]


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_downward(path: Path) -> None:
    package = path.relative_to(ROOT).parent.parts
    assert check(path.read_text(), floor_of(path), package) == []


@pytest.mark.parametrize(
    ("floor", "line"),
    [
        ("core", "from revzoo.layers.sequence import ReversibleSequence"),
        ("core", "import revzoo.models"),
        ("layers", "from ..models import registry"),
        ("models", "from revzoo import set_memory"),
        ("models", "from revzoo.data import Digits"),
        ("models", "import pytorch_lightning as pl"),
        ("training", "from omegaconf import DictConfig"),
        ("profiling", "from revzoo.training import Classifier"),
        ("data", "def f():\n    import hydra.utils"),
    ],
)
def test_an_import_upward_is_found(floor: str, line: str) -> None:
    assert len(check(line, floor, ("revzoo", floor))) > 0


def core_imports() -> dict[str, set[str]]:
    """The modules of the core that each of its modules imports, also inside functions."""
    paths = [p for p in (PACKAGE / "core").rglob("*.py") if p.name != "__init__.py"]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in paths}
    return {
        name: {*imports(ast.parse(path.read_text()), tuple(name.split(".")[:-1]))} & {*names}
        for name, path in names.items()
    }


def test_no_modules_of_the_core_import_each_other_in_a_circle() -> None:
    TopologicalSorter(core_imports()).prepare()  # raises a CycleError that shows the circle


def test_every_folder_is_a_floor() -> None:
    folders = {floor_of(path) for path in sources()} - {""}
    assert folders <= set(FLOORS)


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_library_does_not_print(path: Path) -> None:
    calls = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    names = {func.id for func in calls if isinstance(func, ast.Name)}
    assert "print" not in names
