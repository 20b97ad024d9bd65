from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from revzoo.cli.config.overrides import compose_checked, to_plain

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def compose() -> Compose:
    """The checked-out configuration as plain containers, with overrides."""

    def composed(*overrides: str) -> dict[str, Any]:
        return to_plain(compose_checked(overrides, config_dir=CONFIGS))

    return composed


@pytest.fixture(scope="session")
def wheel_site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as a wheel installs it, built from a copy of the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("revzoo", "configs"):
        leave = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "."]
    subprocess.run([sys.executable, *command], cwd=source, check=True, capture_output=True)
    (wheel,) = source.glob("*.whl")
    site = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site
