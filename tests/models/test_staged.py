"""Behaviour that all staged networks share, on shallow ones."""

import math

import pytest
import torch
from torchvision.ops import StochasticDepth

from revzoo.core.invertible import as_state
from revzoo.core.modes import MODES
from revzoo.core.set_memory import set_memory
from revzoo.models import create_model
from revzoo.models.staged import Stem

NAMES = ("resnet32", "resnet164", "revnet38", "revnet164")
SHALLOW = [pytest.param(name, {"units": (2, 2, 1)}, id=name) for name in NAMES]


def images(batch=2, channels=3, size=8):
    return torch.randn(batch, channels, size, size)


@pytest.mark.parametrize(("name", "keywords"), SHALLOW)
@pytest.mark.parametrize("in_chans", [1, 3, 4])
@pytest.mark.parametrize("num_classes", [1, 100])
def test_logits_and_features(name, keywords, in_chans, num_classes):
    model = create_model(name, in_chans=in_chans, num_classes=num_classes, **keywords)
    x = images(channels=in_chans)
    features = model.forward_features(x)
    assert features.shape == (2, model.num_features, 2, 2)
    assert features.min() >= 0
    assert model.forward_head(features).shape == model(x).shape == (2, num_classes)
    assert (model.in_chans, model.num_classes) == (in_chans, num_classes)


@pytest.mark.parametrize(("name", "keywords"), SHALLOW)
def test_head_pools_and_classifies(name, keywords):
    model = create_model(name, **keywords)
    features = torch.randn(2, model.num_features, 3, 5)
    pooled = model.forward_head(features, pre_logits=True)
    assert torch.allclose(pooled, features.mean((2, 3)), atol=1e-6)
    expected = pooled @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model.forward_head(features), expected, atol=1e-6)


@pytest.mark.parametrize(("name", "keywords"), SHALLOW)
def test_evaluation_is_deterministic_and_treats_images_alone(name, keywords):
    model = create_model(name, drop_rate=0.5, dropout=0.5, **keywords)
    x = images(4)
    training = model(x)
    assert not torch.equal(training, model(x))
    model.eval()
    logits = model(x)
    assert torch.equal(logits, model(x))
    assert torch.allclose(logits[:1], model(x[:1]), atol=1e-5)


@pytest.mark.parametrize(("name", "keywords"), SHALLOW)
def test_gradients_reach_every_parameter(name, keywords):
    model = create_model(name, **keywords)
    torch.nn.functional.cross_entropy(model(images(4)), torch.arange(4)).backward()
    silent = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


@pytest.mark.parametrize(("name", "keywords"), SHALLOW)
def test_memory_modes_have_one_state_dict_and_one_gradient(name, keywords):
    model = create_model(name, dropout=0.2, drop_rate=0.2, **keywords).double()
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    x, labels = images(4).double(), torch.arange(4)
    outcomes = {}
    reversible = name.startswith("revnet")
    for mode in set(MODES) - {"exact"} - (set() if reversible else {"invert"}):
        set_memory(model, mode)
        model.load_state_dict(initial)
        torch.manual_seed(7)
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        outcomes[mode] = (
            gradients,
            {key: buffer.clone() for key, buffer in model.named_buffers()},
            list(model.state_dict()),
        )
    stored, buffers, keys = outcomes.pop("store")
    assert any(not torch.equal(b, initial[key]) for key, b in buffers.items())
    for gradients, other_buffers, other_keys in outcomes.values():
        assert other_keys == keys
        assert all(torch.equal(b, buffers[key]) for key, b in other_buffers.items())
        for ours, reference in zip(gradients, stored, strict=True):
            assert (ours - reference).abs().max() <= 1e-10 * reference.abs().max()


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


def test_images_of_other_channels_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"1 channels: expected 3.*in_chans=1"):
        create_model("revnet38")(images(channels=1))


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 1, 3, 8, 8)])
def test_tensors_that_are_not_a_batch_of_images_are_refused(shape):
    with pytest.raises(ValueError, match=r"expected \(B, 3, H, W\)"):
        create_model("revnet38")(torch.randn(shape))


@pytest.mark.parametrize("size", [(6, 8), (8, 9), (2, 2), (0, 8)])
@pytest.mark.parametrize("name", ["revnet38", "resnet32"])
def test_sizes_that_pooling_shortcuts_cannot_halve_are_refused(name, size):
    with pytest.raises(ValueError, match=rf"{size[0]} x {size[1]} pixels.*multiples of 4"):
        create_model(name)(torch.randn(1, 3, *size))


@pytest.mark.parametrize("name", ["revnet164", "resnet164"])
def test_projecting_shortcuts_take_odd_sizes(name):
    model = create_model(name, units=(1, 1, 1)).eval()
    assert model.forward_features(torch.randn(1, 3, 7, 9)).shape[2:] == (2, 3)


def test_drop_path_rate_reaches_both_branches_of_every_unit():
    model = create_model("revnet38", units=(1, 1, 1), drop_path_rate=0.4)
    rates = [m.p for m in model.modules() if isinstance(m, StochasticDepth)]
    assert rates == [0.2, 0.2, 0.4, 0.4]  # the first unit drops nothing
    assert (
        model.state_dict().keys() == create_model("revnet38", units=(1, 1, 1)).state_dict().keys()
    )


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("out_streams", [1, 2])
def test_streams_share_the_channels(in_chans, out_streams):
    stem = Stem(in_chans, channels=8, out_streams=out_streams, downsample=False)
    streams = as_state(stem(torch.randn(2, in_chans, 6, 6)))
    assert [s.shape for s in streams] == [(2, 8 // out_streams, 6, 6)] * out_streams


def test_streams_are_the_halves_of_the_normalised_activation():
    stem = Stem(3, channels=8, out_streams=2, downsample=False).eval()
    stem.norm.running_mean.normal_()
    x = torch.randn(2, 3, 6, 6)
    expected = torch.relu(stem.norm(stem.conv(x)))
    x1, x2 = stem(x)
    assert torch.equal(x1, expected[:, :4])
    assert torch.equal(x2, expected[:, 4:])
    assert expected.min() == 0 < expected.max()


@pytest.mark.parametrize(("size", "expected"), [(32, 8), (33, 9)])
def test_the_imagenet_stem_quarters_the_size(size, expected):
    stem = Stem(3, channels=8, out_streams=2, downsample=True)
    assert stem.conv.kernel_size == (7, 7)
    assert stem(torch.randn(1, 3, size, size))[0].shape == (1, 4, expected, expected)
