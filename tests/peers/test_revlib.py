"""RevLib's and RevTorch's tests, run on ``ReversibleSequence``.

RevLib's tests/backward_test.py and tests/memory_test.py run on a GPU and compare gradients loosely
(1e-3) and memory of whole processes; here they run anywhere, in float64, and count bytes. RevTorch
has no tests; its README promises a sequence that may be used as any module, odd splits along a
dimension, and a fixed random seed.
"""

import copy

import pytest
import torch
from compare import assert_same_training, images
from torch import nn

from revzoo import ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core.live import LiveMemory

MODES = ["recompute", "offload", "invert"]


def conv_block(before, after):
    norm = nn.BatchNorm2d(after, track_running_stats=False)
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.Dropout(0.2), norm, nn.ReLU())


def branch(channels=4):
    last = nn.Conv2d(channels, channels, 3, padding=1)
    return nn.Sequential(
        conv_block(channels, 2 * channels), conv_block(2 * channels, channels), last
    )


def revnet(depth, *, shared, channels=4, mode="invert"):
    torch.manual_seed(0)
    branches = [branch(channels)] * depth if shared else [branch(channels) for _ in range(depth)]
    return ReversibleSequence([ReversibleBlock(f, f) for f in branches], memory=mode)


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_gradients_with_and_without_savings(depth, shared, mode):
    """same_gradients_without_memory_savings_test: also where blocks share their weights."""
    stem = nn.Conv2d(3, 8, 3, padding=1)
    nets = []
    for m in (mode, "store"):
        net = nn.Sequential(stem, revnet(depth, shared=shared, mode=m), nn.Conv2d(8, 5, 3))
        nets.append(copy.deepcopy(net).double())
    nets[1].load_state_dict(nets[0].state_dict())
    assert_same_training(*nets, images(channels=3, size=8), tolerance=1e-9, steps=2)


def kept(depth, mode, *, shared=True, channels=8):
    """Bytes between forward and backward pass."""
    net = revnet(depth, shared=shared, channels=channels, mode=mode)
    x = torch.randn(1, 2 * channels, 32, 32, requires_grad=True)
    net(x)  # tables of the guard
    with LiveMemory() as memory:
        y = net(x)
        now = memory.now
    assert y.requires_grad
    return now


@pytest.mark.parametrize("depth", [8, 32])
@pytest.mark.parametrize("baseline", ["store", "recompute"])
def test_less_memory_than_with_other_modes(depth, baseline):
    """revnet_uses_less_test, revnet_uses_more_without_savings_test."""
    assert kept(depth, "invert") < 0.35 * kept(depth, baseline)


@pytest.mark.parametrize(("depth", "factor"), [(8, 4), (8, 16), (128, 2)])
def test_no_more_memory_with_depth(depth, factor):
    """no_more_memory_with_depth_test: within a tenth, at up to 512 couplings.

    Beside the last output a chain keeps less than 1 kB a coupling: what the guard compares. Here a
    stream is small, 32 kB; RevLib's, 12.8 MB, would not show it.
    """
    shallow, deep = kept(depth, "invert", channels=32), kept(depth * factor, "invert", channels=32)
    assert deep - shallow <= 1024 * 2 * depth * (factor - 1)


def test_a_sequence_inside_other_modules():
    """RevTorch's README: between ordinary layers, with an optimiser, for two epochs."""
    torch.manual_seed(0)
    relu = lambda: nn.Sequential(nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1))  # noqa: E731
    blocks = nn.ModuleList([ReversibleBlock(relu(), relu()) for _ in range(4)])
    net = nn.Sequential(nn.Conv2d(3, 8, 3), ReversibleSequence(blocks), nn.Conv2d(8, 2, 3))
    reference = copy.deepcopy(net)
    set_memory(reference, "store")
    assert_same_training(
        net.double(), reference.double(), images(channels=3, size=8), tolerance=1e-9
    )


@pytest.mark.parametrize("dim", [1, 2, -1])
def test_split_along_dim(dim):
    """RevTorch's ``split_along_dim``."""
    net = ReversibleSequence([ReversibleBlock(nn.Tanh()) for _ in range(2)], dim=dim).double()
    x = images(size=4).requires_grad_()
    y = net(x)
    assert (net.inverse(y) - x).abs().max() < 1e-12
    y.sum().backward()


def test_random_numbers_repeat_without_a_seed_being_fixed():
    """RevTorch's ``fix_random_seed``: dropout is the same in both passes, for every mode."""
    nets = [revnet(3, shared=False, mode=m).double() for m in ("invert", "store")]
    nets[1].load_state_dict(nets[0].state_dict())
    assert_same_training(*nets, images(size=8), tolerance=1e-9)
