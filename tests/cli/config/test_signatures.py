from __future__ import annotations

from pathlib import Path

import pytest

from revzoo._checks import keyword_names
from revzoo.cli.config import signatures
from revzoo.cli.config.signatures import table_options
from revzoo.training.callbacks import registry


def test_the_sources_have_the_options_of_every_callback() -> None:
    packaged = {n: f for n, f in registry.CALLBACKS.items() if f.__module__.startswith("revzoo.")}
    read = table_options(registry.__name__, "CALLBACKS")
    assert read == {name: keyword_names(factory) for name, factory in packaged.items()}


def test_without_source_files_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signatures, "ROOT", tmp_path)
    assert table_options(registry.__name__, "CALLBACKS") == {}
