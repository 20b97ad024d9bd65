"""The README and the guide: examples run, links lead to files, first pages are short."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import pytorch_lightning as pl
import torchvision

import revzoo
from revzoo.data.augment import POLICIES
from revzoo.models.registry import MODELS

ROOT = Path(__file__).parents[1]
README, GUIDE = ROOT / "README.md", ROOT / "docs" / "guide"
HOW_TO = ROOT / "docs" / "how-to"
ELSEWHERE = {HOW_TO / "extend.md", HOW_TO / "move-from-memcnn.md"}  # test_extend, tests/peers
SITE = [
    ROOT / "docs" / name for name in ("index.md", "tutorial.md", "which-mode.md", "questions.md")
]
HOW_TOS = sorted(set(HOW_TO.glob("*.md")) - ELSEWHERE)
PAGES = [README, *SITE, *HOW_TOS, *sorted(GUIDE.glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
FEW = {"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, "limit_test_batches": 1}
LONG = [GUIDE / "lightning.md"]  # 20 epochs as it stands
OLD = [  # other libraries call what torch calls deprecated
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
PRIVATE = HOW_TO / "private-training.md"
LIBRARIES = {  # that pages import
    PRIVATE: "opacus",
    GUIDE / "weights.md": "memcnn",
    HOW_TO / "move-from-invtorch.md": "invtorch",
    HOW_TO / "move-from-monai.md": "monai",
    HOW_TO / "move-from-revtorch.md": "revtorch",
}


def with_code() -> list[Any]:
    """The pages that hold Python, as parameters of a test."""
    pages = [page for page in PAGES if BLOCK.search(page.read_text())]
    return [
        pytest.param(page, marks=OLD if page in LIBRARIES else [], id=page.name) for page in pages
    ]


def check_readme(names: dict[str, Any], printed: str) -> None:
    model = names["model"]
    assert all(p.grad is not None for p in model.parameters())
    assert list(model.state_dict()) == list(torchvision.models.vit_b_16().state_dict())
    audits = revzoo.audit(model, names["images"].shape, modes=["store", "exact"]).audits
    assert audits["exact"].kept_bytes < 0.5 * audits["store"].kept_bytes


def check_weights(names: dict[str, Any], printed: str) -> None:
    assert names["model"].spec[0] == "revnet38_memcnn"


def check_features(names: dict[str, Any], printed: str) -> None:
    assert printed == "[32, 112] [1, 4]\n"


def check_tutorial(names: dict[str, Any], printed: str) -> None:
    assert names["features"].shape == (2, 112)
    assert len(names["found"]) == 3


def check_fine_tuning(names: dict[str, Any], printed: str) -> None:
    assert names["losses"][-1] < names["losses"][0]
    assert names["trainer"].state.finished
    assert names["trainer"].current_epoch == 3
    assert names["trainer"].optimizers[0].param_groups[-1]["name"] == "stem/norms_biases"


def check_torch_checkpoint(names: dict[str, Any], printed: str) -> None:
    text = (HOW_TO / "move-from-torch-checkpoint.md").read_text()
    assert all(f"`{line}`" in text for line in printed.splitlines())
    assert len(printed.splitlines()) == 2


CHECKS = {
    HOW_TO / "move-from-torch-checkpoint.md": check_torch_checkpoint,
    README: check_readme,
    GUIDE / "weights.md": check_weights,
    GUIDE / "features.md": check_features,
    ROOT / "docs" / "tutorial.md": check_tutorial,
    GUIDE / "fine-tuning.md": check_fine_tuning,
}


@pytest.mark.parametrize("page", with_code())
def test_the_examples_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """The blocks of a page are one program: a reader who pastes them in order gets no error."""
    pytest.importorskip(LIBRARIES.get(page, "revzoo"))
    monkeypatch.chdir(tmp_path)
    trainer, reduced = pl.Trainer, {**QUIET, **(FEW if page in LONG else {})}
    monkeypatch.setattr(pl, "Trainer", lambda **options: trainer(**{**options, **reduced}))
    text = page.read_text()
    names: dict[str, Any] = {}
    with patch.dict(MODELS), patch.dict(POLICIES):  # what a page registers disappears after it
        for block in BLOCK.finditer(text):
            line = text[: block.start(1)].count("\n")  # so that a traceback shows the page's line
            exec(compile("\n" * line + block[1], page, "exec"), names)
    printed = capsys.readouterr().out
    if page in CHECKS:
        CHECKS[page](names, printed)


def test_no_example_is_missed() -> None:
    """An unclosed or indented block would be left out silently."""
    for page in PAGES:
        text = page.read_text()
        assert text.count("```python") == len(BLOCK.findall(text)), page
    assert {*CHECKS, *LONG} <= {case.values[0] for case in with_code()}


def test_the_readme_is_short() -> None:
    """A newcomer reads at most 500 words, tables included; the rest is in ``docs/``."""
    assert len(README.read_text().split()) <= 500


def test_the_guarantees_fit_one_screen() -> None:
    """What is restored, reported and silent is read at once; details are on another page."""
    assert len((GUIDE / "guarantees.md").read_text().split()) <= 380


def test_the_tree_of_the_design_is_the_tree() -> None:
    """Every folder of the package and every file of the core is in it, and nothing else."""
    design = (ROOT / "docs" / "design.md").read_text()
    tree = design.partition("## The tree\n\n```text\n")[2].partition("```")[0]
    named = set(re.findall(r"(?<![\w/-])([a-z_]\w*(?:/|\.py))", tree))
    package = ROOT / "revzoo"
    folders = {f"{path.parent.name}/" for path in package.rglob("__init__.py")}
    files = {path.name for path in (package / "core").glob("[!_]*.py")}
    outside = {"configs/", "tests/", "benchmarks/", "notebooks/", "docs/"}
    mentioned = {"train.py", "api.py", "_checks.py", "_files.py", "main.py", "test_architecture.py"}
    mentioned |= {"schema.py", "sweep.py", "network.py", "dense.py", "registry.py"}
    mentioned |= {"resume.py", "step_retry.py", "tuning.py", "memory.py"}
    assert named == folders | files | outside | mentioned | {"results/"}
