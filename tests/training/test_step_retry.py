"""A training step whose activations drifted runs again, with its inputs kept."""

import itertools
import logging
import math
import os

import pytest
import pytorch_lightning as pl
import torch
from several_processes import free_ports
from small_task import TINY, loader, trainer
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, TensorDataset
from two_processes import start

import revzoo
from revzoo.core.guard import DriftError, RangeError
from revzoo.core.invertible import Step
from revzoo.training import Classifier
from revzoo.training.checkpoint.files import PlainCheckpointIO, read_checkpoint
from revzoo.training.fsdp2 import FSDP2
from revzoo.training.lightning_compat import callbacks_of
from revzoo.training.resume import RunState, growth_of, set_growth

NET = {**TINY, "units": [2, 2, 2], "dropout": 0.1, "memory": "invert"}
CONSTANT = {"lr": 0.05, "schedule": {"name": "constant"}}
AT = 5


class Change(pl.Callback):
    """Changes the first inverted step, in one process, at the batch ``at``."""

    def __init__(self, what, at=AT, rank=None):
        self.what, self.at, self.rank = what, at, rank

    def on_train_batch_start(self, trainer, pl_module, *args):
        elsewhere = self.rank not in (None, trainer.global_rank)
        if trainer.fit_loop.total_batch_idx == self.at and not elsewhere:
            change(pl_module, self.what)


def change(module, what):
    """Make one step drift, or recompute it; return its name."""
    inverted = [
        (name, step)
        for name, step in module.named_modules()
        if isinstance(step, Step) and step.invertible and not list(step.children())[1:]
    ]
    name, step = inverted[len(inverted) // 2]
    if what == "drift":
        step.drift_limit = 0.0  # any rounding exceeds it
    else:
        step.memory = what
    return name


def fit(folder, *callbacks, **options):
    torch.manual_seed(0)
    ckpt_path = options.pop("ckpt_path", None)
    module = Classifier({**NET, "memory": options.pop("memory", "invert")}, optim=CONSTANT)
    # FSDP2 brings its own
    plugins = [] if isinstance(options.get("strategy"), FSDP2) else [PlainCheckpointIO()]
    runner = trainer(folder, callbacks=list(callbacks), plugins=plugins, **options)
    runner.fit(module, loader(), ckpt_path=ckpt_path, weights_only=True)
    return module, runner


def assert_same(found, expected):
    for name, value in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


# the batch is the only one of its optimiser step, the last of two, the second of three
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_drift_makes_its_step_recompute(count, tmp_path, caplog):
    """A drift above the limit, in mode `invert` under bf16, ended the run.

    The run now equals one that recomputes the step from that batch on, bit for bit: weights,
    BatchNorm statistics, dropout and metrics.
    """
    options = {"max_epochs": 3, "accumulate_grad_batches": count}
    expected, whole = fit(tmp_path, Change("recompute"), **options)
    with caplog.at_level(logging.WARNING, logger="revzoo"):
        found, runner = fit(tmp_path, Change("drift"), **options)
    assert_same(found, expected)
    assert runner.callback_metrics == whole.callback_metrics
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("revzoo")]
    assert len(messages) == 1
    (state,) = callbacks_of(runner, RunState)
    assert len(state.recomputed) == 1
    assert state.recomputed[0] in messages[0]
    assert "memory=recompute" in state.notes["drift"]


def test_a_resumed_run_recomputes_the_step(tmp_path):
    """`--resume` failed at the same step."""
    _, runner = fit(tmp_path, Change("drift"))
    runner.save_checkpoint(tmp_path / "last.ckpt")
    (name,) = callbacks_of(runner, RunState)[0].recomputed
    module, runner = fit(tmp_path, max_epochs=3, ckpt_path=tmp_path / "last.ckpt")
    assert module.get_submodule(name).memory == "recompute"
    (state,) = callbacks_of(runner, RunState)
    assert state.recomputed == [name]
    assert "drift" in state.notes
    saved = read_checkpoint(tmp_path / "last.ckpt")["callbacks"]["RunState"]
    assert saved["recomputed"] == [name]


class Grow(pl.Callback):
    """Makes a branch's values large at the batch ``AT``, with grids for it if they are given."""

    def __init__(self, factor, growth=None):
        self.factor, self.growth = factor, growth

    def on_train_batch_start(self, trainer, pl_module, *args):
        if trainer.fit_loop.total_batch_idx == AT:
            *_, conv = (m for m in pl_module.model.stages[0].modules() if isinstance(m, nn.Conv2d))
            conv.weight.data.mul_(self.factor)
            if self.growth is not None:
                set_growth(pl_module, self.growth)

    def on_train_batch_end(self, trainer, pl_module, *args):
        if self.growth is None and trainer.fit_loop.total_batch_idx == AT:
            self.growth = growth_of(pl_module)


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 3}])
def test_a_step_whose_stream_left_its_range_is_repeated(options, tmp_path, caplog):
    """The run ended with "training has diverged; lower optim.lr".

    It now equals a run whose grids fit from that batch on, bit for bit, and a resumed run has them.
    """
    options |= {"memory": "exact", "max_epochs": 2}  # the batch is in the last epoch
    grow = Grow(1e4)
    with caplog.at_level(logging.WARNING, logger="revzoo"):
        found, runner = fit(tmp_path, grow, **options)
    (state,) = callbacks_of(runner, RunState)
    messages = [r.getMessage() for r in caplog.records if r.name.startswith("revzoo")]
    assert "computing step" in messages[-1]
    assert "reached" in messages[-1]
    assert "grids adapted" in state.notes["range"]
    assert max(floor for _, floor, _ in grow.growth.values()) > 100
    expected, whole = fit(tmp_path, Grow(1e4, grow.growth), **options)
    assert_same(found, expected)
    assert runner.callback_metrics == whole.callback_metrics
    runner.save_checkpoint(tmp_path / "last.ckpt")
    options["max_epochs"] = 3
    resumed, _ = fit(tmp_path, ckpt_path=tmp_path / "last.ckpt", **options)
    assert growth_of(resumed).keys() == growth_of(found).keys()
    for path, (_, floor, _) in growth_of(found).items():
        assert growth_of(resumed)[path][1] >= floor


def test_validation_beyond_the_range_has_finite_metrics(tmp_path):
    """``val/loss`` was NaN where streams left their range only in validation."""

    class GrowLast(pl.Callback):
        def on_validation_start(self, trainer, pl_module):
            *_, conv = (m for m in pl_module.model.stages[0].modules() if isinstance(m, nn.Conv2d))
            conv.weight.data.mul_(1e4)

    module, runner = fit(tmp_path, memory="exact", max_epochs=1)
    runner.callbacks.append(GrowLast())
    runner.validate(module, loader(), verbose=False)
    assert math.isfinite(runner.callback_metrics["val/loss"])


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_on_any_grid_ends_the_run(factor, tmp_path):
    with pytest.raises((FloatingPointError, RangeError), match=r"is not finite|lower the learning"):
        fit(tmp_path, Grow(factor), memory="exact")


class Unrepeatable(pl.Callback):
    """Changes the input of a branch differently at every call."""

    def on_train_start(self, trainer, pl_module):
        calls = itertools.count(1)  # a replay restores attributes and lists, but not this
        name = change(pl_module, "invert")

        def change_inputs(module, inputs):
            number = next(calls)
            return tuple(t + (number * t).sin() for t in inputs)  # a norm would remove a constant

        pl_module.get_submodule(name).branch.register_forward_pre_hook(change_inputs)


def test_a_step_that_is_never_deterministic_ends_the_run_with_a_command(tmp_path):
    """The message did not name a command to continue with."""
    with pytest.raises(DriftError, match=rf"--resume {tmp_path} memory=store"):
        fit(tmp_path, Unrepeatable())


def worker(rank, ports, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    options = {"devices": 2, "use_distributed_sampler": False}
    runs = [
        ("recompute", Change("recompute")),
        ("drift", Change("drift", rank=1)),
        ("grown", Grow(1e4)),
        ("sharded", Change("drift", rank=1)),
    ]
    for port, (name, callback) in zip(ports, runs, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        memory = "exact" if name == "grown" else "invert"
        strategy = FSDP2() if name == "sharded" else "ddp"
        module, _ = fit(folder, callback, memory=memory, strategy=strategy, **options)
        weights = tree_map_only(DTensor, lambda t: t.full_tensor(), module.state_dict())
        torch.save(weights, folder / f"{name}{rank}.pt")
        grown = max((floor for _, floor, _ in growth_of(module).values()), default=0.0)
        (folder / f"{name}{rank}.txt").write_text(str(grown))
        torch.distributed.destroy_process_group()
    os._exit(0)


def test_processes_repeat_the_step_together(tmp_path):
    start(worker, free_ports(4), tmp_path)
    expected = torch.load(tmp_path / "recompute0.pt")
    grown = torch.load(tmp_path / "grown0.pt")
    assert all(float((tmp_path / f"grown{rank}.txt").read_text()) > 100 for rank in (0, 1))
    same_as = {"drift0": expected, "drift1": expected, "sharded0": expected, "grown1": grown}
    for name, same in same_as.items():
        found = torch.load(tmp_path / f"{name}.pt")
        for key, value in same.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=0)


class Flow(nn.Module):
    """Branches this steep drift in `invert`."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        steps = [revzoo.ActNorm(8)]
        for _ in range(10):
            branch = nn.Linear(4, 8)
            nn.init.normal_(branch.weight, std=8.0)
            steps.append(revzoo.AffineCoupling(branch, clamp=3.0))
        self.flow = revzoo.ReversibleSequence(steps, memory="invert")
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.flow(x).tanh())


def test_a_repeated_first_step_leaves_actnorm_initialised(tmp_path, caplog):
    """The repetition restored the buffer, not a flag in Python: `initialised` stayed false, and the
    first batch after a load replaced the trained scales."""
    torch.manual_seed(0)
    net = Flow()
    batches = DataLoader(
        TensorDataset(3 + 5 * torch.randn(32, 8), torch.arange(32) % 2), batch_size=16
    )
    trainer(tmp_path, max_epochs=1).fit(Classifier(net, optim=CONSTANT), batches)
    assert "computing step 0 again" in caplog.text
    assert net.flow[0].initialised
