"""pyproject.toml against the tree: packages, data files and dependencies are all declared."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import revzoo

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
# import name -> distribution, where they differ
DISTRIBUTIONS = {
    "backpack": "backpack-for-pytorch",
    "hydra": "hydra-core",
    "omegaconf": "hydra-core",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "pytorch_lightning": "pytorch-lightning",
    "lightning_fabric": "pytorch-lightning",
    "triton": "torch",  # on Linux; without it, torch's kernels run
}


def test_a_wheel_holds_every_file_of_the_package(wheel_site: Path) -> None:
    found = {p.relative_to(ROOT) for p in (ROOT / "revzoo").rglob("*") if p.is_file()}
    found |= {Path("revzoo", p.relative_to(ROOT)) for p in (ROOT / "configs").rglob("*.*")}
    found = {p for p in found if "__pycache__" not in p.parts}
    shipped = {p.relative_to(wheel_site) for p in wheel_site.rglob("*") if p.is_file()}
    assert {p for p in shipped if p.parts[0] == "revzoo"} == found


def test_a_script_beside_a_clone_finds_the_package(tmp_path: Path) -> None:
    """A folder named revzoo beside a script, the clone, does not hide the installed package."""
    (tmp_path / "clone" / "revzoo" / "revzoo").mkdir(parents=True)
    script = tmp_path / "clone" / "mine.py"
    script.write_text("import revzoo; print(revzoo.list_models('revnet38')[0])")
    # as a .pth file does, which hatchling writes for an editable install
    site = tmp_path / "site"
    site.mkdir()
    (site / "revzoo.pth").write_text(str(ROOT))
    code = (
        f"import runpy, site, sys; site.addsitedir({str(site)!r}); "
        f"sys.path.insert(0, {str(script.parent)!r}); runpy.run_path({str(script)!r})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout == "revnet38\n", done.stderr


def _names(lines: list[str]) -> set[str]:
    return {re.split(r"[<>=!\[ ]", line)[0].lower() for line in lines}


def test_every_import_is_declared() -> None:
    """Imports inside functions, and those of BackPACK and Opacus, may belong to an extra."""
    required = _names(PROJECT["project"]["dependencies"])
    extras = PROJECT["project"]["optional-dependencies"]
    optional = _names([line for name in extras if name != "dev" for line in extras[name]])
    for path in (*(ROOT / "revzoo").rglob("*.py"), ROOT / "train.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            free = node not in tree.body or path.stem in ("backpack", "opacus")
            declared = required | optional if free else required
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            for name in {name.partition(".")[0] for name in names}:
                if name != "revzoo" and name not in sys.stdlib_module_names:
                    assert DISTRIBUTIONS.get(name, name) in declared, f"{path.name}: {name}"


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=str)
def test_a_workflow_runs_what_there_is(path: Path) -> None:
    """A renamed target or script would fail only at the next release."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands:
        assert set(re.findall(r"\bmake ([a-z-]+)", command)) <= targets, command
        for script in re.findall(r"\.ci/[\w-]+", command):
            assert os.access(ROOT / script, os.X_OK), command


def test_the_changelog_begins_with_the_version_of_the_project() -> None:
    version = re.search(r"^## (\S+?),", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert version is not None
    assert version[1] == revzoo.__version__
