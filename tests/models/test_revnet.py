"""RevNets and ResNets: tables, units, stages, memory modes, errors."""

import math

import pytest
import torch
from compare import error
from model_checks import assert_trains_as_stored
from torch import nn
from torchvision.ops import StochasticDepth

from revzoo import ReversibleBlock, set_memory
from revzoo.core.invertible import as_state
from revzoo.core.modes import MODES
from revzoo.models import RESNETS, REVNETS, RevNet, Variant, create_model
from revzoo.models.revnet import (
    ResidualUnit,
    Stem,
    Transition,
    UnitPlan,
    branch,
    shortcut,
)

# For 10 and 100 classes: counts of the release of arXiv 1707.04585, and of MemCNN 1.5.2.
CIFAR = {
    "resnet32": (464_154, 470_004),
    "resnet56": (853_018, 858_868),
    "resnet110": (1_727_962, 1_733_812),
    "resnet164": (1_703_258, 1_726_388),
    "revnet38": (464_890, 475_060),
    "revnet110": (1_729_194, 1_740_804),
    "revnet164": (1_748_778, 1_794_948),
    "resnet32_memcnn": (466_906, 472_756),
    "resnet110_memcnn": (1_730_714, 1_736_564),
    "resnet164_memcnn": (1_704_154, 1_727_284),
    "revnet38_memcnn": (573_994, 584_164),
    "revnet110_memcnn": (1_854_890, 1_866_500),
    "revnet164_memcnn": (1_983_786, 2_029_956),
}
IMAGENET = {"revnet56": 27_553_128, "revnet104": 45_428_072}
SMALL = {"stem_width": 8, "widths": (8, 16), "units": (2, 1), "strides": (1, 2)}
NAMES = ("resnet32", "resnet164", "revnet38", "revnet164")


def small(name, **keywords):
    return create_model(name, units=(2, 2, 1), **keywords)


def images(batch=2, channels=3, size=8):
    return torch.randn(batch, channels, size, size)


def counts(name, *classes):
    with torch.device("meta"):
        model = create_model(name)
        found = []
        for num_classes in classes:
            model.reset_classifier(num_classes)
            found.append(sum(p.numel() for p in model.parameters()))
    return tuple(found)


def imagenet_count(units):
    """Parameters of a pre-activation bottleneck ResNet with 1000 classes, term by term."""
    total = 3 * 64 * 49 + 2 * 64  # stem
    width = 64
    for inner, depth in zip((64, 128, 256, 512), units, strict=True):
        total += width * 4 * inner  # projection
        for _ in range(depth):
            convolutions = width * inner + 9 * inner**2 + inner * 4 * inner
            total += convolutions + 2 * (width + inner + inner)
            width = 4 * inner
    total -= 2 * 64  # the first unit has no leading normalisation
    return total + 2 * width + 1000 * (width + 1)


def test_parameters_of_all_variants():
    expected = IMAGENET | {
        "resnet50": imagenet_count((3, 4, 6, 3)),
        "resnet101": imagenet_count((3, 4, 23, 3)),
    }
    assert {name: counts(name, 1000)[0] for name in expected} == expected
    assert {name: counts(name, 10, 100) for name in CIFAR} == CIFAR
    assert CIFAR.keys() | expected.keys() == RESNETS.keys() | REVNETS.keys()


def test_plans_change_width_and_stride_at_the_first_unit_of_a_stage():
    plans = Variant(**SMALL).stages(dropout=0.1)
    assert plans == [
        [UnitPlan(8, 8, 1, "basic", False, 0.1), UnitPlan(8, 8, 1, "basic", True, 0.1)],
        [UnitPlan(8, 16, 2, "basic", True, 0.1)],
    ]
    first, *_ = Variant(**SMALL, branch="bottleneck").stages()[0]
    assert (first.in_channels, first.out_channels) == (8, 32)
    plans = Variant(**SMALL).stages(drop_path_rate=0.4)
    assert [[plan.drop_path for plan in stage] for stage in plans] == [[0.0, 0.2], [0.4]]


def test_a_unit_keeps_its_shape_only_at_stride_one_and_equal_width():
    plans = (
        UnitPlan(8, out, stride, "basic", True, 0.0) for out, stride in ((8, 1), (8, 2), (9, 1))
    )
    assert [plan.keeps_shape for plan in plans] == [True, False, False]


def test_streams_of_odd_widths_are_refused():
    with pytest.raises(ValueError, match=r"32 to 65 channels: expected even numbers"):
        create_model("revnet38", widths=(32, 65, 112))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": (1,)}, "expected one value of each per stage"),
        ({"units": (1, 0)}, r"units=\(1, 0\)"),
        ({"units": 3}, "units=3"),
        ({"widths": (8.0, 16.0)}, "widths="),
        ({"strides": ()}, r"strides=\(\)"),
        ({"stem_width": 0}, "stem_width=0"),
        ({"branch": "plain"}, "plain.*basic, bottleneck"),
    ],
)
def test_fields_out_of_range_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Variant(**{**SMALL, **change})


@pytest.mark.parametrize(
    ("change", "multiple"),
    [({}, 2), ({"branch": "bottleneck"}, 1), ({"downsampling_stem": True}, 8)],
)
def test_only_pooling_shortcuts_restrict_the_image_size(change, multiple):
    assert Variant(**SMALL, **change).size_multiple == multiple


class Affine(nn.Module):
    """``scale * x + shift``, which distinguishes the terms of a formula."""

    def __init__(self, scale: float, shift: float) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def forward(self, x):
        return self.scale * x + self.shift


def test_units_follow_their_formulas():
    unit = ResidualUnit(Affine(2, 1), shortcut=Affine(10, 0))
    assert unit(torch.tensor(3.0)).item() == 30 + 7
    transition = Transition(Affine(2, 1), g=Affine(3, 5), shortcuts=(Affine(10, 0), Affine(100, 0)))
    y1, y2 = transition(torch.tensor(1.0), torch.tensor(2.0))
    assert y1.item() == 10 * 1 + (2 * 2 + 1)
    assert y2.item() == 100 * 2 + (3 * 15 + 5)
    assert not transition.invertible
    assert not unit.invertible


def test_a_branch_is_built_as_planned():
    f = branch(UnitPlan(8, 16, 2, "bottleneck", False, 0.2))
    assert f(torch.randn(2, 8, 4, 4)).shape == (2, 16, 2, 2)
    assert next(name for name, _ in f.named_children()) == "conv1"
    assert f.dropout3.p == 0.2
    assert [f.conv1.stride, f.conv2.stride, f.conv3.stride] == [(2, 2), (1, 1), (1, 1)]


def test_inner_width_of_a_bottleneck_is_a_quarter_of_its_output():
    f = branch(UnitPlan(8, 64, 1, "bottleneck", True, 0.0))
    widths = [(m.in_channels, m.out_channels) for m in f if isinstance(m, nn.Conv2d)]
    assert widths == [(8, 16), (16, 16), (16, 64)]
    for out in (6, 0):
        with pytest.raises(ValueError, match=f"out_channels={out}.*multiple of 4"):
            branch(UnitPlan(8, out, 1, "bottleneck", True, 0.0))


def test_pooling_averages_windows_and_pads_channels_evenly():
    x = torch.arange(16.0).view(1, 1, 4, 4)
    y = shortcut(UnitPlan(1, 5, 2, "basic", True, 0.0))(x)
    means = torch.tensor([[2.5, 4.5], [10.5, 12.5]])
    zeros = torch.zeros(2, 2)
    assert torch.equal(y, torch.stack([zeros, zeros, means, zeros, zeros])[None])
    y = shortcut(UnitPlan(1, 4, 1, "basic", True, 0.0))(torch.ones(1, 1, 1, 1))
    assert y.flatten().tolist() == [0.0, 1.0, 0.0, 0.0]  # the extra one is the last
    with pytest.raises(ValueError, match=r"out_channels=6: .* in_channels=8.*bottleneck"):
        shortcut(UnitPlan(8, 6, 1, "basic", True, 0.0))


@pytest.mark.parametrize(("width", "stride"), [(16, 1), (8, 2)])
def test_kinds_of_shortcut(width, stride):
    pool = shortcut(UnitPlan(8, width, stride, "basic", True, 0.0))
    projection = shortcut(UnitPlan(8, width, stride, "bottleneck", True, 0.0))
    assert list(pool.state_dict()) == []
    assert {k: v.shape for k, v in projection.state_dict().items()} == {"weight": (width, 8, 1, 1)}
    x = torch.randn(2, 8, 4, 4)
    assert pool(x).shape == projection(x).shape == (2, width, 4 // stride, 4 // stride)
    assert isinstance(shortcut(UnitPlan(8, 8, 1, "basic", True, 0.0)), nn.Identity)


def test_streams_are_the_halves_of_the_normalised_activation():
    stem = Stem(3, channels=8, out_streams=2, downsample=False).eval()
    stem.norm.running_mean.normal_()
    x = torch.randn(2, 3, 6, 6)
    expected = torch.relu(stem.norm(stem.conv(x)))
    assert torch.equal(torch.cat(stem(x), 1), expected)
    assert expected.min() == 0 < expected.max()
    (alone,) = as_state(Stem(1, channels=8, out_streams=1, downsample=False)(x[:, :1]))
    assert alone.shape == expected.shape


@pytest.mark.parametrize(("size", "expected"), [(32, 8), (33, 9)])
def test_the_imagenet_stem_quarters_the_size(size, expected):
    stem = Stem(3, channels=8, out_streams=2, downsample=True)
    assert stem.conv.kernel_size == (7, 7)
    assert stem(torch.randn(1, 3, size, size))[0].shape == (1, 4, expected, expected)


@pytest.mark.parametrize(
    ("name", "transitions"),
    [("revnet38", {(1, 0), (2, 0)}), ("revnet164", {(0, 0), (1, 0), (2, 0)})],
)
def test_only_units_that_change_shape_lack_an_inverse(name, transitions):
    found = set()
    for i, stage in enumerate(create_model(name).stages):
        for j, unit in enumerate(stage):
            assert isinstance(unit, Transition if (i, j) in transitions else ReversibleBlock)
            if not unit.invertible:
                found.add((i, j))
    assert found == transitions


def test_only_the_very_first_branch_skips_its_activation():
    keys = [
        k for k in small("revnet164").state_dict() if k.endswith(("norm1.weight", "conv1.weight"))
    ]
    branches = [key.rpartition(".")[0].rpartition(".")[0] for key in keys]
    assert [b for b in dict.fromkeys(branches) if branches.count(b) == 1] == branches[:1]
    assert len(set(branches)) == 10


def test_stages_are_inverted_from_their_outputs():
    torch.manual_seed(0)
    stage = create_model("revnet38").double().eval().stages[0]
    x = torch.randn(2, 16, 8, 8, dtype=torch.float64), torch.randn(2, 16, 8, 8, dtype=torch.float64)
    y = stage(*x)
    for inverted, original in zip(stage.inverse(*y), x, strict=True):
        assert torch.allclose(inverted, original, rtol=0, atol=1e-12)
    assert not torch.allclose(y[0], x[0])


@pytest.mark.parametrize(("name", "width"), [("resnet50", 2048), ("revnet56", 3328)])
def test_imagenet_variants_reduce_the_image_32_fold(name, width):
    with torch.device("meta"):
        model = create_model(name, units=(1, 1, 1, 1), memory="store")
        assert model.forward_features(torch.randn(1, 3, 65, 64)).shape == (1, width, 3, 2)


def test_a_variant_can_be_built_without_the_registry():
    model = RevNet(REVNETS["revnet38"], num_classes=3, memory="store")
    assert model(torch.randn(1, 3, 8, 8).expand(2, -1, -1, -1)).shape == (2, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_network_classifies_normalised_pooled_features(name):
    model = small(name, in_chans=4, num_classes=7)
    x = images(4, channels=4)
    features = model.forward_features(x)
    assert features.shape == (4, model.num_features, 2, 2)
    assert features.min() >= 0
    pooled = model.forward_head(features, pre_logits=True)
    assert torch.allclose(pooled, features.mean((2, 3)), atol=1e-6)
    expected = pooled @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model.forward_head(features), expected, atol=1e-6)
    torch.nn.functional.cross_entropy(model(x), torch.arange(4)).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_evaluation_is_deterministic_and_treats_images_alone():
    model = small("revnet38", drop_rate=0.5, dropout=0.5)
    x = images(4)
    assert not torch.equal(model(x), model(x))
    model.eval()
    logits = model(x)
    assert torch.equal(logits, model(x))
    assert torch.allclose(logits[:1], model(x[:1]), atol=1e-5)


@pytest.mark.parametrize("name", ["resnet164", "revnet38"])
def test_memory_modes_have_one_state_dict_and_one_gradient(name):
    model = small(name, dropout=0.2, drop_rate=0.2, drop_path_rate=0.2).double()
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    x, labels = images(4).double(), torch.arange(4)
    outcomes = {}
    reversible = name.startswith("revnet")
    for mode in set(MODES) - {"exact"} - (set() if reversible else {"invert"}):
        set_memory(model, mode)
        model.load_state_dict(initial)
        torch.manual_seed(7)
        for _ in range(2):  # without updates the inputs of all branches are equal
            loss = torch.nn.functional.cross_entropy(model(x), labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        outcomes[mode] = gradients, buffers, list(model.state_dict())
    stored, buffers, keys = outcomes.pop("store")
    assert any(not torch.equal(b, initial[key]) for key, b in buffers.items())
    assert buffers["stem.steps.0.norm.num_batches_tracked"] == 2
    for gradients, other_buffers, other_keys in outcomes.values():
        assert other_keys == keys
        assert all(torch.equal(b, buffers[key]) for key, b in other_buffers.items())
        assert error(gradients, stored) <= 1e-10


@pytest.mark.parametrize(("branch", "mode"), [("basic", "exact"), ("bottleneck", "invert")])
def test_memcnns_transitions_train_as_stored(branch, mode):
    torch.manual_seed(0)
    model = small("revnet38_memcnn", branch=branch, memory="store").double()
    x = torch.randn(4, 3, 9, 10, dtype=torch.float64)
    assert_trains_as_stored(model, mode, x, tolerance=1e-10)


def test_default_and_chosen_memory_modes():
    def modes(model):
        return {m.memory for m in model.modules() if hasattr(m, "memory")}

    assert modes(create_model("revnet38")) == {"exact"}
    assert modes(create_model("resnet32")) == {"store"}
    assert modes(create_model("revnet38", memory="recompute")) == {"recompute"}


def test_a_revnet_of_transitions_alone_works_by_default_and_refuses_an_explicit_invert():
    create_model("revnet164", units=(1, 1, 1))(images()).sum().backward()
    with pytest.raises(ValueError, match="RevNet has no invertible step"):
        create_model("revnet164", units=(1, 1, 1), memory="invert")


def test_nothing_to_invert_in_a_resnet():
    with pytest.raises(ValueError, match="ResNet has no invertible step"):
        create_model("resnet32", memory="invert")
    model = create_model("resnet32")
    with pytest.raises(ValueError, match="ResNet has no invertible step"):
        set_memory(model, "invert")


@pytest.mark.parametrize(
    ("name", "norm"), [("revnet38", "group"), ("revnet164_memcnn", "none"), ("irevnet163", "group")]
)
def test_normalisation_and_activation_are_chosen_by_keyword(name, norm):
    model = create_model(name, units=(2, 1, 1), norm=norm, activation="silu")
    kinds = {type(m) for m in model.modules()}
    assert (nn.GroupNorm in kinds) is (norm == "group")
    assert not kinds & {nn.BatchNorm2d, nn.ReLU}
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_classifier_starts_uniform_with_variance_one_over_fan_in():
    torch.manual_seed(0)
    fc = create_model("revnet38", num_classes=1000).fc
    assert fc.weight.var().item() == pytest.approx(1 / fc.in_features, rel=0.02)
    assert fc.weight.abs().max().item() == pytest.approx(math.sqrt(3 / fc.in_features), rel=1e-3)
    assert not fc.bias.any()


def test_resetting_the_classifier_changes_it_alone():
    model = create_model("revnet38").double().eval()
    before = {key: v.clone() for key, v in model.state_dict().items() if "fc" not in key}
    model.reset_classifier(7)
    assert model.num_classes == 7
    assert model(images().double()).shape == (2, 7)
    assert model.fc.weight.dtype == torch.float64
    assert not model.fc.training
    after = model.state_dict()
    assert len(after) == len(before) + 2
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_drop_rate_drops_pooled_features_only_in_training():
    model = create_model("revnet38", drop_rate=0.5)
    features = torch.ones(64, model.num_features, 2, 2)
    dropped = (model.forward_head(features, pre_logits=True) == 0).float().mean().item()
    assert dropped == pytest.approx(0.5, abs=0.05)
    assert (model.eval().forward_head(features, pre_logits=True) == 1).all()


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"num_classes": -1}, "num_classes=-1"),
        ({"in_chans": -1}, "in_chans=-1"),
        ({"drop_rate": 1.0}, "drop_rate=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"memory": "inverted"}, "'inverted'.*'store'.*'invert'"),
    ],
)
def test_arguments_out_of_range_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        create_model("revnet38", **keywords)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, 1, 8, 8), r"1 channels: expected 3.*in_chans=1"),
        ((3, 8, 8), r"\(3, 8, 8\): expected \(B, 3, H, W\).*unsqueeze"),
        ((1, 3, 6, 8), r"6 x 8 pixels.*multiples of 4"),
        ((1, 3, 0, 8), r"0 x 8 pixels.*multiples of 4"),
    ],
)
def test_images_that_do_not_fit_are_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        create_model("revnet38", units=(1, 1, 1))(torch.randn(shape))


def test_projecting_shortcuts_take_odd_sizes():
    model = create_model("revnet164", units=(1, 1, 1)).eval()
    assert model.forward_features(torch.randn(1, 3, 7, 9)).shape[2:] == (2, 3)


def test_drop_path_rate_reaches_both_branches_of_every_unit():
    plain, model = (create_model("revnet38", units=(1, 1, 1), drop_path_rate=r) for r in (0, 0.4))
    rates = [m.p for m in model.modules() if isinstance(m, StochasticDepth)]
    assert rates == [0.2, 0.2, 0.4, 0.4]  # the first unit drops nothing
    assert model.state_dict().keys() == plain.state_dict().keys()
