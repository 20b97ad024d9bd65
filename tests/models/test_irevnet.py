"""i-RevNets against the published description, written as functions of a state dict."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored

from revzoo import AdditiveCoupling, NotInvertibleError, drift
from revzoo.models import IREVNETS, create_model

SMALL = {"units": (2, 2, 1), "dropout": 0.0}
SHAPES = {  # injective, bijective, and padded once more in the middle
    "injective": ({"name": "irevnet163", **SMALL}, 3),
    "bijective": ({"name": "irevnet301", "units": (2, 1), "strides": (2, 2)}, 3),
    "middle": (
        {"name": "irevnet163", **SMALL, "strides": (1, 1, 2), "channels": (8, 12, 48)},
        3,
    ),
    "grey": ({"name": "irevnet13", "units": (1, 1), "in_chans": 1}, 1),
}


def small(kind, **options):
    torch.manual_seed(0)
    keywords, in_chans = SHAPES[kind]
    model = create_model(**{**keywords, **options})
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, torch.nn.BatchNorm2d):
                m.running_mean.normal_(std=0.2)
                m.running_var.uniform_(0.5, 2)
                m.weight.uniform_(0.5, 1.5)
                m.bias.normal_(std=0.2)
    return model, in_chans


def psi(x):
    """Pixel (dy, dx) of channel c goes to channel (2 dy + dx) C + c."""
    return torch.cat([x[:, :, dy::2, dx::2] for dy in (0, 1) for dx in (0, 1)], dim=1)


def norm_relu(x, w, name):
    statistics = (w[f"{name}.{key}"] for key in ("running_mean", "running_var", "weight", "bias"))
    mean, var, scale, shift = (t[:, None, None] for t in statistics)
    return ((x - mean) / (var + 1e-5).sqrt() * scale + shift).clamp(min=0)


def branch(x, w, name, stride):
    if f"{name}.norm1.weight" in w:
        x = norm_relu(x, w, f"{name}.norm1")
    x = F.conv2d(x, w[f"{name}.conv1.weight"], stride=stride, padding=1)
    for i in (2, 3):
        x = F.conv2d(norm_relu(x, w, f"{name}.norm{i}"), w[f"{name}.conv{i}.weight"], padding=1)
    return x


def reference(model, x):
    """Logits and representation of the published network in evaluation mode."""
    w, variant = model.state_dict(), model.variant
    names = [k.removesuffix(".conv1.weight") for k in w if k.endswith(".conv1.weight")]
    x = psi(x) if variant.squeeze == 2 else x
    streams = None
    for stage, (units, stride) in enumerate(zip(variant.units, variant.strides, strict=True)):
        merged = x if streams is None else torch.cat(streams, dim=1)
        if stride == 1 and variant.channels is not None:
            zeros = 2 * variant.channels[stage] - merged.shape[1]
            merged = torch.cat((merged, merged.new_zeros(len(x), zeros, *merged.shape[2:])), 1)
        x1, x2 = merged.tensor_split(2, dim=1)
        for block in range(units):
            step = stride if block == 0 else 1
            value = branch(x2, w, names.pop(0), step)
            x1, x2 = (psi(x2), psi(x1) + value) if step == 2 else (x2, x1 + value)
        streams = x1, x2
    z = torch.cat(streams, dim=1)
    pooled = norm_relu(z, w, "norm").mean((2, 3))
    return pooled @ w["fc.weight"].T + w["fc.bias"], z


@pytest.mark.parametrize("kind", SHAPES)
def test_logits_representation_and_inverse_are_the_published_ones(kind):
    model, in_chans = small(kind, memory="store")
    model.double().eval()
    x = torch.randn(2, in_chans, 16, 16, dtype=torch.float64)
    logits, z = reference(model, x)
    ours = model.forward_with_representation(x)
    assert torch.allclose(ours[0], logits, rtol=0, atol=1e-11)
    assert torch.allclose(ours[1], z, rtol=0, atol=1e-11)
    assert torch.equal(model(x), ours[0])
    assert torch.equal(model.encode(x), ours[1])
    assert torch.allclose(model.inverse(z), x, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("name", "classes", "expected"),
    [
        ("irevnet163", 10, 6_274_826),
        ("irevnet163", 100, 6_320_996),
        ("irevnet301", 1000, 125_120_356),
    ],
)
def test_parameters_match_the_release(name, classes, expected):
    with torch.device("meta"):
        model = create_model(name, num_classes=classes)
    assert sum(p.numel() for p in model.parameters()) == expected


def test_the_release_leaves_torchs_defaults_but_for_the_heads_momentum():
    model = create_model("irevnet13")
    norms = [m for m in model.modules() if isinstance(m, torch.nn.BatchNorm2d)]
    assert {m.eps for m in norms} == {1e-5}
    assert [m.momentum for m in norms] == [0.1] * (len(norms) - 1) + [0.9]
    assert norms[-1] is model.norm


@pytest.mark.parametrize(
    ("kind", "training"), [*((kind, True) for kind in SHAPES), ("injective", False)]
)
def test_an_exact_network_gives_the_image_back_bit_for_bit(kind, training):
    model, in_chans = small(kind, memory="exact")
    model.train(training)
    pixels = torch.randint(256, (3, in_chans, 16, 16), dtype=torch.uint8)
    x = pixels / 256 - 0.5
    z = model.encode(x)
    assert torch.equal(model.inverse(z), x)
    assert torch.equal(((model.inverse(z) + 0.5) * 256).to(torch.uint8), pixels)
    with torch.no_grad():
        assert torch.equal(model.inverse(model.encode(x)), x)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("injective", mode) for mode in ("recompute", "offload", "invert", "exact")),
        *((kind, mode) for kind in ("bijective", "middle") for mode in ("invert", "exact")),
    ],
)
def test_training_equals_store_in_float64_with_dropout(kind, mode):
    model, _ = small(kind, dropout=0.2)
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    assert_trains_as_stored(model.double(), mode, x, drops=True)


def test_float32_training_of_an_injective_network_drifts_little():
    model = create_model("irevnet163", units=(4, 1, 1), memory="invert")
    F.cross_entropy(model(torch.randn(4, 3, 16, 16)), torch.arange(4)).backward()
    assert 0 < max(drift(model).values()) < 1e-3


def test_an_inverse_with_dropout_is_refused_in_training_mode():
    model = create_model("irevnet13", dropout=0.1, drop_rate=0.5)
    z = model.encode(torch.randn(2, 3, 8, 8))
    with pytest.raises(NotInvertibleError, match=r"stages\.0.*p=0.1 in training mode.*eval\(\)"):
        model.inverse(z)
    model.eval().inverse(z)


@pytest.mark.parametrize("channels", [31, 32])
def test_a_representation_of_another_width_is_refused(channels):
    """Asked at https://github.com/jhjacobsen/pytorch-i-revnet/issues/4,
    https://github.com/jhjacobsen/pytorch-i-revnet/issues/9 and
    https://github.com/jhjacobsen/pytorch-i-revnet/issues/17."""
    model = create_model("irevnet13").eval()
    with pytest.raises(ValueError, match=rf"\(2, {channels}, 4, 4\): .* with 128 channels"):
        model.inverse(torch.randn(2, channels, 4, 4))
    with pytest.raises(ValueError, match=r"shape \(2, 10\).*encode.*lost the rest"):
        model.inverse(model(torch.randn(2, 3, 8, 8)))


@pytest.mark.parametrize("z", [None, torch.zeros(2, 128, 4, 4, dtype=torch.int64)])
def test_a_representation_is_a_floating_point_tensor(z):
    with pytest.raises(
        TypeError, match=r"z of .*(None|int64).*: expected the floating-point tensor"
    ):
        create_model("irevnet13").eval().inverse(z)


@pytest.mark.parametrize(
    ("name", "lossy"),
    [("revnet38", "stages.1.steps.0 Transition"), ("resnet32", "stem.steps.0 Stem")],
)
def test_networks_that_lose_information_name_where(name, lossy):
    model = create_model(name, units=(1, 1, 1))
    z = model.encode(torch.randn(1, 3, 8, 8))
    assert z.shape == (1, model.num_features, 2, 2)
    with pytest.raises(NotInvertibleError, match=lossy):
        model.inverse(z)


def test_features_are_the_normalised_representation():
    model, _ = small("grey")
    x = torch.randn(2, 1, 8, 8)
    features = model.eval().forward_features(x)
    assert features.shape == (2, model.num_features, 4, 4)
    assert torch.equal(features, torch.relu(model.norm(model.encode(x))))
    assert torch.equal(model.forward_head(features), model(x))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"channels": (16, 64)}, "expected one value of each per stage"),
        ({"channels": (16, 60, 256)}, "stage 1 receives 128 channels.*cannot have 2x60"),
        ({"channels": (1, 4, 16), "in_chans": 3}, "stage 0 receives 3 channels"),
        ({"channels": None}, "give 3 channels, which cannot be split"),
        ({"strides": (1, 2, 4)}, r"strides=\(1, 2, 4\)"),
        ({"squeeze": 0}, "squeeze=0"),
        ({"bottleneck": 32}, "bottleneck=32: expected at most 16"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"norm": "layer"}, "norm=layer"),
    ],
)
def test_arguments_out_of_range_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        create_model("irevnet163", **keywords)


def test_sizes_that_do_not_squeeze_are_refused():
    with pytest.raises(ValueError, match=r"30 x 32 pixels.*multiples of 4.*data.image_size=32"):
        create_model("irevnet163", **SMALL)(torch.randn(1, 3, 30, 32))


def test_every_variant_has_two_couplings_of_care_after_padding():
    for name, variant in IREVNETS.items():
        with torch.device("meta"):
            model = create_model(name, memory="invert")
        modes = [step.memory for stage in model.stages for step in stage]
        assert modes.count("recompute") == (2 if variant.channels else 0)


@pytest.mark.parametrize(("mode", "limit"), [("invert", 1e-5), ("exact", 0.0)])
def test_the_image_comes_back_though_the_padding_has_no_variance(mode, limit):
    torch.manual_seed(0)
    model = create_model("irevnet13", in_chans=1, memory=mode)
    x = torch.randint(256, (4, 1, 8, 8)) / 256
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0  # the variance of the zeros' channels becomes that of zeros
    with torch.no_grad():
        model(x)
        model.eval()
        assert (model.inverse(model.encode(x)) - x).abs().max() <= limit


def test_a_copy_of_exact_features_loses_one_rounding_alone():
    """Noise in the zeros of the padding was normalised: the image was 1.8 times its size off."""
    model = create_model("irevnet13.digits", pretrained=True, memory="exact").eval()
    x = torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = model.encode(x)
        assert torch.allclose(model.inverse(z.clone()), x, atol=1e-4)
        assert torch.allclose(model.inverse(z + 1e-5 * z.sin()), x, atol=1e-2)


def test_zeros_appended_by_a_stage_of_one_block_are_guarded_in_the_next_stage_too():
    """The second coupling after a padding amplified rounding where it was in another stage."""
    model = create_model("irevnet13", units=(1, 2), memory="invert")
    modes = [m.memory for m in model.modules() if isinstance(m, AdditiveCoupling)]
    assert modes == ["recompute", "recompute", "invert"]


def test_stochastic_depth_in_training_has_no_inverse():
    """Only dropout was refused: the image came back wrong, without an error."""
    model = create_model("irevnet13", drop_path_rate=0.5, memory="exact")
    z = model.encode(torch.zeros(2, 3, 8, 8))
    with pytest.raises(NotInvertibleError, match=r"drop_path drops values with p=.*call eval\(\)"):
        model.inverse(z)
    x = torch.ones(1, 3, 8, 8)
    assert torch.equal(model.eval().inverse(model.encode(x)), x)
