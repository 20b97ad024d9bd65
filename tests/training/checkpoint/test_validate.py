"""A run resumes only from a complete state whose parts fit together."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_task import TINY, trainer

from revzoo.data import Digits
from revzoo.training import Classifier, build_callbacks
from revzoo.training.checkpoint.files import (
    DamagedCheckpointError,
    PlainCheckpointIO,
    read_checkpoint,
)
from revzoo.training.checkpoint.validate import check_contents, check_parts
from revzoo.weights.run_files import LAST

NET = {**TINY, "num_classes": 10}
WEIGHT = "model.fc.weight"
KEPT: dict[str, Any] = {"best_checkpoint": {}, "last_checkpoint": {}, "early_stopping": {}}
State = dict[str, Any]


def saved(folder: Path, optim: dict[str, Any], names: dict[str, Any], **options: Any) -> State:
    """The state that a run of two steps saves."""
    runner = trainer(
        folder,
        enable_checkpointing=True,
        callbacks=build_callbacks(names, run_dir=folder),
        plugins=[PlainCheckpointIO()],
        **{"max_epochs": 1, "limit_train_batches": 2, "limit_val_batches": 1, **options},
    )
    module = Classifier(NET, optim=optim)
    if options.get("precision") == "64-true":
        module.double()
    runner.fit(module, datamodule=Digits(batch_size=32))
    return read_checkpoint(folder / "checkpoints" / LAST)


def check(state: State, names: dict[str, Any], folder: Path) -> None:
    check_parts(state)
    check_contents(state, data="Digits", callbacks=build_callbacks(names, run_dir=folder))


SGD = {"schedule": {"name": "onecycle"}}
EMA = {**KEPT, "ema": {}}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> State:
    with torch.random.fork_rng():
        return saved(tmp_path_factory.mktemp("good"), SGD, EMA)


@pytest.mark.parametrize(
    ("optim", "names", "options"),
    [
        ({"schedule": {"name": "step"}}, {}, {}),
        ({"momentum": 0.0, "nesterov": False, "schedule": {"name": "constant"}}, {}, {}),
        ({"layer_decay": 0.5, "schedule": {"name": "cosine"}}, {"finetuning": {}}, {}),
        ({"name": "muon", "lr": 0.02, "sgd_lr": 0.1}, {"ema": {}}, {}),
        (SGD, {}, {"precision": "64-true"}),
        (SGD, {name: {} for name in ("footprint", "epoch_log", "drift", "batch_norm")}, {}),
    ],
)
def test_the_state_of_a_run_is_accepted(
    optim: dict[str, Any], names: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    names = {**KEPT, **names}
    check(saved(tmp_path, optim, names, **options), names, tmp_path)


def test_parameters_that_the_scaler_skipped_need_no_momentum(good: State, tmp_path: Path) -> None:
    state = copy.deepcopy(good)
    state["MixedPrecision"] = torch.amp.GradScaler("cpu").state_dict()
    state["optimizer_states"][0]["state"] = {}
    check(state, EMA, tmp_path)
    state["MixedPrecision"].pop("scale")
    with pytest.raises(DamagedCheckpointError, match=r"MixedPrecision\['scale'\] is missing"):
        check(state, EMA, tmp_path)


def test_keys_that_earlier_versions_lack_may_be_missing(good: State, tmp_path: Path) -> None:
    state = copy.deepcopy(good)
    for name in ("pixel_max", "order_seed", "crop_pct"):
        del state["Digits"][name]
    del state["callbacks"]["RunState"]["planned_steps"]
    for group in optimizer(state)["param_groups"]:
        del group["name"]
    check(state, EMA, tmp_path)


def optimizer(state: State) -> State:
    found: State = state["optimizer_states"][0]
    return found


def momentum(state: State) -> torch.Tensor:
    found: torch.Tensor = optimizer(state)["state"][0]["momentum_buffer"]
    return found


def run_state(state: State) -> State:
    found: State = state["callbacks"]["RunState"]
    return found


def fit_loop(state: State) -> State:
    found: State = state["loops"]["fit_loop"]
    return found


DAMAGES: list[tuple[Callable[[State], object], str]] = [
    (lambda s: s.pop("global_step"), "global_step is missing"),
    (lambda s: s.update(global_step=7), "global_step is 7, but its loops say 2"),
    (lambda s: s.update(epoch="0"), "epoch is str '0', expected int"),
    (lambda s: s.pop("loops"), "loops is missing"),
    (lambda s: fit_loop(s).pop("epoch_progress"), r"\['epoch_progress'\] is missing"),
    (lambda s: s.pop("hyper_parameters"), "hyper_parameters is missing"),
    (lambda s: s.update(hyper_parameters="x"), "hyper_parameters is str 'x', expected a mapping"),
    (lambda s: s["hyper_parameters"].update(model="x"), r"\['model'\] is str 'x'"),
    (lambda s: s["hyper_parameters"]["model"].update(num_classes=-1), "describe no model"),
    (lambda s: s["hyper_parameters"]["model"].update(num_classes=3), r"expected .* \[3, 4\]"),
    (lambda s: s["state_dict"].pop(WEIGHT), r"fc\.weight'\] is missing"),
    (lambda s: s["state_dict"].update({WEIGHT: torch.ones(3)}), r"of shape \[3\], expected a"),
    (lambda s: s["state_dict"].update({WEIGHT: 1.0}), "is float 1.0, expected a floating-point"),
    (
        lambda s: s["state_dict"].update(extra=torch.ones(1)),
        "'extra', which the model does not have",
    ),
    (lambda s: s["state_dict"][WEIGHT].fill_(float("nan")), r"fc\.weight'\] has NaN"),
    (lambda s: s.pop("current_model_state"), "current_model_state is missing"),
    (
        lambda s: s["current_model_state"][WEIGHT].fill_(float("inf")),
        "current_model_state.* has N",
    ),
    (lambda s: s["averaging_state"].clear(), "n_averaged'] is missing"),
    (lambda s: s.pop("optimizer_states"), "optimizer_states is missing"),
    (lambda s: s.update(optimizer_states=[]), "optimizer_states is a list of 0"),
    (lambda s: optimizer(s)["param_groups"].pop(), "a list of 1, expected a list of 2"),
    (lambda s: optimizer(s)["param_groups"][0]["params"].reverse(), "does not list the model's"),
    (lambda s: optimizer(s)["state"].pop(1), r"\['state'\]\[1\] is missing"),
    (lambda s: optimizer(s)["state"][1].clear(), "momentum_buffer'] is missing"),
    (lambda s: optimizer(s)["state"].update({999: {}}), "999, which is not a parameter"),
    (lambda s: optimizer(s)["state"][0].update(momentum_buffer=torch.ones(3)), r"shape \[3\], ex"),
    (lambda s: momentum(s).fill_(float("nan")), "momentum_buffer'] has NaN"),
    (lambda s: s.update(lr_schedulers=[]), "lr_schedulers is a list of 0, expected a list of 1"),
    (lambda s: s["lr_schedulers"][0].pop("last_epoch"), "last_epoch'] is missing"),
    (lambda s: s.pop("callbacks"), "callbacks is missing"),
    (lambda s: s["callbacks"].pop("RunState"), r"\['RunState'\] is missing"),
    (lambda s: s["callbacks"].pop("AveragedWeights"), r"\['AveragedWeights'\] is missing"),
    (lambda s: run_state(s).update(random=[]), "holds no random states"),
    (lambda s: run_state(s)["random"][0].pop("numpy"), r"\['numpy'\] is missing"),
    (lambda s: run_state(s)["random"][0].update(torch=torch.ones(3)), r"\['torch'\] is a float"),
    (lambda s: run_state(s).pop("figures"), r"\['figures'\] is missing"),
    (lambda s: run_state(s).update(metrics={"loss": {}}), r"\['loss'\]\['updates'\] is missing"),
    (lambda s: run_state(s).update(notes=3), r"\['notes'\] is int 3, expected a mapping"),
    (lambda s: run_state(s).update(row=[1]), r"\['row'\] is a list of 1, expected a list of 2"),
    (lambda s: s.pop("Digits"), "Digits is missing"),
    (
        lambda s: s["Digits"]["classes"].pop(),
        r"in Digits, classes is .* a list of 10 names, by label, not 9",
    ),
    (lambda s: s["Digits"]["normalisation"].update(mean=[float("nan")]), r"normalisation is .*nan"),
    (
        lambda s: s["Digits"].update(crop_pct=7),
        "in Digits, crop_pct is 7, expected a share above 0",
    ),
    (lambda s: s.update(Digits=3), "in Digits, it is 3, expected a mapping"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_the_damaged_part_is_named(
    damage: Callable[[State], object], message: str, good: State, tmp_path: Path
) -> None:
    check(good, EMA, tmp_path)
    state = copy.deepcopy(good)
    damage(state)
    with pytest.raises(DamagedCheckpointError, match=message):
        check(state, EMA, tmp_path)
