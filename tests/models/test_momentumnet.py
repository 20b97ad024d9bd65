"""Momentum ResNets: formula, parameters, memory modes, feature maps, weights of the release."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_features, assert_trains_as_stored, under_published_names

import revzoo
from revzoo import NotInvertibleError
from revzoo.models import create_model

TINY = {"widths": (4, 4, 8), "strides": (1, 1, 2), "units": (3, 2, 2)}
# for 10 classes: torchvision's networks with a stem of 3x3
SIZES = {
    "momentumnet18": 11_173_962,
    "momentumnet34": 21_282_122,
    "momentumnet101": 42_512_970,
    "momentumnet152": 58_156_618,
}


def small(**keywords):
    torch.manual_seed(0)
    options = {**TINY, "num_classes": 5, **keywords}
    model = create_model("momentumnet18", **options).double()
    for p in model.parameters():
        if p.dim() == 1:  # scales and shifts begin at 1 and 0
            torch.nn.init.uniform_(p, 0.3, 1)
    return model


def images(side=12):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("name", SIZES)
def test_parameters(name):
    with torch.device("meta"):
        model = create_model(name)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def norm(x, layer):
    return F.batch_norm(x, None, None, layer.weight, layer.bias, training=True, eps=1e-5)


def branch(module, x, strides):
    for i, stride in enumerate(strides, start=1):
        weight = module.get_submodule(f"conv{i}").weight
        x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)
        x = norm(x, module.get_submodule(f"norm{i}"))
        if i < len(strides):
            x = x.relu()
    return x


@pytest.mark.parametrize("kind", ["basic", "bottleneck"])
@pytest.mark.parametrize("large", [False, True])
def test_a_network_is_its_formula(kind, large):
    model = small(branch=kind, downsampling_stem=large, gamma=0.8, memory="store")
    images_ = images(33)
    found, maps = model.forward_intermediates(images_)
    (stem,) = model.stem
    weight = stem.conv.weight
    assert weight.shape[2:] == ((7, 7) if large else (3, 3))
    x = F.conv2d(images_, weight, stride=2 if large else 1, padding=weight.shape[-1] // 2)
    x = norm(x, stem.norm).relu()
    x = F.max_pool2d(x, 3, stride=2, padding=1) if large else x
    for i, stage in enumerate(model.stages):
        first, *blocks = stage
        stride = TINY["strides"][i]
        strides = (1, stride, 1) if kind == "bottleneck" else (stride, 1)
        skip = x
        if not isinstance(first.shortcut, torch.nn.Identity):
            skip = norm(F.conv2d(x, first.shortcut.conv.weight, stride=stride), first.shortcut.norm)
        x = (skip + branch(first.branch, x, strides)).relu()
        v = torch.zeros_like(x)
        for block in blocks:
            v = 0.8 * v + 0.2 * branch(block.branch, x, (1,) * len(strides))
            x = x + v
        assert torch.allclose(maps[i], x, rtol=0, atol=1e-11)
    assert torch.equal(found, maps[-1])
    expected = x.mean((2, 3)) @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model(images_), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_training_equals_store(mode):
    assert_trains_as_stored(small(), mode, images())


def test_memory_hardly_grows_with_depth():
    def kept(mode, units):
        model = create_model("momentumnet18", **{**TINY, "units": units}, memory=mode)
        return revzoo.audit(model, (2, 3, 16, 16), modes=[]).kept_bytes

    growth = {m: kept(m, (7, 2, 2)) - kept(m, (3, 2, 2)) for m in ("store", "invert", "exact")}
    values = 4 * 2 * 4 * 16 * 16  # of four blocks
    assert growth["invert"] == 0
    # one bit for each value, and the sums that the guard compares
    assert growth["exact"] == values / 8 + 4 * 8
    assert growth["store"] > 40 * growth["exact"]


@pytest.mark.parametrize("indices", [(0,), (0, -1)])
def test_feature_maps_are_x(indices):
    assert_features(small().eval(), images(), indices, "momentumnet18", **TINY)


def test_the_head():
    model = small(num_classes=0).eval()
    features = model.forward_features(images())
    assert torch.equal(model(images()), features.mean((2, 3)))
    model.reset_classifier(7, "catavgmax")
    assert model(images()).shape == (2, 7)


def test_errors():
    model = small()
    with pytest.raises(NotInvertibleError, match=r"stages\.0\.steps\.0 MomentumTransition"):
        model.inverse(model.encode(images()))
    with pytest.raises(ValueError, match=r"gamma=1.5: expected a number in \[0.001, 1\)"):
        small(gamma=1.5)
    with pytest.raises(ValueError, match="expected one value of each per stage"):
        small(widths=(4, 8))


def test_weights_of_the_release_load():
    model, other = small(branch="bottleneck"), small(branch="bottleneck")
    torch.nn.init.normal_(other.fc.weight)
    tensors = under_published_names(other)
    assert {
        *("conv1.weight", "bn1.running_mean", "layer1.0.conv1.weight", "fc.bias"),
        *("layer1.1.network.1.bn3.bias", "layer3.0.downsample.1.weight"),
    } <= {*tensors}
    model.load_state_dict(model.adapt_state_dict(tensors))
    assert torch.equal(model.eval()(images()), other.eval()(images()))
