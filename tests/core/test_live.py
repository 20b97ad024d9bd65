"""Counts of live bytes; memory does not grow with depth."""

import pytest
import torch
from compare import conv_net, images, twin

import revzoo
from revzoo.core.live import LiveMemory


def test_counts_simultaneously_live_bytes():
    x = torch.zeros(1000)  # made outside: not counted
    with LiveMemory() as memory:
        a = x + 1
        b = a.view(10, 100)  # shares a's storage
        a = a + b.flatten()
        del b
        assert memory.now == 4000
        a.add_(1)
        assert memory.peak == 8000
    del a
    assert memory.now == 0


def peak(net, x):
    net.zero_grad(set_to_none=False)
    net(x).square().mean().backward()  # allocates the gradients
    with LiveMemory() as memory:
        net(x).square().mean().backward()
    return memory.peak


def test_invert_is_flat_in_depth():
    x = images(batch=4, size=32)
    peaks = {
        mode: [peak(twin(conv_net(d), mode), x) for d in (4, 12)]
        for mode in ("store", "recompute", "invert")
    }
    growth = {mode: (deep - shallow) / shallow for mode, (shallow, deep) in peaks.items()}
    assert abs(growth["invert"]) < 0.02
    assert growth["recompute"] > 0.5
    assert growth["store"] > 1.5
    assert peaks["invert"][0] < peaks["recompute"][0] < peaks["store"][0]


@pytest.mark.parametrize("name", ["revnet38", "revnet110"])
def test_models_save_memory(name):
    x = torch.randn(4, 3, 32, 32)
    peaks = {}
    for mode in ("store", "recompute", "invert"):
        torch.manual_seed(0)
        peaks[mode] = peak(revzoo.create_model(name, memory=mode), x)
    assert peaks["invert"] < peaks["recompute"] < peaks["store"]


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_replay_needs_two_streams_their_gradients_and_one_branch(mode):
    net, x = twin(conv_net(4), mode), images(channels=8, size=64)
    (net(x) * x).sum().backward()  # allocates the gradients
    with LiveMemory() as memory:
        (net(x) * x).sum().backward()
    stream = x.numel() * x.element_size() / 2
    # a branch saves the inputs of its convolutions and its second norm, and uses two temporaries;
    # exact streams are integers, so the branch's float input is one more
    expected = 2 + 2 + 3 + 2 + (mode == "exact")
    assert memory.peak / stream == pytest.approx(expected, rel=0.02)
