"""Lightning's private parts are unchanged, and only one file uses them."""

import ast
import inspect
from pathlib import Path

import pytest
import pytorch_lightning as pl
from pytorch_lightning.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from small_task import TinyNet, loader, trainer

from revzoo.training import Classifier, lightning_compat

PACKAGE = Path(inspect.getfile(lightning_compat)).parents[1]
PRIVATE = {"fit_loop", "epoch_loop", "batch_progress", "epoch_progress", "launcher"}
OWNERS = {"trainer", "pl_module", "runner", "connector", "loop"}


def private_uses(source):
    """Attributes and imports of Lightning's private parts in ``source``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in PRIVATE or (owner in OWNERS and node.attr.startswith("_")):
                found.append(f"{owner}.{node.attr}")
        if isinstance(node, ast.ImportFrom) and "lightning" in str(node.module):
            inner = str(node.module).split(".")[:1] == ["lightning_fabric"]
            names = [alias.name for alias in node.names]
            if inner or ".loops" in str(node.module) or any(n.startswith("_") for n in names):
                found.append(f"{node.module}: {', '.join(names)}")
    return found


def test_a_private_use_is_found():
    found = private_uses("trainer.fit_loop.x; trainer._results; trainer.loggers")
    assert sorted(found) == ["trainer._results", "trainer.fit_loop"]
    assert private_uses("from pytorch_lightning.loops.fit_loop import _FitLoop")


@pytest.mark.parametrize(
    "path",
    [*sorted((PACKAGE / "training").rglob("*.py")), *sorted((PACKAGE / "private").glob("*.py"))],
    ids=lambda p: str(p.name),
)
def test_only_one_file_uses_private_parts(path):
    if path.name != "lightning_compat.py":
        assert private_uses(path.read_text()) == []


class Watch(pl.Callback):
    """Records the values of the private parts during a run."""

    def __init__(self):
        self.notes = []

    def on_train_batch_end(self, trainer, *args):
        counts = (
            lightning_compat.batches_of_epoch(trainer),
            lightning_compat.batches_of_run(trainer),
        )
        self.notes.append((*counts, lightning_compat.epoch_is_open(trainer)))

    def on_train_epoch_end(self, trainer, *args):
        self.notes.append(lightning_compat.epoch_is_open(trainer))


def test_their_values_in_a_run(tmp_path):
    watch = Watch()
    runner = trainer(tmp_path, callbacks=[watch], limit_train_batches=2)
    runner.fit(Classifier(TinyNet()), loader())
    assert watch.notes == [(1, 1, True), (2, 2, True), False, (1, 3, True), (2, 4, True), False]
    assert lightning_compat.trainer_of(Classifier(TinyNet())) is None


def test_the_parts_exist():
    assert "self.procs" in inspect.getsource(_SubprocessScriptLauncher)
    loop = inspect.getsource(inspect.getmodule(type(pl.Trainer(logger=False).fit_loop)))
    assert "self._iteration_based_training()" in loop
