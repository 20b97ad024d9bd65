"""Examples in docstrings run and print what they show; each public name has one."""

from __future__ import annotations

import ast
import doctest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import revzoo
from revzoo.data.registry import DATA
from revzoo.models.registry import MODELS
from revzoo.training.callbacks.registry import CALLBACKS
from revzoo.training.optim.optimizers import OPTIMIZERS

PACKAGE = Path(revzoo.__file__).parent
NAMES = {"torch": torch, "nn": torch.nn, "revzoo": revzoo}  # what an example need not import
PARSER = doctest.DocTestParser()


def docstrings() -> Iterator[tuple[Path, str, int, str]]:
    """Each docstring of the package: file, documented name, line, text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        content = path.read_text()
        if not any(mark in content for mark in (">>>", "Example::", "+SKIP")):
            continue  # to parse all takes a second in each process of the tests
        for node in ast.walk(ast.parse(content)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node)
                if text is not None:
                    yield path, getattr(node, "name", ""), node.body[0].lineno - 1, text


EXAMPLES = [place for place in docstrings() if ">>>" in place[-1]]


@pytest.fixture
def tables_restored() -> Iterator[None]:
    """An example that registers something does not change the tables."""
    tables: list[dict[str, Any]] = [DATA, MODELS, CALLBACKS, OPTIMIZERS]
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


@pytest.mark.parametrize(
    ("path", "name", "line", "text"), EXAMPLES, ids=[f"{p.stem}.{name}" for p, name, *_ in EXAMPLES]
)
@pytest.mark.usefixtures("tables_restored")
def test_an_example_prints_what_it_shows(
    path: Path, name: str, line: int, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path.parent.name == "private" and path.stem in ("backpack", "opacus"):
        pytest.importorskip(path.stem)
    monkeypatch.chdir(tmp_path)
    test = PARSER.get_doctest(text, dict(NAMES), name, str(path), line)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=report.append)
    assert not report, "".join(report)


def test_every_public_name_has_an_example() -> None:
    """Errors are raised by the functions that document them."""
    for name in revzoo.__all__:
        value = getattr(revzoo, name)
        if not (isinstance(value, type) and issubclass(value, Exception)):
            assert ">>>" in (value.__doc__ or ""), name


def test_no_example_is_left_out() -> None:
    """A block of code without prompts would not run."""
    for path, name, _, text in docstrings():
        assert "Example::" not in text, (path, name)
        assert "+SKIP" not in text, (path, name)
