"""Compiled branches train like eager ones, keep their keys, and are eager again after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from small_task import TINY, Fails, TinyNet, loader, trainer

from revzoo.models import create_model
from revzoo.training import Classifier, CompiledBranches
from revzoo.training.callbacks.compile import residual_functions
from revzoo.training.callbacks.ema import AveragedWeights

# Dynamo itself looks at .grad of the non-leaf tensors that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


IREVNET = {
    "name": "irevnet13",
    "num_classes": 2,
    "in_chans": 1,
    "units": [1, 1],
    "channels": [4, 16],
}


def trained(run_dir: Path, model: dict[str, Any], *callbacks: Any, batches: int = 2) -> Classifier:
    torch.manual_seed(0)
    module = Classifier(model, optim={"lr": 0.05}).double()
    options = {"limit_train_batches": batches, "limit_val_batches": 1, "max_epochs": 1}
    runner = trainer(run_dir, callbacks=list(callbacks), precision="64-true", **options)
    runner.fit(module, loader(), loader(24, seed=1))
    return module


@pytest.mark.parametrize(
    "model",
    [{**TINY, "memory": "invert", "dropout": 0.2}, {**IREVNET, "memory": "exact"}],
    ids=["revnet", "irevnet"],
)
def test_the_weights_equal_an_eager_runs(tmp_path: Path, model: dict[str, Any]) -> None:
    compiled = trained(tmp_path, model, CompiledBranches(backend="aot_eager"))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    eager = trained(tmp_path, model)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-6, atol=1e-9)
    branches = residual_functions(compiled)
    assert branches
    assert all(branch._compiled_call_impl is None for branch in branches)


def test_every_branch_is_compiled_beyond_torchs_limit(tmp_path: Path) -> None:
    limit = torch.compiler.config.recompile_limit
    seen = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            branches = residual_functions(pl_module)
            assert all(branch._compiled_call_impl is not None for branch in branches)
            seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    model = {**TINY, "units": [2, 2, 2], "widths": [4, 6, 8], "memory": "store"}
    trained(tmp_path, model, CompiledBranches(backend="eager"), Look(), batches=1)
    assert seen[0] > limit
    assert torch.compiler.config.recompile_limit == limit


def test_branches_are_eager_again_when_a_run_fails(tmp_path: Path) -> None:
    limit = torch.compiler.config.recompile_limit
    module = Classifier(TINY, optim={"lr": 0.05})
    run = trainer(tmp_path, callbacks=[CompiledBranches(backend="eager"), Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(module, loader())
    assert all(branch._compiled_call_impl is None for branch in residual_functions(module))
    assert torch.compiler.config.recompile_limit == limit


def test_it_works_with_a_weight_average(tmp_path: Path) -> None:
    callbacks = CompiledBranches(backend="eager"), AveragedWeights(decay=0.5)
    module = trained(tmp_path, {**TINY, "memory": "invert"}, *callbacks)
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


def test_models_of_the_zoo_have_branches() -> None:
    counts = {"revnet38": 18, "resnet32": 15, "irevnet13": 4, "revvit_cifar": 12}
    found = {name: len(residual_functions(create_model(name))) for name in counts}
    assert found == counts


def test_models_without_branches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backend=inductr.*did you mean 'inductor'"):
        CompiledBranches(backend="inductr")
    runner = trainer(tmp_path, callbacks=[CompiledBranches(backend="eager")])
    with pytest.raises(ValueError, match="Classifier has no residual function to compile"):
        runner.fit(Classifier(TinyNet()), loader(), loader())
