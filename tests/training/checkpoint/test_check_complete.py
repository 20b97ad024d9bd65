"""A run resumes only from a complete state whose parts fit together."""

import copy
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
from revzoo.training.checkpoint.restore import check_complete
from revzoo.weights.source import LAST

NET = {**TINY, "num_classes": 10}
WEIGHT = "model.fc.weight"
KEPT = {"best_checkpoint": {}, "last_checkpoint": {}, "early_stopping": {}}
State = dict[str, Any]


def saved(folder, optim, names, **options):
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


def check(state, names, folder):
    callbacks = build_callbacks(names, run_dir=folder)
    check_complete(state, "a.ckpt", data="Digits", callbacks=callbacks)


SGD = {"schedule": {"name": "onecycle"}}
EMA = {**KEPT, "ema": {}}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
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
def test_the_state_of_a_run_is_accepted(optim, names, options, tmp_path):
    names = {**KEPT, **names}
    check(saved(tmp_path, optim, names, **options), names, tmp_path)


DAMAGES = [
    (lambda s: s.pop("global_step"), "a.ckpt lacks global_step"),
    (lambda s: s.pop("loops"), "lacks loops"),
    (lambda s: s.pop("optimizer_states"), "lacks optimizer_states"),
    (lambda s: s.pop("callbacks"), r"lacks callbacks, callbacks\['RunState'\]"),
    (lambda s: s["callbacks"].pop("AveragedWeights"), r"\['AveragedWeights'\]"),
    (lambda s: s.pop("Digits"), "lacks Digits"),
    (lambda s: s["state_dict"].pop(WEIGHT), rf"a\.ckpt do not fit.*1 missing: {WEIGHT}"),
    (lambda s: s["state_dict"].update({WEIGHT: torch.ones(3)}), r"fc\.weight \(file: \(3,\)"),
    (lambda s: s["state_dict"].update(extra=torch.ones(1)), "1 unexpected: extra"),
    (lambda s: s["state_dict"][WEIGHT].fill_(float("nan")), r"NaN or Inf in .*fc\.weight"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES, ids=[message for _, message in DAMAGES])
def test_the_damaged_part_is_named(damage, message, good, tmp_path):
    check(good, EMA, tmp_path)
    state = copy.deepcopy(good)
    damage(state)
    with pytest.raises(DamagedCheckpointError, match=f"(?s){message}"):
        check(state, EMA, tmp_path)
