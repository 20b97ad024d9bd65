"""trainer=fsdp2 trains as ddp; any number of processes can read its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from resumed import resume
from several_processes import COMMON, SignalledInStep5, config, figures, free_ports, weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from two_processes import run, start

import revzoo
from revzoo.cli.config import ConfigError
from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.training.callbacks.finetuning import Finetuning
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.training.checkpoint.restore import restore
from revzoo.training.fsdp2 import shard
from revzoo.training.resume import GracefulStop
from revzoo.weights.source import LAST


class EvaluatesTwice(GracefulStop):
    """Repeats each evaluation in one process, as mode exact does if a grid adapts to its images."""

    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: Any, batch: Any, *args: Any
    ) -> None:
        if trainer.global_rank == 1:
            pl_module(batch[0])


Scene = tuple[str, Sequence[str], type[GracefulStop]]
BATCH_NORM = (*COMMON, "model.norm=batch", "trainer.max_epochs=1")
EMA = "callbacks.ema.decay=0.8"
# as precision=bf16 has it; torch refused to divide such weights
CHANNELS_LAST = "precision.channels_last=true"
# compiled branches have no warm-up
EXACT = (*BATCH_NORM, "memory=exact", "callbacks.batch_norm.warmup=false")
COMPILED = "callbacks.compiled_branches.backend=eager"
SCENES: dict[int, list[Scene]] = {
    2: [
        ("ddp", ("trainer=ddp", *BATCH_NORM, "memory=store", EMA), GracefulStop),
        ("fsdp2", ("trainer=fsdp2", *BATCH_NORM, "memory=store", EMA, CHANNELS_LAST), GracefulStop),
        ("stopped", ("trainer=fsdp2", *COMMON, "memory=exact", EMA), SignalledInStep5),
    ],
    3: [
        ("ddp3", ("trainer=ddp", *EXACT), GracefulStop),
        ("fsdp23", ("trainer=fsdp2", *EXACT, COMPILED), EvaluatesTwice),
    ],
}
pytestmark = pytest.mark.timeout(300)


def worker(rank: int, world: int, ports: list[int], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    for port, (name, overrides, stop) in zip(ports, SCENES[world], strict=True):
        os.environ["MASTER_PORT"] = str(port)
        train_module.GracefulStop = stop  # type: ignore[misc, attr-defined]
        here = ("trainer.accelerator=cpu", f"trainer.devices={world}", "data.batch_size=32")
        try:
            train(config(*overrides, *here), run_dir=folder / name)
        except SystemExit as end:
            assert (name, end.code) == ("stopped", 143), end  # noqa: PT017
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


@pytest.fixture(scope="module", params=[2, 3])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folders of the same run in ddp and fsdp2."""
    world, folder = request.param, tmp_path_factory.mktemp("runs")
    scenes = SCENES[world]
    start(worker, world, free_ports(len(scenes)), folder, count=world)
    return folder / scenes[0][0], folder / scenes[1][0]


def test_equals_ddp(pair: tuple[Path, Path]) -> None:
    """With the statistics of BatchNorm, and on two processes through the mode store."""
    ddp, fsdp2 = pair
    expected, found = (read_checkpoint(run / "checkpoints" / LAST) for run in pair)
    for key in [key for key in ("state_dict", "current_model_state") if key in expected]:
        assert list(found[key]) == list(expected[key])
        for name, value in expected[key].items():
            torch.testing.assert_close(found[key][name], value, rtol=1e-6, atol=1e-9, msg=name)
    alike = figures(ddp)
    del alike["footprint/activation_bytes"]  # torch cannot copy a network with divided weights
    assert figures(fsdp2) == pytest.approx(alike, rel=1e-6)


def test_checkpoints_are_those_of_one_process(pair: tuple[Path, Path]) -> None:
    assert not restore(pair[1]).module.training
    expected, found = (read_checkpoint(run / "checkpoints" / LAST) for run in pair)
    assert found.keys() == expected.keys()
    (one,), (other,) = expected["optimizer_states"], found["optimizer_states"]
    assert other["param_groups"] == one["param_groups"]
    for i, values in one["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(other["state"][i][key], value, rtol=1e-6, atol=1e-9)


def resuming(rank: int, port: int, run_dir: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    train_module.GracefulStop = GracefulStop  # type: ignore[misc, attr-defined]
    resume(run_dir)
    os._exit(0)


@pytest.mark.parametrize("pair", [2], indirect=True)
def test_another_number_of_processes_resumes(pair: tuple[Path, Path], tmp_path: Path) -> None:
    whole = (*COMMON, EMA, "memory=exact", "trainer=cpu", "data.batch_size=64")
    train(config(*whole), run_dir=tmp_path)
    stopped = pair[0].parent / "stopped"
    assert read_checkpoint(stopped / "checkpoints" / LAST)["global_step"] == 6
    refused = stopped.with_name("refused")
    shutil.copytree(stopped, refused)
    with pytest.raises(SystemExit, match="64 images per step of all processes, this run has 32"):
        resume(refused, ["trainer.devices=1"])
    shutil.copytree(stopped, again := stopped.with_name("again"))
    start(resuming, *free_ports(1), again)
    resume(stopped, ["trainer.strategy=auto", "trainer.devices=1", "data.batch_size=64"])
    for run_dir in (stopped, again):
        found = weights(run_dir)
        for name, value in weights(tmp_path).items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-7, msg=name)
        losses = (figures(folder)["val/loss"] for folder in (run_dir, tmp_path))
        assert next(losses) == pytest.approx(next(losses), rel=1e-5)


def test_shared_weights_are_refused() -> None:
    """Training failed in the first replay, or when the test loaded the weights."""
    branch = nn.Linear(2, 2)
    net = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(branch) for _ in range(2)])
    mesh: Any = None
    with pytest.raises(ValueError, match=r"modules share steps\.1\.branch\.weight.*trainer=ddp"):
        shard(net, mesh, half=False)


def contractive(rank: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), revzoo.ContractiveBlock(revzoo.ContractiveLinear(4, 4)))
    if rank >= 0:
        shard(net, init_device_mesh("cpu", (2,)), half=False)
    net(torch.ones(2, 4)).square().mean().backward()
    grads: list[Any] = [p.grad for p in net.parameters()]
    return [g.full_tensor() if rank >= 0 else g for g in grads]


def test_a_contractive_block_reads_its_weights() -> None:
    """Its power iteration runs before its branch, whose weights were still divided."""
    expected = contractive(-1)
    for found in run(contractive):
        torch.testing.assert_close(found, expected)


def finetuned(rank: int) -> list[list[torch.Tensor | None]]:
    """The gradients of each epoch, while more and more of a network is trained."""
    torch.manual_seed(0)
    model = {"units": (1, 1, 1), "norm": "group", "memory": "exact"}
    net = revzoo.create_model("revnet38", **model)
    if rank >= 0:
        shard(net, init_device_mesh("cpu", (2,)), half=False)
    schedule, epochs = Finetuning(unfreeze=[1, 2]), []
    for epoch in range(3):
        schedule.freeze(net, epoch=epoch)
        net.zero_grad()
        net(torch.ones(2, 3, 8, 8)).square().mean().backward()
        grads: list[Any] = [p.grad for p in net.parameters()]
        epochs.append([g.full_tensor() if isinstance(g, DTensor) else g for g in grads])
    return epochs


def test_parts_are_frozen_and_unfrozen() -> None:
    expected = finetuned(-1)
    trained = [sum(g is not None for g in grads) for grads in expected]
    assert 0 < trained[0] < trained[1] < trained[2] < len(expected[0])
    for found in run(finetuned):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("memory=offload", "memory=offload with trainer=fsdp2 would copy"),
        ("precision=fp16", "precision=fp16 with trainer=fsdp2: use precision=bf16"),
        ("callbacks.hard_samples={}", "callbacks.hard_samples needs whole weights.*leave it out"),
        ("optim=muon", "optim.name=muon needs whole weights"),
        ("trainer.sync_batchnorm=true", "trainer.sync_batchnorm needs whole weights"),
    ],
)
def test_refuses_what_needs_whole_weights(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config("trainer=fsdp2", override)
