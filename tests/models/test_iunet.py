"""iUNets: parameters, formula, memory modes, the bijective trunk, names of the release."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored

import revzoo
from revzoo.models import IUNet, IUNetVariant, create_model
from revzoo.models.iunet import haar
from revzoo.models.network import ImageSizeError

# odd numbers of channels and couplings, one level, strides that differ
ROWS = {
    "odd": (2, (5, 8, 16), (1, 3, 3), 2, (16, 8)),
    "volume": (3, (4, 8, 16), (2, 1, 2), (1, 2, 2), (3, 8, 8)),
    "signal": (1, (4, 6, 8), (2, 2, 1), 2, (16,)),
    "one level": (1, (5,), (3,), 2, (16,)),
}


def small(name, **keywords):
    dims, channels, units, stride, sizes = ROWS[name]
    row = IUNetVariant(dims=dims, channels=channels, units=units, stride=stride, image_size=16)
    torch.manual_seed(0)
    model = IUNet(row, num_classes=4, **keywords)
    for path, p in model.named_parameters():
        if "mix" in path:  # zeros at first
            torch.nn.init.normal_(p, std=0.1)
    return model, torch.randn(2, 3, *sizes)


def test_parameters_follow_the_definition():
    with torch.device("meta"):
        model = create_model("iunet2d", num_classes=5)
    channels, ends = (64, 128, 256, 384), 9 * 64 * 3 + 64 + 9 * 64 * 5 + 5
    couplings = sum(4 * 2 * (9 * (c // 2) ** 2 + 2 * (c // 2)) for c in channels)
    mixes = sum(2 * c * c for c in channels[:-1])
    resampled = sum(2 * c // 4 * 16 for c in channels[1:])
    total = ends + couplings + mixes + resampled
    assert sum(p.numel() for p in model.parameters()) == total


def coupling(x, branch, pieces):
    x1, x2 = torch.split(x, pieces, dim=1)
    for conv, norm in ((branch[0], branch[1]), (branch[3], branch[4])):
        y = F.conv2d(x2, conv.weight, padding=1)
        mean, var = y.mean((2, 3), keepdim=True), y.var((2, 3), correction=0, keepdim=True)
        scaled = (y - mean) / (var + 1e-5).sqrt() * norm.weight[:, None, None]
        x2 = F.leaky_relu(scaled + norm.bias[:, None, None], 0.01)
    return torch.cat((x[:, pieces[0] :], x1 + x2), dim=1)


def couplings(x, steps, name, mix=None):
    """The couplings of a level on a whole map, with a mix after one of them."""
    half, j = x.shape[1] // 2, 0
    while f"{name}{j}" in steps:
        pieces = (half, x.shape[1] - half)
        x = coupling(x, steps[f"{name}{j}"].branch, pieces if j % 2 == 0 else pieces[::-1])
        if j == mix:
            x = torch.einsum("ij,bj...->bi...", steps["mix"].matrix()[0], x)
        j += 1
    return x


def kernel(step):
    q = step.matrix()
    return q.reshape(-1, 1, 2, 2), len(q)


def test_a_network_is_its_formula():
    model, x = small("odd")
    model = model.double()
    revzoo.set_memory(model, "store")
    y = F.conv2d(x.double(), model.stem[0].conv.weight, model.stem[0].conv.bias, padding=1)
    skips, expected, units = [], [], model.variant.units
    for level in range(3):
        steps = model.stages[level]
        if level:
            skip, rest = y.tensor_split([model.variant.skipped[level - 1]], dim=1)
            skips.append(skip)
            weight, groups = kernel(steps["down"])
            y = F.conv2d(rest, weight, stride=2, groups=groups)
        y = couplings(y, steps, "encoder", units[level] - 1 if level < 2 else None)
        expected.append(y)
    expected[-1] = y = couplings(y, model.stages[2], "decoder")
    for level in (1, 0):
        steps = model.stages[4 - level]
        weight, groups = kernel(steps["up"])
        y = torch.cat((skips.pop(), F.conv_transpose2d(y, weight, stride=2, groups=groups)), dim=1)
        y = couplings(y, steps, "decoder", 0)
        expected.append(y)
    features, maps = model.forward_intermediates(x.double())
    for found, level in zip(maps, expected, strict=True):
        assert torch.allclose(found, level, rtol=0, atol=1e-9)
    assert torch.equal(features, maps[-1])
    assert torch.allclose(model(x.double()), model.fc(y), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_training_equals_store(name, mode):
    model, x = small(name)
    assert_trains_as_stored(model.double(), mode, x.double())


@pytest.mark.parametrize("name", ROWS)
def test_the_trunk_returns_every_bit(name):
    model, x = small(name)
    z = torch.round(torch.randn(2, model.num_features, *x.shape[2:]) * 2**16) / 2**16
    with torch.no_grad():
        y = model.trunk(z)
        assert y.shape == z.shape
        assert torch.equal(model.trunk.inverse(y), z)
    assert model.stages[0][0].label == "stages.0.steps.split"


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("rotation", ["cayley", "exp"])
def test_downsampling_begins_as_a_haar_wavelet(dims, rotation):
    row = IUNetVariant(dims=dims, channels=(4,), units=(1,), rotation=rotation, image_size=8)
    weight = haar(row.strides, rotation)
    step = revzoo.layers.orthogonal.OrthogonalMix(weight, rotation=rotation)
    size = 2 ** (-dims / 2)
    assert torch.allclose(step.matrix().abs(), torch.full((1, 2**dims, 2**dims), size), atol=1e-6)


def test_other_rotations_invert_by_default():
    model = create_model("iunet1d", rotation="exp", channels=(4, 4), units=(1, 1))
    assert {step.memory for step in revzoo.core.invertible.steps_in(model).values()} == {"invert"}


def test_channels_that_do_not_fit_are_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"the nearest that fit: \(7, 16, 32, 88\)"):
        IUNetVariant(dims=3, channels=(7, 15, 35, 91), units=(1, 1, 1, 1), image_size=16)


def test_sizes_that_do_not_fit_are_refused():
    model, _ = small("odd")
    for sizes in ((16, 6), (4, 4), (0, 8)):
        with pytest.raises(ImageSizeError, match="multiples of 4 x 4"):
            model(torch.zeros(1, 3, *sizes))
    with pytest.raises(ValueError, match=r"expected \(B, 3, D, H, W\)"):
        small("volume")[0](torch.zeros(1, 3, 8, 8))


def test_names_of_the_release_cover_the_network():
    model, _ = small("odd")
    ours = {new for _, new in model.published_keys()}
    keys = [(key, key.rpartition(".")[0]) for key in model.state_dict()]
    assert [key for key, module in keys if not {key, module} & ours] == []
    assert ours == {key if key in ours else module for key, module in keys}
    tensors = {"1.encoder_modules.0.0._fn.F.F.0.weight": torch.zeros(1)}
    assert not model.adapt_state_dict(tensors)  # the same as .F.seq.0.weight


def test_a_map_without_classes_is_the_features(tmp_path):
    model = create_model("iunet1d", channels=(4, 6), units=(1, 1), num_classes=0, in_chans=1)
    x = torch.randn(2, 1, 8)
    assert model(x).shape == (2, 4, 8)
    model.reset_classifier(3)
    assert model(x).shape == (2, 3, 8)
    with pytest.raises(ValueError, match="pools nothing"):
        model.reset_classifier(3, global_pool="avg")
    model.save_pretrained(tmp_path)
    assert torch.equal(revzoo.from_pretrained(tmp_path)(x), model(x))
    net = create_model("iunet1d", features_only=True, out_indices=(1,))
    assert [tuple(y.shape) for y in net(torch.zeros(1, 3, 16))] == [(1, 96, 8)]
