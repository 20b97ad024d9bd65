import math

import pytest
import torch
from torch.optim import SGD

from revzoo.training.optim.optimizers import make_schedule


def rates(spec: dict[str, object], steps: int, lr: float = 1.0) -> list[float]:
    """The rate of each of ``steps`` optimiser steps."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = make_schedule(spec).build(optimizer, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_step_divides_where_the_paper_does() -> None:
    seen = rates({"name": "step"}, 80, lr=0.1)  # the paper's 80k steps in thousands
    assert seen[:40] == pytest.approx([0.1] * 40)
    assert seen[40:60] == pytest.approx([0.01] * 20)
    assert seen[60:] == pytest.approx([0.001] * 20)


def test_onecycle_rises_to_the_rate_and_ends_at_its_end() -> None:
    spec = {"name": "onecycle", "warmup": 0.25, "start": 0.1, "end": 0.001}
    seen = rates(spec, 100, lr=2.0)
    assert seen[0] == pytest.approx(0.2)
    assert max(seen) == pytest.approx(2.0)
    assert seen.index(max(seen)) == 24
    assert seen[-1] == pytest.approx(0.002)
    assert seen[:25] == sorted(seen[:25])
    assert seen[24:] == sorted(seen[24:], reverse=True)


def test_onecycle_keeps_the_momentum() -> None:
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.7)
    schedule = make_schedule({"name": "onecycle"}).build(optimizer, 10)
    for _ in range(10):
        assert optimizer.param_groups[0]["momentum"] == 0.7
        optimizer.step()
        schedule.step()


def test_cosine_warms_up_and_follows_the_cosine() -> None:
    seen = rates({"name": "cosine", "warmup": 0.1, "end": 0.0}, 100)
    assert seen[:10] == pytest.approx([(i + 1) / 11 for i in range(10)])
    expected = [0.5 * (1 + math.cos(math.pi * i / 90)) for i in range(90)]
    assert seen[10:] == pytest.approx(expected, abs=1e-6)


def test_cosine_without_warmup_starts_at_the_rate() -> None:
    seen = rates({"name": "cosine", "warmup": 0.0, "end": 0.5}, 10)
    assert seen[0] == 1.0
    assert min(seen) > 0.5


def test_constant_is_constant() -> None:
    assert rates({"name": "constant"}, 5, lr=0.3) == [0.3] * 5


@pytest.mark.parametrize("name", ["step", "onecycle", "cosine", "constant"])
@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_run_of_a_few_steps_has_usable_rates(name: str, steps: int) -> None:
    seen = rates({"name": name}, steps)
    assert all(0 < rate <= 1 for rate in seen)
    assert name != "step" or seen[0] == 1  # no milestone before the first step


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({}, "schedule.name=None"),
        ({"name": "onecylce"}, "did you mean 'onecycle'"),
        ({"name": "step", "gama": 0.1}, "did you mean 'gamma'"),
        ({"name": "step", "milestones": [0.75, 0.5]}, "rising order"),
        ({"name": "step", "milestones": [40000]}, r"in \(0, 1\]"),
        ({"name": "step", "gamma": 0}, "schedule.gamma=0"),
        ({"name": "onecycle", "warmup": 1}, "schedule.warmup=1"),
        ({"name": "onecycle", "anneal": "cosine"}, "expected one of cos, linear"),
        ({"name": "cosine", "end": -1}, "schedule.end=-1"),
        ({"name": "constant", "end": 1}, "there is none"),
    ],
)
def test_wrong_options_are_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_schedule(spec)
