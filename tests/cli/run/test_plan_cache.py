"""A run takes the plan of an earlier run under the same conditions."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_run import ONE_STEP
from torch import nn

from revzoo.cli.run import memory_plan, plan_cache
from revzoo.cli.run.plan_cache import Planned, find, keep, key_of
from revzoo.cli.run.train import train
from revzoo.profiling.plan import PLANNED, Planner

STORE = Planned({"steps": "store"}, 1000, 600, 500, 1.0, 0, "exact", {"store": [500, 1.0]})


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of plans, which does not exist yet."""
    monkeypatch.setenv("REVZOO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "plans.json"


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[Planner]:
    """The planners that runs have made."""
    made: list[Planner] = []
    make = memory_plan._planner

    def noted(*args: Any) -> Planner:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(memory_plan, "_planner", noted)
    return made


def memory_of(run: Path) -> Any:
    return yaml.safe_load((run / "config.yaml").read_text())["memory"]


@pytest.mark.parametrize("mode", ["auto", "balanced"])
def test_a_run_like_an_earlier_one_plans_nothing(
    mode: str,
    compose: Any,
    tmp_path: Path,
    planners: list[Planner],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    few = (*ONE_STEP, f"memory={mode}")
    for name in ("first", "second"):
        train(compose(*few, f"seed={len(name)}"), run_dir=tmp_path / name)
    assert len(planners) == 1
    assert memory_of(tmp_path / "first") == memory_of(tmp_path / "second")
    lines = [m for r in caplog.records if (m := r.getMessage()).startswith(f"memory={mode}: ")]
    assert "; planned in 0:0" in lines[0]
    assert lines[1].endswith("; planned by an earlier run")
    assert lines[0].partition(" MiB of")[0] == lines[1].partition(" MiB of")[0]


CONDITIONS = (
    *("data.batch_size=32", "precision=bf16", "memory.inverting=invert", "+model.dropout=0.1"),
    "optim=adamw",
)


def test_another_condition_plans_anew(
    compose: Any, tmp_path: Path, planners: list[Planner]
) -> None:
    for count, changed in enumerate(("seed=1", *CONDITIONS), start=1):
        train(compose(*ONE_STEP, "memory=balanced", changed), run_dir=tmp_path / str(count))
        assert len(planners) == count, changed


def test_another_limit_plans_anew(compose: Any, tmp_path: Path, planners: list[Planner]) -> None:
    for i, limit in enumerate(("12MiB", "10MiB", "12MiB", "10MiB")):
        few = (*ONE_STEP, "memory=budget", f"memory.bytes={limit}")
        train(compose(*few), run_dir=tmp_path / str(i))
    assert len(planners) == 2
    plans = [memory_of(tmp_path / str(i))["plan"] for i in range(4)]
    assert plans[0] == plans[2] != plans[1] == plans[3]


@pytest.mark.parametrize(
    ("free", "plans"),
    [((400, 200), 1), ((400, 20), 2), ((20, 21), 1), ((20, 12), 2), ((12, 20), 2)],
)
def test_what_is_free_may_vary_a_little(
    free: tuple[int, int],
    plans: int,
    compose: Any,
    tmp_path: Path,
    planners: list[Planner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mode ``auto`` takes a plan that fits, if hardly more is free now."""
    for mib in free:
        monkeypatch.setattr(memory_plan, "free_bytes", lambda device, mib=mib: mib * 2**20)
        train(compose(*ONE_STEP), run_dir=tmp_path / str(mib))
    assert len(planners) == plans


@pytest.mark.parametrize(
    "content", [b"", b"[1]", b"\xff", b'{"key": 1}', b'{"key": {"modes": {}}}']
)
def test_a_damaged_file_holds_no_plans(content: bytes, cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_bytes(content)
    assert find("key", 0) is None
    keep("key", STORE)
    assert find("key", 0) == STORE


def test_a_folder_that_cannot_be_written_keeps_nothing(cache: Path) -> None:
    cache.parent.write_text("a file, not a folder")
    keep("key", STORE)
    assert find("key", 0) is None


def test_the_file_keeps_the_latest_plans(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cache, "MOST", 3)
    for key in "abcad":
        keep(key, STORE)
    assert [*json.loads(cache.read_text())] == ["c", "a", "d"]


@pytest.mark.parametrize(
    ("modes", "limit", "found"),
    [
        ("store", 600, True),
        ("store", 599, False),
        ("store", 5000, True),  # nothing is faster
        ("exact", 0, True),
        ("exact", 599, False),
        ("exact", 1100, True),
        ("exact", 1200, False),  # a faster plan may fit
    ],
)
def test_a_plan_must_fit_the_limit(modes: str, limit: int, found: bool) -> None:
    keep("key", replace(STORE, modes={"steps": modes}))
    assert (find("key", limit) is not None) == found


def test_the_key_depends_on_the_network() -> None:
    auto, balanced = PLANNED["auto"], PLANNED["balanced"]
    key = key_of(nn.Sequential(nn.Linear(4, 4)), auto, {"input": [8, 4]})
    assert key == key_of(nn.Sequential(nn.Linear(4, 4)), auto, {"input": [8, 4]})
    others = [
        key_of(nn.Sequential(nn.Linear(4, 5)), auto, {"input": [8, 4]}),
        key_of(nn.Sequential(nn.Linear(4, 4)).half(), auto, {"input": [8, 4]}),
        key_of(nn.Sequential(nn.Linear(4, 4)).requires_grad_(False), auto, {"input": [8, 4]}),
        key_of(nn.Sequential(nn.Dropout(0.1)), auto, {"input": [8, 4]}),
        key_of(nn.Sequential(nn.Dropout(0.2)), auto, {"input": [8, 4]}),
        key_of(nn.Sequential(nn.Linear(4, 4)), auto, {"input": [9, 4]}),
        key_of(nn.Sequential(nn.Linear(4, 4)), balanced, {"input": [8, 4]}),
    ]
    assert len({key, *others}) == 8
