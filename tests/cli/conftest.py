from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from revzoo.cli.config.compose import compose_checked, to_plain

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def compose() -> Compose:
    """The checked-out configuration as plain containers, with overrides."""

    def composed(*overrides: str) -> dict[str, Any]:
        return to_plain(compose_checked(overrides))

    return composed
