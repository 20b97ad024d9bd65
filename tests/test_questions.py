"""Answers of docs/questions.md; most are tested where the feature is, by tests that cite them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import revzoo

PAGE = Path(__file__).parents[1] / "docs" / "questions.md"


def blocks(depth: int, make: Any = lambda: nn.Conv2d(4, 4, 3, padding=1)) -> list[nn.Module]:
    return [revzoo.ReversibleBlock(nn.Sequential(make(), nn.ReLU())) for _ in range(depth)]


def kept(net: nn.Module, *shape: int) -> int:
    return revzoo.audit(net, shape, modes=[]).kept_bytes


def test_a_monitor_shows_more_than_activations() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/37 and
    https://github.com/lucidrains/reformer-pytorch/issues/142: nvidia-smi shows no saving."""
    model = revzoo.create_model("revnet38")
    audits = revzoo.audit(model, (4, 3, 32, 32), modes=["store", "exact"]).audits
    kept = {mode: audits[mode].kept_bytes for mode in audits}
    peak = {mode: audits[mode].peak_bytes for mode in audits}
    assert peak["exact"] > kept["exact"] + 2 * sum(4 * p.numel() for p in model.parameters())
    assert kept["store"] / kept["exact"] > 2 * peak["store"] / peak["exact"]


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_memory_is_constant_in_depth_for_volumes_and_plain_containers(mode: str) -> None:
    """https://github.com/silvandeleemput/memcnn/issues/41 (a chain of 3D couplings) and
    https://github.com/silvandeleemput/memcnn/issues/6 (blocks in ``nn.Sequential``)."""
    found = {}
    for depth in (2, 6):
        chain = blocks(depth, lambda: nn.Conv3d(4, 4, 3, padding=1))
        nets = {"sequence": revzoo.ReversibleSequence(chain), "plain": nn.Sequential(*chain)}
        for name, net in nets.items():
            revzoo.set_memory(net, mode)
            found[name, depth] = kept(net, 2, 8, 6, 6, 6)
        revzoo.set_memory(net, "store")
        found["store", depth] = kept(net, 2, 8, 6, 6, 6)
    for name in ("sequence", "plain"):  # the guard's figures: less than 64 bytes a coupling
        assert found[name, 6] - found[name, 2] < 4 * 64
    assert found["store", 6] > 2.5 * found["store", 2]


class Counted(revzoo.Invertible):
    streams = 1

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append("forward")
        return x.exp()

    def inverse(self, y: Tensor) -> Tensor:
        self.calls.append("inverse")
        return y.log()


def test_a_step_of_your_own_is_inverted_and_evaluated_again() -> None:
    """https://github.com/silvandeleemput/memcnn/issues/77: twice as slow, for a trivial inverse."""
    step = Counted()
    revzoo.set_memory(step, "invert")
    step(torch.ones(3, requires_grad=True) * 1).sum().backward()
    assert step.calls == ["forward", "inverse", "forward"]


def test_each_question_is_cited_by_a_test() -> None:
    url = r"https://github\.com/[\w/.-]+/(?:issues|pull)/\d+"
    asked = set(re.findall(url, PAGE.read_text()))
    assert len(asked) >= 25
    tests = "".join(path.read_text() for path in Path(__file__).parent.rglob("*.py"))
    assert asked <= set(re.findall(url, tests))
