"""Networks are converted only where that saves memory, and the report says what it saves."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import revzoo

SHAPE = (1, 3, 64, 64)


def network(name: str) -> nn.Module:
    if name.startswith("timm"):
        pytest.importorskip("timm")
    torch.manual_seed(0)
    return revzoo.create_model(name, memory="store").eval()


@pytest.mark.parametrize("name", ["torchvision:resnet18", "torchvision:resnet50"])
def test_blocks_that_change_their_shape_stay_plain(name: str) -> None:
    model = network(name)
    plain = dict(model.named_modules())
    revzoo.make_reversible(model, input_shape=SHAPE)
    rows = revzoo.reversible_blocks(model)
    model(torch.randn(SHAPE))
    assert {row.role for row in revzoo.reversible_blocks(model)} == {"starts", "joins"}
    assert {(row.role, row.grid) for row in rows} == {("not called", None)}
    first = plain["net.layer2.0"]
    assert "forward" not in vars(first)  # its output has other channels


def test_a_network_without_neighbours_of_one_shape_is_not_changed() -> None:
    class Down(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.conv = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
            self.norm = nn.BatchNorm2d(2 * width)
            self.out = nn.Conv2d(2 * width, 2 * width, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return x + self.out(self.norm(x).relu()).tanh()

    model = nn.Sequential(Down(3), Down(6), Down(12), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.eval()
    x = torch.randn(2, 3, 64, 64)
    expected = model(x)
    revzoo.make_reversible(model, input_shape=SHAPE)
    assert torch.equal(model(x), expected)
    report = revzoo.conversion(model, SHAPE)
    assert report.now == report.before
    assert "nothing to invert here" in str(report)
    assert "checkpoint=True" in str(report)

    revzoo.make_reversible(model, input_shape=SHAPE, checkpoint=True)
    report = revzoo.conversion(model, SHAPE)
    assert sum(row.recomputed for row in report.rows) == 3
    assert report.now < report.before
    torch.testing.assert_close(model(x), expected)  # rounded to the grid


@pytest.mark.parametrize(
    "name", ["torchvision:resnet18", "torchvision:resnet50", "timm:vit_tiny_patch16_224"]
)
def test_what_is_converted_saves_memory(name: str) -> None:
    model = network(name)
    shape = (1, 3, 224, 224)
    revzoo.make_reversible(model, input_shape=shape)
    report = revzoo.conversion(model, shape)
    for row in report.rows:
        assert row.inverted != 1
        assert row.now < 0.9 * row.before if row.inverted else row.now == row.before
        assert row.time == pytest.approx(1 + row.inverted / row.blocks / 3)
    assert report.now < report.before
    assert max(map(len, str(report).splitlines())) <= 80
    assert not any(vars(m).get("last_call") for m in model.modules())


def test_a_run_that_a_checkpoint_serves_as_well_stays_plain() -> None:
    """Of MobileNetV3 70 % of the blocks were inverted, to keep 3 % less than with checkpoints."""
    model = network("torchvision:mobilenet_v3_large")
    x = torch.randn(SHAPE)
    expected = model(x)
    shape = (1, 3, 224, 224)
    revzoo.make_reversible(model, input_shape=shape)
    assert not revzoo.reversible_blocks(model)
    assert torch.equal(model(x), expected)
    report = revzoo.conversion(model, shape)
    saved = 1 - report.checkpointed / report.before
    assert f"checkpoint=True saves {saved:.0%}" in report.sentence()


def test_frozen_blocks_are_converted() -> None:
    """They may be trained later."""
    model = network("torchvision:resnet18").requires_grad_(False)
    revzoo.make_reversible(model, input_shape=SHAPE)
    assert len(revzoo.reversible_blocks(model)) == 2
    assert not any(p.requires_grad for p in model.parameters())


def test_a_shape_that_does_not_fit_changes_nothing() -> None:
    model = network("torchvision:resnet18")
    with pytest.raises(ValueError, match=r"does not take input_shape=\(1, 4, 64, 64\)"):
        revzoo.make_reversible(model, input_shape=(1, 4, 64, 64))
    assert not revzoo.reversible_blocks(model)


@pytest.mark.parametrize("memory", ["invert", "exact", "recompute"])
def test_a_branch_for_all_channels_is_explained(memory: str) -> None:
    block = revzoo.ReversibleBlock(nn.Conv2d(16, 16, 3, padding=1), memory=memory)
    with pytest.raises(RuntimeError, match="each branch gets half of the channels") as caught:
        block(torch.randn(1, 16, 4, 4))
    assert "splits 16 channels in two" in str(caught.value)
    assert "Build it for 8" in str(caught.value)
    assert "to have 16 channels" in str(caught.value.__cause__)


@pytest.mark.parametrize("kind", ["converted", "torch's checkpoint"])
def test_a_vit_keeps_what_is_counted_on_fakes(kind: str) -> None:
    """The figures of common networks are counted on fake tensors."""
    model, shape = network("timm:vit_tiny_patch16_224"), (2, 3, 224, 224)
    if kind == "converted":
        revzoo.make_reversible(model, input_shape=shape)
    else:
        for block in model.net.blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    fake, real = (revzoo.audit(model, shape, modes=[], real=r) for r in (False, True))
    assert fake.kept_bytes == real.kept_bytes
    assert fake.activation_bytes == pytest.approx(real.activation_bytes, rel=0.001)


def test_a_replay_holds_four_tensors_more_than_a_checkpoint() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Conv2d(16, 64, 1), nn.Conv2d(64, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.outer(self.inner(x).tanh().tanh())

    def peak(net: nn.Module) -> int:
        return revzoo.audit(net, (2, 16, 32, 32), modes=[]).activation_bytes

    plain, converted = (nn.Sequential(*(Block() for _ in range(8))) for _ in range(2))
    for block in plain:
        block.forward = partial(revzoo.checkpoint, block.forward)  # type: ignore[method-assign]
    revzoo.make_reversible(converted)
    # two states and 7/8 of bits take the place of seven inputs: 4.1 tensors less
    assert peak(converted) < peak(plain) + 4 * 2 * 16 * 32 * 32
