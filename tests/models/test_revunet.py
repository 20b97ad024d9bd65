"""Reversible U-Nets: parameters, a plain twin, memory modes."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored

import revzoo
from revzoo.models import RevUNet, RevUNetVariant, create_model

ROW = RevUNetVariant(channels=(4, 8, 12), units=(1, 2, 1), groups=2)


def small():
    torch.manual_seed(0)
    return RevUNet(ROW, num_classes=3, in_chans=2).double(), torch.randn(2, 2, 4, 8, 12).double()


def test_parameters_follow_the_definition():
    with torch.device("meta"):
        model = create_model("revunet3d", in_chans=4, num_classes=3)
    channels = (60, 120, 240, 360, 480)
    blocks = sum(4 * (27 * (c // 2) ** 2 + c) for c in channels)
    moves = sum(2 * a * b + a + b for a, b in pairwise(channels))
    total = blocks + moves + 27 * 4 * 60 + 3 * 60 + 3
    assert sum(p.numel() for p in model.parameters()) == total


def blocks(x, steps, name):
    x1, x2 = x.chunk(2, dim=1)
    j = 0
    while f"{name}{j}" in steps:
        norm, _, conv = steps[f"{name}{j}"].branch
        y = F.leaky_relu(F.group_norm(x2, norm.num_groups, norm.weight, norm.bias, 1e-5), 0.01)
        x1, x2, j = x2, x1 + F.conv3d(y, conv.weight, padding=1), j + 1
    return torch.cat((x1, x2), dim=1)


def test_a_network_is_its_plain_twin():
    model, x = small()
    revzoo.set_memory(model, "store")
    y = F.conv3d(x, model.stem[0].conv.weight, padding=1)
    maps = []
    for level in range(3):
        if level:
            y = model.stages[level]["down"].branch.conv(F.max_pool3d(y, 2))
        y = blocks(y, model.stages[level], "encoder")
        maps.append(y)
    maps[-1] = y = blocks(y, model.stages[2], "decoder")
    for level in (1, 0):
        steps = model.stages[4 - level]
        up = F.interpolate(steps["up"].branch.conv(y), scale_factor=2, mode="trilinear")
        y = blocks(maps[level] + up, steps, "decoder")
        maps.append(y)
    features, found = model.forward_intermediates(x)
    assert [m.shape for m in found] == [m.shape for m in maps]
    for ours, expected in zip(found, maps, strict=True):
        assert torch.allclose(ours, expected, rtol=0, atol=1e-11)
    assert torch.equal(features, found[-1])
    assert torch.allclose(model(x), F.conv3d(y, model.fc.weight, model.fc.bias), rtol=0, atol=1e-11)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_training_equals_store(mode):
    model, x = small()
    assert_trains_as_stored(model, mode, x)


def test_training_keeps_the_last_state_alone():
    model, x = small()
    kept = {}
    for mode in ("store", "invert"):
        report = revzoo.audit(model.float(), x.shape, modes=[mode])
        kept[mode] = report.audits[mode].kept_bytes
    state = 4 * 2 * (4 + 8 / 8 + 12 / 64) * 4 * 8 * 12
    assert kept["invert"] < 3 * state + 4 * x.numel() < kept["store"]


def test_names_of_the_release_cover_the_network():
    model, _ = small()
    ours = {new for _, new in model.published_keys()}
    keys = {key.rpartition(".")[0] for key in model.state_dict()}
    assert keys <= ours
    # levels without a resampling have no convolution of it
    assert ours - keys == {"stages.0.steps.down.branch.conv", "stages.5.steps.up.branch.conv"}


def test_channels_fit_the_groups():
    with pytest.raises(ValueError, match="multiples of 4, twice groups=2"):
        RevUNetVariant(channels=(4, 6), units=(1, 1), groups=2)
