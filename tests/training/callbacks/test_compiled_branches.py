"""Compiled branches train like eager ones, keep their keys, and are eager again after training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch._dynamo.config
import torch._functorch.config
from small_task import TINY, Fails, TinyNet, loader, trainer

import revzoo
from revzoo.models import create_model
from revzoo.private.gradients import refuse_unsupported
from revzoo.training import Classifier, CompiledBranches
from revzoo.training.callbacks.compiled_branches import BANS, compiled_parts
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


def compiled_modules(module: torch.nn.Module) -> list[str]:
    return [name for name, m in module.named_modules() if m._compiled_call_impl is not None]


def trained(run_dir: Path, model: dict[str, Any], *callbacks: Any, batches: int = 2) -> Classifier:
    torch.manual_seed(0)
    module = Classifier(model, optim={"lr": 0.05}).double()
    options = {"limit_train_batches": batches, "limit_val_batches": 1, "max_epochs": 1}
    runner = trainer(run_dir, callbacks=list(callbacks), precision="64-true", **options)
    runner.fit(module, loader(), loader(24, seed=1))
    return module


@pytest.mark.parametrize(
    "model",
    [
        {**TINY, "memory": "invert", "dropout": 0.2},
        {**IREVNET, "memory": "exact"},
        {**TINY, "memory": "store"},
        {**TINY, "name": "resnet32", "memory": "recompute"},
    ],
    ids=["revnet", "irevnet", "stored", "resnet"],
)
def test_the_weights_equal_an_eager_runs(tmp_path: Path, model: dict[str, Any]) -> None:
    compiled = trained(tmp_path, model, CompiledBranches(backend="aot_eager"))
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0
    eager = trained(tmp_path, model)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-6, atol=1e-9)
    assert not compiled_modules(compiled)


@torch._dynamo.config.patch(recompile_limit=8)  # torch's; timm.optim raises it when imported
def test_every_branch_is_compiled_beyond_torchs_limit(tmp_path: Path) -> None:
    limit = torch.compiler.config.recompile_limit
    seen = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            branches = [m.branch for m in pl_module.modules() if isinstance(m, revzoo.Coupling)]
            assert branches
            assert all(branch._compiled_call_impl is not None for branch in branches)
            seen.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    model = {**TINY, "units": [2, 2, 2], "widths": [4, 6, 8], "memory": "invert"}
    trained(tmp_path, model, CompiledBranches(backend="eager"), Look(), batches=1)
    assert seen[0] > limit
    assert torch.compiler.config.recompile_limit == limit


def test_branches_are_eager_again_when_a_run_fails(tmp_path: Path) -> None:
    limit = torch.compiler.config.recompile_limit
    module = Classifier(TINY, optim={"lr": 0.05})
    run = trainer(tmp_path, callbacks=[CompiledBranches(backend="eager"), Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(module, loader())
    assert not compiled_modules(module)
    assert {getattr(torch._functorch.config, name) for name in BANS} == {True}
    assert torch.compiler.config.recompile_limit == limit


def test_it_works_with_a_weight_average(tmp_path: Path) -> None:
    callbacks = CompiledBranches(backend="eager"), AveragedWeights(decay=0.5)
    module = trained(tmp_path, {**TINY, "memory": "invert"}, *callbacks)
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())


def test_models_of_the_zoo_have_branches() -> None:
    counts = {"revnet38": 18, "resnet32": 15, "irevnet13": 4, "revvit_cifar": 12}
    for name, count in counts.items():
        model = create_model(name, memory="recompute")
        assert len(list(compiled_parts(model))) == count


def test_a_stored_model_is_one_part_and_stored_stages_are_parts() -> None:
    model = create_model("revnet38", memory="store")
    assert list(compiled_parts(model)) == [model]
    revzoo.set_memory(model.stages[0], "invert")
    stem, *branches, second, third = compiled_parts(model)
    assert stem is model.stem
    assert (second, third) == tuple(model.stages)[1:]
    assert branches == [m.branch for m in model.stages[0].modules() if hasattr(m, "branch")]


def test_stages_of_any_mode_have_the_eager_gradients(tmp_path: Path) -> None:
    modes = ("invert", "recompute", "store")

    def run(*callbacks: pl.Callback) -> Classifier:
        torch.manual_seed(0)
        module = Classifier({**TINY, "units": [1, 1, 1]}, optim={"lr": 0.05}).double()
        for stage, mode in zip(module.model.stages, modes, strict=True):
            revzoo.set_memory(stage, mode)
        options = {"limit_train_batches": 2, "limit_val_batches": 1, "max_epochs": 1}
        runner = trainer(tmp_path, callbacks=list(callbacks), precision="64-true", **options)
        runner.fit(module, loader(), loader(24, seed=1))
        return module

    eager, compiled = run(), run(CompiledBranches(backend="aot_eager"))
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-6, atol=1e-9)


def test_models_without_branches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"backend=inductr.*did you mean 'inductor'"):
        CompiledBranches(backend="inductr")
    runner = trainer(tmp_path, callbacks=[CompiledBranches(backend="eager")])
    with pytest.raises(ValueError, match="Classifier has no residual function to compile"):
        runner.fit(Classifier(TinyNet()), loader(), loader())


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_gradients_have_the_dropout_of_the_forward_pass(memory: str) -> None:
    """torch's activation_memory_budget draws again in the backward pass, without an error."""
    torch.manual_seed(0)
    network = Classifier({**TINY, "dropout": 0.3, "memory": memory}).double()
    callback = CompiledBranches(backend="aot_eager")
    callback.setup(None, network, "fit")  # type: ignore[arg-type]
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)

    def loss(shift: float) -> torch.Tensor:
        torch.manual_seed(1)
        return network(x.add(direction, alpha=shift)).square().sum()

    try:
        (gradient,) = torch.autograd.grad(loss(0.0), x)
        slope = (loss(1e-6) - loss(-1e-6)).item() / 2e-6
    finally:
        callback.undo(network)
    assert (gradient * direction).sum().item() == pytest.approx(slope, rel=1e-5)


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_hooks_that_come_after_compiling_run(tmp_path: Path, memory: str) -> None:
    """torch does not look for new hooks by default."""

    class Hook(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 1:
                convs = [m for m in pl_module.modules() if isinstance(m, torch.nn.Conv2d)]
                convs[1].register_forward_hook(lambda module, inputs, output: output * 1.5)

    model = {**TINY, "memory": memory}
    eager = trained(tmp_path, model, Hook(), batches=3)
    compiled = trained(tmp_path, model, Hook(), CompiledBranches(backend="eager"), batches=3)
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, eager.state_dict()[name], rtol=1e-6, atol=1e-9)


def test_a_users_own_compiling_and_torchs_settings_come_back() -> None:
    module = Classifier({**TINY, "memory": "store"})
    module.model.compile(backend="eager")
    own, before = module.model._compiled_call_impl, torch._dynamo.config.skip_nnmodule_hook_guards
    callback = CompiledBranches(backend="eager")
    callback.setup(None, module, "fit")  # type: ignore[arg-type]
    assert module.model._compiled_call_impl is not own
    callback.undo(module)
    assert module.model._compiled_call_impl is own
    assert torch._dynamo.config.skip_nnmodule_hook_guards == before
    assert {getattr(torch._functorch.config, name) for name in BANS} == {True}


def test_modules_of_a_user_are_not_compiled_as_a_whole() -> None:
    """torch may be unable to compile their code, for example if it counts its calls."""
    model = create_model("revnet38", memory="store")
    wrapped = torch.nn.Sequential(model, torch.nn.Identity())
    assert list(compiled_parts(wrapped)) == [model]


def test_gradients_of_samples_refuse_compiled_parts() -> None:
    model = create_model("resnet32", norm="group")
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="'ResNet' is compiled"):
        refuse_unsupported(model)
