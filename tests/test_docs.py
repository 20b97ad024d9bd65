"""Links in the documentation lead somewhere, and tables of figures are whole."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *RESULTS.rglob("*.md")])
TABLES = sorted(RESULTS.rglob("*.csv"))
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_to_files(page: Path) -> None:
    """A page that moves takes the links to it along."""
    links = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("table", TABLES, ids=name)
def test_tables_have_a_header_and_as_many_columns_in_each_row(table: Path) -> None:
    """A spreadsheet and pandas read a CSV file of results without options."""
    with table.open(newline="") as file:
        head, *rows = csv.reader(file, strict=True)
    assert len(set(head)) == len(head) > 1
    assert {len(row) for row in rows} == {len(head)}


def test_there_are_pages_and_tables() -> None:
    """Both lists are found by path, so an empty one would pass every test above."""
    assert PAGES
    assert TABLES
