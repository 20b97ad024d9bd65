"""``memory=auto``, ``balanced``, ``budget``: planned for the run's batch, logged and recorded."""

import gc
import logging
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from small_images import image_folder
from small_run import ONE_STEP

from revzoo.cli.run import memory_plan
from revzoo.cli.run.train import train
from revzoo.core.invertible import Step
from revzoo.core.live import LiveMemory
from revzoo.profiling.audit import audit
from revzoo.profiling.plan import PLANNED, Plan, PlannedMode, Planner
from revzoo.profiling.units import bytes_from
from revzoo.training import Classifier
from revzoo.training.callbacks.registry import CALLBACKS

ACCUMULATE = "trainer.accumulate_grad_batches"


@pytest.fixture(autouse=True)
def no_earlier_plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[Classifier]:
    """The trained classifiers."""
    found: list[Classifier] = []
    begin = Classifier.on_train_start

    def noted(self: Classifier) -> None:
        found.append(self)
        begin(self)

    monkeypatch.setattr(Classifier, "on_train_start", noted)
    return found


def modes_of(module: Classifier) -> set[str]:
    return {m.memory for m in module.model.modules() if isinstance(m, Step)}


def balanced(*more: str) -> tuple[str, ...]:
    return (*ONE_STEP, "memory=balanced", *more)


def lines(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [m for r in caplog.records if text in (m := r.getMessage())]


def test_balanced_logs_its_plan_and_records_it(
    compose: Any, tmp_path: Path, trained: list[Classifier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(compose(*balanced()), run_dir=tmp_path / "run")
    (line,) = lines(caplog, "memory=balanced")
    assert "store" in line
    assert "peak" in line
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["memory"]
    assert kept["mode"] == "balanced"
    assert modes_of(trained[0]) == set(kept["plan"].values()) == {"recompute", "exact", "store"}
    caplog.clear()
    config = {**compose(*ONE_STEP), "memory": {"mode": "balanced", "plan": {"stages": "recompute"}}}
    train(config, run_dir=tmp_path / "again")  # a plan in the configuration is used
    assert "memory=balanced" not in caplog.text
    assert modes_of(trained[1]) == {"exact", "recompute"}


def test_auto_stores_if_the_device_has_room(
    compose: Any, tmp_path: Path, trained: list[Classifier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(compose(*ONE_STEP), run_dir=tmp_path)
    (line,) = lines(caplog, "memory=auto")
    assert re.fullmatch(
        r"memory=auto: store, [\d.]+ MiB of [\d.]+ [GM]iB free "
        r"\(exact: [\d.]+ MiB in 1\.\d times the time\); planned in 0:\d\d",
        line,
    )
    assert modes_of(trained[0]) == {"store"}


def test_a_plan_counts_the_largest_training_images(compose: Any, tmp_path: Path) -> None:
    """It counted images of the evaluation's size."""
    root = image_folder(tmp_path / "images")
    growing = ("data.image_size=48", "data.progressive=[[1,32],[3,96]]", "data.batch_size=2")
    folder = ("data=imagefolder", f"data.root={root}", "data.num_workers=0", *growing)
    train(compose(*ONE_STEP, *folder, "+model.units=[1,1,1]"), run_dir=tmp_path / "run")
    memory = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["memory"]
    assert memory["planned_for"]["input"] == [2, 3, 96, 96]


def returns_blocks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Calls that would slow down this process from here on."""
    calls: list[bool] = []
    monkeypatch.setattr(memory_plan, "return_freed_blocks", lambda: calls.append(True))
    return calls


@pytest.mark.parametrize(
    ("free", "fits", "modes"),
    [(12, True, {"store", "recompute"}), (4, False, {"recompute", "exact"})],
)
def test_auto_fits_what_is_free(
    free: int,
    fits: bool,
    modes: set[str],
    compose: Any,
    tmp_path: Path,
    trained: list[Classifier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fastest plan within its part of the free bytes; if none fits, the leanest one."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: free * 2**20)
    returned = returns_blocks(monkeypatch)
    train(compose(*ONE_STEP), run_dir=tmp_path)
    assert modes_of(trained[0]) == modes
    # glibc kept more than the fifth that is left free, and the system ended the process
    assert returned == [True]
    (line,) = lines(caplog, "MiB free")
    peak = float(re.findall(r", ([\d.]+) MiB of", line)[0])
    warnings = lines(caplog, "uses the leanest plan")
    if fits:
        assert 0.5 * 0.8 * free < peak <= 0.8 * free
        assert not warnings
    else:
        assert peak > 0.8 * free
        assert "at least 8.04 MiB" in warnings[0]


def test_auto_with_bytes_names_them(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(compose(*ONE_STEP, "memory.bytes=9MiB"), run_dir=tmp_path)
    (line,) = lines(caplog, "memory=auto")
    assert re.search(r"8\.\d+ MiB of memory\.bytes=9MiB \(exact", line)


def test_bytes_that_no_plan_can_keep_warn(
    compose: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network without steps stores, whatever ``memory.bytes`` says."""
    monkeypatch.setattr(PLANNED["auto"], "plans", lambda model: False)
    train(compose(*ONE_STEP, "memory.bytes=9MiB"), run_dir=tmp_path)
    assert lines(caplog, "memory.bytes=9MiB has no effect: revnet38 has no step")


def test_a_resumed_auto_plans_again_if_its_plan_no_longer_fits(
    compose: Any,
    tmp_path: Path,
    trained: list[Classifier],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    train(compose(*ONE_STEP), run_dir=tmp_path / "first")
    config = compose(*ONE_STEP)
    config["memory"] = yaml.safe_load((tmp_path / "first" / "config.yaml").read_text())["memory"]
    caplog.clear()
    train(config, run_dir=tmp_path / "same")
    assert not lines(caplog, "memory=auto")
    monkeypatch.setattr(memory_plan, "free_bytes", lambda device: 20 * 2**20)
    returns_blocks(monkeypatch)
    train(config, run_dir=tmp_path / "less")
    assert lines(caplog, "plans again, since the run has a different free memory")
    assert modes_of(trained[1]) == {"store"}
    assert modes_of(trained[2]) == {"store", "recompute"}


@pytest.fixture
def runs_out(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the optimiser steps ``at`` run out of memory, once each, in a part of the step."""

    def fail(where: str, at: list[int]) -> list[int]:
        step, failed, inputs = Classifier.loss_and_logits, [], []

        def raises(*args: Any) -> None:
            failed.append(at.pop(0))
            raise torch.OutOfMemoryError("CUDA out of memory")

        def fails(self: Classifier, images: Any, labels: Any) -> Any:
            # the repeated step has the memory of the failed one
            assert all(earlier() is None for earlier in inputs)
            begins = not at or self.trainer.global_step != at[0]
            head = self.model.get_submodule("fc")
            hook = head.register_forward_pre_hook(
                lambda _, args: inputs.append(weakref.ref(args[0]))
            )
            loss, logits = step(self, images, labels)
            hook.remove()
            if begins:
                inputs.clear()
            elif where == "forward":
                raises()
            else:  # the stem's gradient is the last one
                tensor = logits if where == "loss" else next(self.model.parameters())
                handle = tensor.register_hook(lambda _: (handle.remove(), raises()))
            return loss, logits

        monkeypatch.setattr(Classifier, "loss_and_logits", fails)
        return failed

    return fail


@pytest.mark.parametrize("where", ["forward", "loss", "stem"])
def test_out_of_memory_lowers_the_plan_once(
    where: str,
    compose: Any,
    tmp_path: Path,
    trained: list[Classifier],
    caplog: pytest.LogCaptureFixture,
    runs_out: Any,
) -> None:
    """The run ended. It now equals one with the lower plan from the start, bit for bit."""
    few = (*ONE_STEP, "+model.dropout=0.1", "trainer.limit_train_batches=4", f"{ACCUMULATE}=2")
    failed = runs_out(where, [1])
    found = train(compose(*few), run_dir=tmp_path / "lowered")
    assert failed == [1]
    (line,) = lines(caplog, "computing step 1 again, with a leaner plan (")
    assert re.search(r"; [\d.]+ MiB instead of [\d.]+ MiB\): the device is out of memory", line)
    assert "a leaner plan" in (tmp_path / "lowered" / "summary.json").read_text()
    memory = yaml.safe_load((tmp_path / "lowered" / "config.yaml").read_text())["memory"]
    assert modes_of(trained[0]) == {*memory["plan"].values()} == {"store", "recompute"}
    caplog.clear()
    # as a resumed run reads it: the plan stays
    expected = train({**compose(*few), "memory": memory}, run_dir=tmp_path / "expected")
    assert not lines(caplog, "plans again")
    assert found == expected
    for name, value in trained[1].state_dict().items():
        assert torch.equal(trained[0].state_dict()[name], value), name


def test_a_second_time_out_of_memory_ends_the_run(
    compose: Any, tmp_path: Path, runs_out: Any
) -> None:
    runs_out("forward", [0, 1])
    with pytest.raises(SystemExit, match=r"step 1: out of memory .* lower data\.batch_size"):
        train(compose(*ONE_STEP, "trainer.limit_train_batches=4"), run_dir=tmp_path)


def test_the_inverting_mode_of_a_plan_can_be_chosen(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*balanced("memory.inverting=invert")), run_dir=tmp_path)
    assert "invert" in modes_of(trained[0])
    assert "exact" not in modes_of(trained[0])
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["memory"]
    assert kept["planned_for"]["inverting"] == "invert"


def test_balanced_plans_of_narrow_types_are_exact(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*balanced("precision=bf16")), run_dir=tmp_path)
    assert "exact" in modes_of(trained[0])
    assert "invert" not in modes_of(trained[0])


def test_a_resnet_stores(compose: Any, tmp_path: Path, trained: list[Classifier]) -> None:
    for mode in ("auto", "balanced"):
        train(compose(*ONE_STEP, "model=resnet32", f"memory={mode}"), run_dir=tmp_path / mode)
    assert modes_of(trained[0]) == modes_of(trained[1]) == {"store"}


def test_a_planned_mode_is_one_row_of_a_table(
    compose: Any, tmp_path: Path, trained: list[Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leanest(PlannedMode):
        name = "leanest"

        def plan(self, planner: Planner, budget: Any = None) -> Plan:
            return planner.leanest

    monkeypatch.setitem(PLANNED, "leanest", Leanest())  # type: ignore[misc]
    train({**compose(*ONE_STEP), "memory": {"mode": "leanest"}}, run_dir=tmp_path)
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["memory"]
    assert kept["mode"] == "leanest"
    assert "exact" in modes_of(trained[0]) == set(kept["plan"].values())


def test_a_budget_includes_the_optimisers_state(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*ONE_STEP, "memory=budget", "memory.bytes=12MiB"), run_dir=tmp_path)
    model, data = trained[0].model, trained[0].trainer.datamodule
    extra = sum(p.nbytes for p in model.parameters())  # the momentum
    shape = (data.batch_size, data.in_chans, *data.sizes)
    peak = audit(model, shape, modes=[], extra=extra).peak_bytes
    assert 0.8 * bytes_from("12MiB") < peak <= bytes_from("12MiB")


class StepPeak(pl.Callback):
    """The most bytes of a run's tensors that are alive in a training step, with the weights."""

    def __init__(self, module: Classifier) -> None:
        self.memory, self.bytes = LiveMemory(), 0
        for t in (*module.parameters(), *module.buffers()):
            self.memory._count(t)

    def on_train_start(self, *args: Any) -> None:
        gc.collect()  # twins on the meta device, which take no memory

    def on_train_batch_start(self, *args: Any) -> None:
        self.memory.peak = self.memory.now  # without the loader and the validation

    def on_train_batch_end(self, *args: Any) -> None:
        self.bytes = max(self.bytes, self.memory.peak)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StepPeak]]:
    """The counted peak of the run."""
    with_plan, peaks = memory_plan.with_plan, []

    def counting(config: Any, module: Classifier, data: Any, trainer: pl.Trainer) -> Any:
        planned = with_plan(config, module, data, trainer)
        peaks.append(StepPeak(module))
        trainer.callbacks.append(peaks[0])  # type: ignore[attr-defined]
        peaks[0].memory.__enter__()  # type: ignore[no-untyped-call]
        return planned

    monkeypatch.setattr(memory_plan, "with_plan", counting)
    yield peaks
    if peaks:
        peaks[0].memory.__exit__(None, None, None)  # type: ignore[no-untyped-call]


def accumulating() -> pl.Callback:
    return GradientAccumulationScheduler({1: 2})


@pytest.mark.parametrize(
    ("budget", "overrides"),
    [
        ("14MiB", ("callbacks.ema={}", "trainer.strategy=ddp", f"{ACCUMULATE}=2")),
        ("9MiB", ("model=resnet32", "+model.reversible_bits=4", "data.batch_size=32")),
        ("13MiB", ("trainer.max_epochs=2", "+callbacks.accumulation={}", "data.batch_size=128")),
    ],
)
def test_a_run_stays_within_its_budget(
    budget: str,
    overrides: tuple[str, ...],
    compose: Any,
    tmp_path: Path,
    counted: list[StepPeak],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the optimiser's state was counted: copies of gradients and weights exceeded it."""
    monkeypatch.setitem(CALLBACKS, "accumulation", accumulating)
    memory = ("memory=budget", f"memory.bytes={budget}", "trainer.limit_train_batches=4")
    config = compose(*ONE_STEP, "data.num_workers=0", *memory, *overrides)
    try:
        train(config, run_dir=tmp_path)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert 0.9 * bytes_from(budget) < counted[0].bytes <= bytes_from(budget)


def test_a_budget_that_private_training_may_exceed(
    compose: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """17.6 MiB of 14 were taken: Poisson batches are larger, and their norms take memory."""
    private = ("model.norm=group", "+callbacks.private={}")
    train(compose(*ONE_STEP, "memory=budget", "memory.bytes=14MiB", *private), run_dir=tmp_path)
    (warning,) = [r for r in caplog.records if "may take more than memory.bytes" in r.getMessage()]
    assert warning.levelno == logging.WARNING


def test_a_budget_that_is_too_small_ends_the_run_before_training(
    compose: Any, tmp_path: Path
) -> None:
    config = compose(*ONE_STEP, "memory=budget", "memory.bytes=1MiB")
    with pytest.raises(SystemExit, match="less than any plan needs: at least"):
        train(config, run_dir=tmp_path)
