import logging
from collections import Counter

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from small_task import TINY, Fails, TinyNet, halves, loader, trainer
from torch import nn

from revzoo.core.live import LiveMemory
from revzoo.models import create_model
from revzoo.models.network import parts
from revzoo.training import Classifier, Finetuning

OPTIM = {"lr": 0.05, "schedule": {"name": "onecycle"}, "layer_decay": 0.5}
BACKBONE = ["stem", "stages.0", "stages.1", "stages.2"]


def tiny(**options):
    torch.manual_seed(0)
    return Classifier({**TINY, **options}, optim=OPTIM)


def part_of(name):
    """The part that holds an entry of the network's ``state_dict``."""
    if name.startswith("norm."):
        return "stages.2"
    return ".".join(name.split(".")[: 2 if name.startswith("stages") else 1])


class Watch(pl.Callback):
    """Records the parts whose parameters or statistics changed in each epoch."""

    def __init__(self):
        self.changed = []

    def on_train_epoch_start(self, trainer, pl_module):
        self.before = {k: v.clone() for k, v in pl_module.model.state_dict().items()}

    def on_train_epoch_end(self, trainer, pl_module):
        now = pl_module.model.state_dict()
        self.changed.append(
            {part_of(k) for k, v in self.before.items() if not torch.equal(v, now[k])}
        )


@pytest.mark.parametrize("name", ["revnet38", "revvit_cifar"])
def test_parts_hold_every_parameter_once_and_end_with_the_classifier(name):
    model = create_model(name)
    found = [p for part in parts(model) for p in part.parameters()]
    assert len(found) == len({id(p) for p in found})
    assert {id(p) for p in found} == {id(p) for p in model.parameters()}
    assert parts(model)[0].modules == (model.stem,)
    assert parts(model)[-1].modules == (model.fc,)
    assert model.norm in parts(model)[-2].modules


@pytest.mark.parametrize(
    ("unfreeze", "max_epochs", "expected"),
    [
        ([1 / 6, 1 / 3], 12, {0: "fc", 1: "fc", 2: "stages.2", 3: "stages.2", 4: "stages.1"}),
        ([1 / 6, 1 / 3], 3, {0: "stages.2", 1: "stages.1"}),
        ([1 / 6, 1 / 3], 1, {0: "stages.1"}),
        ([0.17, 0.34], 3, {0: "fc", 1: "stages.1"}),
        ([[0.5, "stages.0"]], 4, {1: "fc", 2: "stages.0"}),
    ],
)
def test_fractions_of_the_run_scale_with_its_epochs(
    unfreeze, max_epochs, expected, tmp_path, caplog
):
    callback, module = Finetuning(unfreeze=unfreeze), tiny()
    callback.check_model(module.model)  # before the run is known
    assert callback.first_trained(module.model, epoch=0) == "fc"
    runner = trainer(tmp_path, max_epochs=max_epochs, callbacks=[callback])
    callback.setup(runner, module, "fit")
    found = {epoch: callback.first_trained(module.model, epoch=epoch) for epoch in expected}
    assert found == expected


def test_fractions_need_a_number_of_epochs(tmp_path):
    callback = Finetuning(unfreeze=[0.5])
    runner = trainer(tmp_path, max_epochs=-1, max_steps=3, callbacks=[callback])
    with pytest.raises(ValueError, match=r"fractions of trainer\.max_epochs.*give epochs"):
        callback.setup(runner, tiny(), "fit")


@pytest.mark.parametrize(
    ("unfreeze", "val_check_interval", "expected"),
    [
        (None, 1.0, [{"fc"}] * 3),
        ([1, 2], 0.5, [{"fc"}, {"fc", "stages.2"}, {"fc", "stages.2", "stages.1"}]),
        ([[1, "stages.1"]], 1.0, [{"fc"}, *[{"fc", "stages.2", "stages.1"}] * 2]),
        ({0: "stages.2", 2: "stem"}, 1.0, [*[{"fc", "stages.2"}] * 2, {"fc", *BACKBONE}]),
    ],
)
def test_frozen_parameters_and_statistics_stay_bit_for_bit(
    tmp_path, unfreeze, expected, val_check_interval
):
    watch = Watch()
    callbacks = [Finetuning(unfreeze=unfreeze), watch]
    runner = trainer(
        tmp_path, max_epochs=3, callbacks=callbacks, val_check_interval=val_check_interval
    )
    runner.fit(tiny(), loader(), loader())
    assert watch.changed == expected


def test_nothing_is_left_frozen_after_a_run(tmp_path):
    module = tiny()
    for _ in range(2):  # the second run must get every parameter, too
        trainer(tmp_path, max_epochs=1, callbacks=[Finetuning()]).fit(module, loader())
        assert all(p.requires_grad for p in module.parameters())
        assert all(m.training for m in module.modules())


def test_nothing_is_left_frozen_when_a_run_fails(tmp_path):
    module = tiny()
    run = trainer(tmp_path, callbacks=[Finetuning(), Fails()])
    with pytest.raises(RuntimeError, match="on purpose"):
        run.fit(module, loader())
    assert all(p.requires_grad for p in module.parameters())


def test_parts_that_the_user_froze_are_unfrozen_too(tmp_path):
    module, watch = tiny(), Watch()
    module.requires_grad_(False)
    trainer(tmp_path, callbacks=[Finetuning(unfreeze=[1]), watch]).fit(module, loader())
    assert watch.changed == [{"fc"}, {"fc", "stages.2"}]


def test_frozen_stages_are_evaluated_once_and_trained_ones_replayed(tmp_path):
    module = tiny()
    calls = []
    for part in parts(module.model)[:-1]:
        convs = [m for root in part.modules for m in root.modules() if isinstance(m, nn.Conv2d)]

        def count(*_, name=part.name):
            calls.append(name)

        convs[0].register_forward_hook(count)  # a replay may stop before the last one
    callbacks = [Finetuning(unfreeze={0: "stages.2"})]
    trainer(tmp_path, max_epochs=1, callbacks=callbacks).fit(module, loader())
    assert Counter(calls) == {"stem": 4, "stages.0": 4, "stages.1": 4, "stages.2": 8}


def kept(first, *, depth, memory):
    """Bytes that a forward pass keeps for the backward pass."""
    module = tiny(units=[depth, depth, 1], memory=memory)
    runner = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    tuning = Finetuning(unfreeze={0: first, 1: "stem"})
    tuning.setup(runner, module, "fit")
    tuning.on_train_start(runner, module)
    with LiveMemory() as counted:
        loss = module(halves(64).tensors[0]).sum()
        assert loss.requires_grad
        return counted.now


@pytest.mark.parametrize("memory", ["store", "invert"])
def test_frozen_stages_keep_no_activations(memory):
    kept(
        "stages.0", depth=1, memory=memory
    )  # warm-up: the guard keeps its sampled positions for later steps
    shallow, deep = (kept("stages.2", depth=depth, memory=memory) for depth in (1, 4))
    assert shallow == deep
    assert kept("stages.0", depth=4, memory=memory) > deep
    if memory == "store":
        assert kept("stages.0", depth=4, memory=memory) > 5 * deep


def test_the_optimiser_and_its_rates_are_the_same_in_every_epoch(tmp_path):
    seen = []

    class Groups(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            groups = trainer.optimizers[0].param_groups
            seen.append(({g["name"]: len(g["params"]) for g in groups}, [g["lr"] for g in groups]))

    runs = []
    for tuning in ([Finetuning(unfreeze=[1])], []):
        seen = []
        trainer(tmp_path, callbacks=[*tuning, Groups()]).fit(tiny(), loader())
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len({str(groups) for groups, _ in runs[0]}) == 1


@pytest.mark.parametrize("optim", [OPTIM, {**OPTIM, "name": "muon", "sgd_lr": 0.1}])
@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
def test_a_resumed_run_equals_an_unbroken_one(tmp_path, optim):
    def run(module, path=None):
        keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
        callbacks = [Finetuning(unfreeze={1: "stages.2", 3: "stages.1"}), keep]
        runner = trainer(tmp_path, max_epochs=5, enable_checkpointing=True, callbacks=callbacks)
        runner.fit(module, loader(), ckpt_path=path, weights_only=path and True)
        return module

    whole = run(Classifier(TINY, optim=optim)).state_dict()
    for epoch in (0, 2, 3):  # before, between and after
        resumed = run(Classifier(TINY, optim=optim), tmp_path / f"epoch={epoch}.ckpt")
        for name, value in resumed.state_dict().items():
            assert torch.equal(value, whole[name]), (epoch, name)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists:UserWarning")
@pytest.mark.filterwarnings(
    "ignore:You're resuming from a checkpoint that ended before:UserWarning"
)
def test_a_run_resumed_inside_an_epoch_is_frozen_as_before(tmp_path):
    keep = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=6, filename="middle")
    tuning = {"unfreeze": {1: "stages.2"}}
    options = {"max_epochs": 2, "enable_checkpointing": True}
    trainer(tmp_path, callbacks=[Finetuning(**tuning), keep], **options).fit(tiny(), loader())
    watched = tiny()
    before = torch.load(tmp_path / "middle.ckpt", weights_only=True)["state_dict"]
    runner = trainer(tmp_path, callbacks=[Finetuning(**tuning), keep], **options)
    runner.fit(watched, loader(), ckpt_path=tmp_path / "middle.ckpt", weights_only=True)
    changed = {
        part_of(name.removeprefix("model."))
        for name, value in watched.state_dict().items()
        if not torch.equal(value, before[name])
    }
    assert changed == {"fc", "stages.2"}


def test_unfreezing_is_logged(tmp_path, caplog):
    tuning = Finetuning(unfreeze={1: "stages.2", 7: "stem"})
    with caplog.at_level(logging.INFO, logger="revzoo"):
        trainer(tmp_path, callbacks=[tuning]).fit(tiny(), loader())
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("revzoo")]
    assert lines == [
        "from epoch 1/2, trains fc and all later parts",
        "from epoch 2/2, trains stages.2 and all later parts",
    ]


@pytest.mark.parametrize(
    ("unfreeze", "message"),
    [
        (
            {1: "stage.2"},
            "no part 'stage.2'.*expected one of stem, stages.0.*did you mean 'stages",
        ),
        ({1: "fc"}, "no part 'fc' to unfreeze .the classifier always trains"),
        ({1: "stages.1", 2: "stages.2"}, "must name an earlier part; expected.*stages.2 to stem"),
        ({2: "stages.1", 1: "stages.2"}, "rising order"),
        ([[1, "stages.2"], 3], "whole numbers"),
        ([8, 5], "rising order"),
        ([1.5], "whole numbers"),
        (5, "expected epochs, such as"),
        ("stages.2", "expected epochs, such as"),
        ([1, 2, 3, 4, 5], "got 5 epochs, expected at most 4"),
        ({0: "stem"}, "whole network from epoch 0.*remove the callback"),
    ],
)
def test_wrong_epochs_and_parts_are_refused(unfreeze, message):
    with pytest.raises(ValueError, match=message):
        Finetuning(unfreeze=unfreeze).first_trained(create_model("revnet38"), epoch=0)


def test_a_model_without_known_parts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"TinyNet is not an ImageNetwork.*by hand"):
        trainer(tmp_path, callbacks=[Finetuning()]).fit(Classifier(TinyNet()), loader())
