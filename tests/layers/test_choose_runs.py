"""``bits="auto"`` chooses the fewest bits that hardly change the outputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import revzoo
from revzoo.layers.choose_runs import MOST_CHANGE
from revzoo.layers.make_reversible import described_runs, make_runs

SHAPE = (4, 16)


class Block(nn.Module):
    def __init__(self, size: float) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.size = size  # of its change of the stream

    def forward(self, x: Tensor) -> Tensor:
        scale = x.norm() / math.sqrt(x.numel())  # so that the scale of x makes no difference
        return x + self.size * scale * self.linear(x / scale).sin()


def network(*sizes: float, scale: float = 1.0) -> nn.Module:
    """A run of six blocks for each size, on activations of this ``scale``."""
    torch.manual_seed(0)

    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    runs = [nn.Sequential(*(Block(size) for _ in range(6))) for size in sizes]
    return nn.Sequential(Scale(), *runs)


def change(net: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        net(x)  # adapts the grids
        found = net(x)
        plain = revzoo.make_reversible(net, None)(x)
    return float((found - plain).norm() / plain.norm())


def bits_of(net: nn.Module) -> list[int]:
    """Of the blocks."""
    return [row.bits for row in revzoo.reversible_blocks(net)]


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_outputs_change_by_half_a_percent_at_most(scale: float) -> None:
    x = torch.randn(SHAPE)
    net = revzoo.make_reversible(network(0.1, 0.5, scale=scale), "auto", images=x)
    gentle, strong = bits_of(net)[0], bits_of(net)[6]
    assert bits_of(net) == [gentle] * 6 + [strong] * 6
    assert 1 <= gentle < strong <= 8
    assert change(net, x) <= MOST_CHANGE
    fewer = revzoo.make_reversible(network(0.1, 0.5, scale=scale), "auto", images=x)
    for step in fewer.modules():
        if hasattr(step, "reversible"):
            step.reversible.bits -= 2
    assert change(fewer, x) > MOST_CHANGE  # so the choice is close


def test_a_run_that_changes_too_much_stays_plain() -> None:
    x = torch.randn(SHAPE)
    sizes = 0.1, 5.0
    net = revzoo.make_reversible(network(*sizes), "auto", images=x)
    paths = [row.path for row in revzoo.reversible_blocks(net)]
    assert paths == [f"1.{i}" for i in range(6)]
    net = revzoo.make_reversible(network(*sizes), "auto", images=x, checkpoint=True)
    for _ in range(2):  # the first pass adapts the grids
        net(x)
    roles = {row.path[0]: row.role for row in revzoo.reversible_blocks(net)}
    assert roles == {"1": "joins", "2": "starts"}  # the blocks of 2 are recomputed
    assert change(net, x) <= MOST_CHANGE


def test_without_images_the_batch_is_random_and_the_same() -> None:
    state = torch.get_rng_state()
    first, second = (
        revzoo.make_reversible(network(0.2), "auto", input_shape=SHAPE) for _ in range(2)
    )
    torch.manual_seed(0)
    assert bits_of(first) == bits_of(second)
    assert bits_of(first)
    torch.set_rng_state(state)
    before = torch.get_rng_state()
    revzoo.make_reversible(first, "auto", input_shape=SHAPE)
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match=r'bits="auto" compares .* give images, or input_shape'):
        revzoo.make_reversible(network(0.2), "auto")


def test_a_description_makes_the_same_runs() -> None:
    x = torch.randn(SHAPE)
    net = revzoo.make_reversible(network(0.1, 0.5), "auto", images=x)
    again = make_runs(network(0.1, 0.5), described_runs(net))
    assert described_runs(again) == described_runs(net)
    assert torch.equal(again(x), net(x))
    for wrong in ("nowhere:4", "1.0:9", "1.0"):
        with pytest.raises(ValueError, match=r"expected words PATH:BITS"):
            make_runs(network(0.1), [wrong])
