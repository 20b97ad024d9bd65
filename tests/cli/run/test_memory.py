"""``memory=auto`` and ``memory=budget``: planned for the run's batch, logged and recorded."""

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from revzoo.cli.run.train import train
from revzoo.core.invertible import Step
from revzoo.profiling.audit import audit
from revzoo.profiling.plan import PLANNED, Plan, PlannedMode, Planner
from revzoo.profiling.units import bytes_from
from revzoo.training import Classifier

FEW = ("debug=smoke", "trainer=cpu", "test=false", "logger=csv", "data.batch_size=64")


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


def test_auto_logs_its_plan_and_records_it(
    compose: Any, tmp_path: Path, trained: list[Classifier], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    train(compose(*FEW), run_dir=tmp_path / "run")
    (line,) = [r.getMessage() for r in caplog.records if "memory=auto" in r.getMessage()]
    assert "store" in line
    assert "peak" in line
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["memory"]
    assert kept["mode"] == "auto"
    assert modes_of(trained[0]) == set(kept["plan"].values()) == {"recompute", "exact", "store"}
    caplog.clear()
    config = {**compose(*FEW), "memory": {"mode": "auto", "plan": {"stages": "recompute"}}}
    train(config, run_dir=tmp_path / "again")  # a plan in the configuration is used
    assert "memory=auto" not in caplog.text
    assert modes_of(trained[1]) == {"exact", "recompute"}


def test_auto_of_narrow_types_is_exact(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*FEW, "precision=bf16"), run_dir=tmp_path)
    assert "exact" in modes_of(trained[0])
    assert "invert" not in modes_of(trained[0])


def test_auto_does_not_change_a_resnet(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*FEW, "model=resnet32"), run_dir=tmp_path)
    assert modes_of(trained[0]) == {"store"}


def test_a_planned_mode_is_one_row_of_a_table(
    compose: Any, tmp_path: Path, trained: list[Classifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leanest(PlannedMode):
        name = "leanest"

        def plan(self, planner: Planner, budget: Any = None) -> Plan:
            return planner.leanest

    monkeypatch.setitem(PLANNED, "leanest", Leanest())  # type: ignore[misc]
    train({**compose(*FEW), "memory": {"mode": "leanest"}}, run_dir=tmp_path)
    kept = yaml.safe_load((tmp_path / "config.yaml").read_text())["memory"]
    assert kept["mode"] == "leanest"
    assert "exact" in modes_of(trained[0]) == set(kept["plan"].values())


def test_a_budget_includes_the_optimisers_state(
    compose: Any, tmp_path: Path, trained: list[Classifier]
) -> None:
    train(compose(*FEW, "memory=budget", "memory.bytes=12MiB"), run_dir=tmp_path)
    model, data = trained[0].model, trained[0].trainer.datamodule
    extra = sum(p.nbytes for p in model.parameters())  # the momentum
    shape = (data.batch_size, data.in_chans, data.image_size, data.image_size)
    peak = audit(model, shape, modes=[], extra=extra).peak_bytes
    assert 0.8 * bytes_from("12MiB") < peak <= bytes_from("12MiB")


def test_a_budget_that_is_too_small_ends_the_run_before_training(
    compose: Any, tmp_path: Path
) -> None:
    config = compose(*FEW, "memory=budget", "memory.bytes=1MiB")
    with pytest.raises(SystemExit, match="less than any plan needs: at least"):
        train(config, run_dir=tmp_path)
