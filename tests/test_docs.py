"""Links lead somewhere, commands are understood, tables of figures are whole."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from revzoo.cli.commands.evaluate import with_key
from revzoo.cli.config import TRAIN, ConfigFiles, compose
from revzoo.cli.main import parse
from revzoo.cli.run.multirun import split_jobs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MADE = {ROOT / "docs" / name for name in ("_build", "reference")}  # by Sphinx
DOCS = [page for page in (ROOT / "docs").rglob("*.md") if not MADE & {*page.parents}]
README, INDEX = ROOT / "README.md", ROOT / "docs" / "index.md"
PAGES = sorted([README, *DOCS, *RESULTS.rglob("*.md")])
TABLES = sorted(RESULTS.rglob("*.csv"))
SHELL = re.compile(r"^ *```bash\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"`((?:revzoo|python train\.py) [a-z]+ [^`]*)`")
PRIMARY = {"train": "train", "eval": "eval"}  # commands that take a configuration, and its file
LOG = ROOT / "docs" / "experiments.md"  # of commands of the past
WHICH = ROOT / "docs" / "which-mode.md"
SHOWN = [*sorted({*DOCS} - {LOG}), README, ROOT / "CONTRIBUTING.md"]
OWN = ROOT / "docs" / "how-to" / "extend.md"  # its commands name what the reader has written
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


def commands() -> Iterator[tuple[Path, list[str]]]:
    """Each command that a page shows, as words of the shell."""
    for page in SHOWN:
        text = page.read_text()
        blocks = "\n".join(SHELL.findall(text)).replace("\\\n", " ").splitlines()
        for line in (*blocks, *INLINE.findall(text)):
            words = shlex.split(line, comments=True)
            if words[:2] == ["python", "train.py"]:
                words[:2] = ["revzoo", "train"]
            if words[:1] == ["revzoo"] and not {"...", "--help"} & {*words}:
                yield page, words[1:]


@pytest.mark.parametrize(
    ("page", "words"),
    {" ".join(words): pytest.param(page, words) for page, words in commands()}.values(),
)
def test_a_command_has_these_options(page: Path, words: list[str]) -> None:
    """Nothing is run: the arguments are parsed, and a run's configuration is composed."""
    _, args = parse(words)
    unknown = page == OWN or getattr(args, "imports", []) or getattr(args, "resume", None)
    if words[0] in PRIMARY and not unknown:
        overrides = with_key(args.overrides) if words[0] == "eval" else args.overrides
        if getattr(args, "multirun", False):
            (overrides, *_), _ = split_jobs(overrides, TRAIN)
        compose(overrides, ConfigFiles(PRIMARY[words[0]]))


def test_make_has_the_targets_that_pages_name() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in SHOWN:
        assert set(re.findall(r"`make ([a-z-]+)", page.read_text())) <= targets, page


@pytest.mark.parametrize("page", [README, INDEX, WHICH], ids=name)
def test_figures_of_a_table_stand_in_their_reports(page: Path) -> None:
    """In each row that links a report, every figure outside of names and sizes is in the report."""
    rows = [line for line in page.read_text().splitlines() if re.match(r"\|.*results/", line)]
    assert rows
    for row in rows:
        (report,) = (link for link in LINK.findall(row) if "results/" in link)
        text = (page.parent / report).read_text()
        words = re.sub(r"\w*[a-z]\w*|batch \d+|at \d+ pixels", "", LINK.sub("]", row))
        figures = re.findall(r"\d+(?:\.\d+)?", words)
        assert figures, row
        assert [
            n for n in figures if not re.search(rf"(?<![\d.]){re.escape(n)}(?![\d.])", text)
        ] == []
