"""Two processes on gloo train, stop, resume and fail together; one pair runs all scenes."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest
import pytorch_lightning as pl
import torch
from resumed import resume
from several_processes import COMMON, TIMES, SignalledInStep5, config, figures, free_ports, weights
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from two_processes import WORLD, start

from revzoo.cli.run import train as train_module
from revzoo.cli.run.train import train
from revzoo.training import resume as stop_module
from revzoo.training.checkpoint.files import read_checkpoint
from revzoo.training.resume import GracefulStop
from revzoo.weights.source import LAST

CONFIGS = Path(__file__).parents[2] / "configs"
TOGETHER = (*COMMON, "trainer=ddp", "trainer.accelerator=cpu", f"trainer.devices={WORLD}")
ALONE = (*COMMON, "trainer=cpu", "data.batch_size=64")
pytestmark = pytest.mark.timeout(300)


class InterruptedInStep1(GracefulStop):
    """Sends Ctrl-C to the first process; the second one only agrees."""

    def on_before_backward(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == 0:
            os.kill(os.getpid(), signal.SIGINT)


class SignalledInValidation(GracefulStop):
    """Sends SIGTERM to the first process only, before any save; only that one does not wait."""

    def on_validation_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_rank == 0:
            stop_module.PATIENCE = 0.0
            os.kill(os.getpid(), signal.SIGTERM)


class SpoiledInStep5(GracefulStop):
    """Makes the loss NaN in the second process only."""

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            next(pl_module.model.parameters()).data.fill_(float("nan"))


class SeesReductions(GracefulStop):
    """Notes the batches, two a step, in which gradients are reduced."""

    OPTIONS = ("trainer.accumulate_grad_batches=2",)
    batches: ClassVar[set[int]] = set()
    batch = 0

    def on_fit_start(self, trainer: pl.Trainer, *args: Any) -> None:
        def hook(state: None, bucket: Any) -> Any:
            self.batches.add(self.batch)
            return allreduce_hook(distributed.group.WORLD, bucket)

        hook.__annotations__.clear()  # DistributedDataParallel would compare these strings
        wrapped: Any = trainer.strategy.model
        wrapped.register_comm_hook(None, hook)

    def on_train_batch_start(self, *args: Any) -> None:
        self.batch = args[-1]
        super().on_train_batch_start(*args)


class LostInStep5(GracefulStop):
    """Ends the second process as a kill does."""

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == 5 and trainer.global_rank == 1:
            os._exit(0)


def outcome(kind: type[GracefulStop], folder: Path, *, again: bool = False) -> Any:
    """The figures of a run, or the exception that ended it."""
    train_module.GracefulStop = kind  # type: ignore[misc, attr-defined]
    try:
        if again:
            return resume(folder)
        options = getattr(kind, "OPTIONS", ())
        return train(config(*TOGETHER, "data.batch_size=32", *options), run_dir=folder)
    except SystemExit as end:
        return end.code


def worker(rank: int, ports: list[int], folder: Path) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    scenes = [
        ("whole", GracefulStop, False),
        ("stopped", SignalledInStep5, False),
        ("stopped", GracefulStop, True),
        ("early", SignalledInValidation, False),
        ("early", GracefulStop, True),
        ("spoiled", SpoiledInStep5, False),
        ("interrupted", InterruptedInStep1, False),
        ("accumulated", SeesReductions, False),
        ("lost", LostInStep5, False),  # last: one process is left
    ]
    outcomes = []
    for port, (name, kind, again) in zip(ports, scenes, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        outcomes.append(outcome(kind, folder / name, again=again))
        if name == "stopped" and not again and rank == 0:
            state = read_checkpoint(folder / name / "checkpoints" / LAST)
            outcomes[-1] = [outcomes[-1], state["global_step"]]
        if name == "accumulated":
            outcomes[-1] = sorted(SeesReductions.batches)
        (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    start(worker, free_ports(9), folder)
    return folder


def results(runs: Path) -> list[list[Any]]:
    """The outcomes by scene and process, from one pair of processes."""
    ranks = [json.loads((runs / f"{rank}.json").read_text()) for rank in range(WORLD)]
    return [list(scene) for scene in zip(*ranks, strict=False)]  # of the last scene only one


def test_two_processes_train_as_one_with_the_double_batch(runs: Path, tmp_path: Path) -> None:
    """Each image of an epoch is used once: the steps equal those of one process."""
    train(config(*ALONE), run_dir=tmp_path)
    alone, together = weights(tmp_path), weights(runs / "whole")
    for name, value in alone.items():
        torch.testing.assert_close(together[name], value, rtol=1e-7, atol=1e-10, msg=name)
    expected, found = figures(tmp_path), figures(runs / "whole")
    for name in ("train/loss", "train/acc", "val/loss", "val/acc", "test/loss", "test/acc"):
        assert found[name] == pytest.approx(expected[name], rel=1e-6), name


def test_one_folder_is_written_once(runs: Path) -> None:
    first, second = results(runs)[0]
    assert {k: v for k, v in first.items() if k not in TIMES} == figures(runs / "whole")
    assert second["test/acc"] == first["test/acc"]
    assert len((runs / "whole" / "sessions.jsonl").read_text().splitlines()) == 1
    assert json.loads((runs / "whole" / "summary.json").read_text())["steps"] == 8
    assert {path.name for path in runs.iterdir() if path.is_dir()} == {
        "whole",
        "stopped",
        "early",
        "spoiled",
        "interrupted",
        "accumulated",
        "lost",
    }


def test_a_signal_to_one_stops_all_with_the_state_saved(runs: Path) -> None:
    assert results(runs)[1] == [[143, 6], 143]


def test_ctrl_c_ends_all_with_its_status(runs: Path) -> None:
    """Ctrl-C under DDP exited with 143."""
    assert results(runs)[6] == [130, 130]


def test_a_stop_in_a_validation_ends_all(runs: Path) -> None:
    assert results(runs)[3] == [143, 143]
    _, again = (runs / "early" / "sessions.jsonl").read_text().splitlines()
    assert json.loads(again)["from_step"] == 0  # the validation was interrupted


@pytest.mark.parametrize("name", ["stopped", "early"])
def test_a_resumed_run_is_bit_equal(name: str, runs: Path) -> None:
    whole, resumed = weights(runs / "whole"), weights(runs / name)
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    # figures are sums in float32
    assert figures(runs / name) == pytest.approx(figures(runs / "whole"), rel=3e-7)


def test_nan_in_one_process_ends_all_with_its_step(runs: Path) -> None:
    for message in results(runs)[5]:
        assert "the training loss is not finite at step 5, in epoch 2" in message
    assert read_checkpoint(runs / "spoiled" / "checkpoints" / LAST)["global_step"] == 4


def test_accumulated_gradients_are_reduced_once_a_step(runs: Path) -> None:
    assert results(runs)[7] == [[1, 3], [1, 3]]


def test_a_lost_process_ends_the_others_with_the_command_that_resumes(runs: Path) -> None:
    """A traceback of 90 lines ended in gloo's error."""
    message = json.loads((runs / "0.json").read_text())[-1]
    assert message.startswith("revzoo: lost the connection to another process of this run")
    assert f"--resume {runs / 'lost'}" in " ".join(message.split())  # lines are folded
    assert read_checkpoint(runs / "lost" / "checkpoints" / LAST)["global_step"] == 4
