"""The made pages of the site hold every public name, command and option; Sphinx builds them all."""

from __future__ import annotations

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

import revzoo
from revzoo.cli.main import COMMANDS

DOCS = Path(__file__).parents[1] / "docs"
TREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference", DOCS / "_ext" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pages(reference: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "88")
        reference.write(folder)
    paths = {str(path.relative_to(folder).with_suffix("")): path for path in folder.rglob("*.md")}
    return {name: path.read_text() for name, path in paths.items()}


def test_every_public_name_has_a_section(pages: dict[str, str]) -> None:
    named = set(re.findall(r"^### (\w+)$", pages["api"], re.MULTILINE))
    assert named == set(revzoo.__all__)
    overview = pages["api"].partition("\n## ")[0]
    assert set(re.findall(r"\[`(\w+)`\]", overview)) == named


def test_every_command_has_its_help(pages: dict[str, str]) -> None:
    for name in COMMANDS:
        assert f"## revzoo {name}\n\n```text\nusage: revzoo {name} " in pages["commands"]


def test_every_configuration_file_is_shown_whole(pages: dict[str, str]) -> None:
    for path in (DOCS.parent / "configs").glob("*/*.yaml"):
        *_, last = path.read_text().rstrip().splitlines()
        page = pages[f"configuration/{path.parent.name}"]
        section = page.partition(f"## {path.parent.name}/{path.stem}\n")[2]
        assert last in section.partition("\n## ")[0], path


def test_an_option_stands_with_its_value_and_its_comment(pages: dict[str, str]) -> None:
    rows = {
        "configuration/callbacks": (
            r"`callbacks\.best_checkpoint\.monitor` \| `null` \| `val/loss`, .* \| null: that of",
            r"`callbacks\.drift` \| `null` \| a mapping or null \| relative error",
        ),
        "configuration/optim": (
            r"`optim\.schedule\.warmup` \| `0\.25` \| a number in \(0, 1\) \|",
        ),
        "configuration": (r"`seed` \|  \| a whole number in \[0, .*\] \| of the initial weights",),
    }
    for page, patterns in rows.items():
        for pattern in patterns:
            assert re.search(pattern, pages[page]), pattern


def test_every_page_is_in_the_tree(pages: dict[str, str]) -> None:
    """Sphinx warns of pages that no page names, and ``make docs`` fails then."""
    there = {
        page: page.read_text()
        for page in DOCS.rglob("*.md")
        if page.relative_to(DOCS).parts[0] not in ("_build", "_ext", "reference", "experiments.md")
    }
    named = {DOCS / "index.md"}
    trees = {DOCS / "reference" / f"{name}.md": pages[name] for name in ("index", "configuration")}
    for page, text in [*there.items(), *trees.items()]:
        lines = (line for tree in TREE.findall(text) for line in tree.splitlines())
        for line in lines:
            if line and not line.startswith(":"):
                found = page.parent.glob(f"{line}.md") if "*" in line else [page.parent / line]
                named |= {path.with_suffix(".md").resolve() for path in found}
    notebooks = (DOCS.parent / "notebooks").glob("*.ipynb")
    named = {page for page in named if page.parent.name != "reports"}  # a pattern names them
    made = {DOCS / "reference" / f"{name}.md" for name in pages if "reports/" not in name}
    made |= {DOCS / "reference" / f"{path.stem}.md" for path in notebooks}
    assert made <= named
    assert named - made == {*there}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_sphinx_builds_the_site_without_a_warning(tmp_path: Path) -> None:
    build = pytest.importorskip("sphinx.cmd.build")
    arguments = ["-W", "-q", "-d", str(tmp_path / "trees"), str(DOCS), str(tmp_path / "html")]
    path = list(sys.path)
    try:
        assert build.main(arguments) == 0
    finally:
        sys.path[:] = path
    assert "create_model" in (tmp_path / "html" / "reference" / "api.html").read_text()


def test_the_log_of_experiments_is_no_page(
    reference: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a file of the checkout: the site names it and does not link it."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # which conf.py extends
    source = ["[log](../experiments.md#x), [report](../benchmarks/results/zoo.md)"]
    reference.unlink_log(None, "guide/runs", source)
    assert source == ["log, `docs/experiments.md`, [report](../benchmarks/results/zoo.md)"]
    assert "experiments.md" in runpy.run_path(str(DOCS / "conf.py"))["exclude_patterns"]


def test_the_header_shows_the_version_and_links_the_repository(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("GITHUB_REPOSITORY", "owner/name")
    options = runpy.run_path(str(DOCS / "conf.py"))["html_theme_options"]
    assert options["github_url"] == "https://github.com/owner/name"
    assert options["logo"]["text"] == f"revzoo {revzoo.__version__}"


def test_the_api_begins_with_the_names_that_a_newcomer_needs(pages: dict[str, str]) -> None:
    first = re.findall(r"^### (\w+)$", pages["api"], re.MULTILINE)[:4]
    assert first == ["create_model", "ReversibleBlock", "set_memory", "make_reversible"]


def test_links_of_a_copied_report_lead_to_files(reference: ModuleType) -> None:
    source = ["[csv](curves/a.csv), [page](../../docs/guide/runs.md)"]
    reference.link_copies(None, "reference/reports/plans_cpu", source)
    curves = "../../../benchmarks/results/curves"
    assert source == [f"[csv]({curves}/a.csv), [page](/guide/runs.md)"]
    assert (DOCS / "reference" / "reports" / curves).resolve().is_dir()


def test_public_names_lead_to_the_api(reference: ModuleType) -> None:
    text = "`revzoo.audit(model, shape)`, `revzoo.nothing`, [`revzoo.audit`](a.md)\n"
    source = [text + "```python\n# `revzoo.audit`\n```\n"]
    reference.link_names(None, "guide/memory", source)
    linked = "{py:obj}`revzoo.audit(model, shape) <revzoo.profiling.audit.audit>`"
    assert source[0].startswith(f"{linked}, `revzoo.nothing`, [`revzoo.audit`](a.md)")
    assert "# `revzoo.audit`" in source[0]
