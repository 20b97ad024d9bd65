"""docs/how-to/extend.md: its module registers its classes; its fragments are valid."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import revzoo
from revzoo.data import ImageData
from revzoo.data.registry import DATA
from revzoo.models.registry import MODELS
from revzoo.training.callbacks.registry import CALLBACKS
from revzoo.training.optim.optimizers import OPTIMIZERS

PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "extend.md"
BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
OWN, HERE = PAGE.read_text().split("## In this repository")


def blocks(text: str, language: str) -> list[str]:
    return [textwrap.dedent(body) for _, kind, body in BLOCK.findall(text) if kind == language]


@pytest.fixture
def tables() -> Iterator[None]:
    """Names that an example registers disappear after it."""
    found: list[dict[str, Any]] = [DATA, MODELS, CALLBACKS, OPTIMIZERS]
    before = [dict(table) for table in found]
    yield
    for table, content in zip(found, before, strict=True):
        table.clear()
        table.update(content)
    sys.modules.pop("mymodels", None)


@pytest.mark.usefixtures("tables")
def test_the_module_registers_a_model_data_a_callback_and_an_optimiser(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, use = blocks(OWN, "python")
    (tmp_path / "mymodels.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    exec(use, names)
    data = DATA["mydata"](count=32, batch_size=4)
    data.setup("fit")
    images, labels = next(iter(data.train_dataloader()))
    loss = torch.nn.functional.cross_entropy(
        names["model"](data.transform(images, training=True)), labels
    )
    loss.backward()
    assert "grad_norm" in CALLBACKS
    assert OPTIMIZERS["nadam"][1] is torch.optim.NAdam
    assert "mynet" in revzoo.list_models("my*")


def test_fragments_of_the_repository_run() -> None:
    """Classes are defined, with their imports; rows of tables and configurations are parsed."""
    defined: dict[str, Any] = {"Path": Path, "pl": __import__("pytorch_lightning")}
    for block in blocks(HERE, "python"):
        if "import" in block:
            exec(block, defined)
        else:
            compile(f"{{{block}}}" if block.startswith('"') else block, PAGE, "exec")
    assert issubclass(defined["FashionMNIST"], ImageData)
    assert hasattr(defined["GradNorm"], "on_before_optimizer_step")
    configurations = [yaml.safe_load(block) for block in blocks(HERE, "yaml")]
    assert all(isinstance(found, dict) for found in configurations)
    assert len(configurations) >= 4
