"""RevBiFPN against its release, written as functions of the release's state dict."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored
from torch import nn

from revzoo import set_memory
from revzoo.core.live import LiveMemory
from revzoo.models import REVBIFPNS, FeatureNet, create_model
from revzoo.models.network import ImageSizeError

SMALL = {
    "channels": (32, 16, 24),
    "head_channels": (16, 8, 16),
    "features": 24,
    "fusions": 1,
    "blocks": 1,
}
PARAMETERS = (3_419_196, 5_112_300, 10_576_528, 19_574_184, 48_687_336, 81_998_976, 142_307_972)


def small(**keywords):
    torch.manual_seed(0)
    defaults = {"in_chans": 2, "drop_rate": 0.0}
    model = create_model("revbifpn_s0", **{**SMALL, **defaults, **keywords}).double()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.running_mean.normal_(std=0.2)
                m.running_var.uniform_(0.5, 2)
                m.weight.uniform_(0.5, 1.5)
                m.bias.normal_(std=0.2)
    return model


def images(batch=2, channels=2, size=32):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, channels, size, size, dtype=torch.float64, generator=generator)


def conv(x, w, name, stride=1, act=True):
    weight = w[f"{name}.conv.weight"]
    groups = len(weight) // weight.shape[1] if weight.shape[1] == 1 else 1
    x = F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=groups)
    norm = (w[f"{name}.norm.{k}"] for k in ("running_mean", "running_var", "weight", "bias"))
    x = F.batch_norm(x, *norm, eps=1e-3)
    return x * (x + 3).clamp(0, 6) / 6 if act else x


def block(x, w, name, stride=1):
    if f"{name}.exp_conv.conv.weight" in w:
        x = conv(x, w, f"{name}.exp_conv")
    x = conv(x, w, f"{name}.dw_conv", stride)
    if f"{name}.se.se.1.weight" in w:
        s = x.mean((2, 3), keepdim=True)
        s = F.conv2d(s, w[f"{name}.se.se.1.weight"], w[f"{name}.se.se.1.bias"])
        s = F.conv2d(F.hardswish(s), w[f"{name}.se.se.3.weight"], w[f"{name}.se.se.3.bias"])
        x = x * ((s + 3).clamp(0, 6) / 6)
    return conv(x, w, f"{name}.project_conv", act=False)


def release(w, x, levels, stages, blocks=1):
    """Pyramid and logits of the release in evaluation mode; ``x`` with copied channels."""
    every = [x[:, :, dy::4, dx::4] for dy in range(4) for dx in range(4)]
    streams, at = [torch.cat(every, dim=1)], 0
    for _ in range(stages):
        for _ in range(blocks):
            at += 1
            for i, y in enumerate(streams):
                a, b = y.chunk(2, dim=1)
                name = f"rev_stack.{at}.rev_transform_{i}"
                b = b + block(a, w, f"{name}.f.xform_0_1")
                a = a + block(b, w, f"{name}.g.xform_0_1")
                streams[i] = torch.cat((a, b), dim=1)
        at += 1
        after = min(levels, len(streams) + 1)
        down = [*streams, 0][:after]
        for i, y in enumerate(streams):
            for j in range(i + 1, after):
                down[j] = down[j] + block(y, w, f"rev_stack.{at}.f.xform_{i}_{j}", 2 ** (j - i))
        streams = list(down)
        for i, y in enumerate(down):
            for j in range(i):
                name = f"rev_stack.{at}.g.xform_{after - 1 - i}_{after - 1 - j}.0"
                value = block(y, w, name)
                streams[j] = streams[j] + F.interpolate(
                    value, scale_factor=2 ** (i - j), mode="bilinear"
                )
    neck = [block(y, w, f"rev_stack.recomp_op.recomp_transform_{i}") for i, y in enumerate(streams)]
    z = neck[0]
    for i, y in enumerate(neck[1:]):
        z = y + block(z, w, f"head.pyramid_heads.{i}", 2)
    pooled = conv(z, w, "head.final_conv").mean((2, 3))
    return streams, pooled @ w["head.fc.weight"].T + w["head.fc.bias"]


def under_their_names(model):
    pairs, state = list(model.published_keys()), model.state_dict()
    found = {
        f"{theirs}{key.removeprefix(ours)}": t
        for theirs, ours in pairs
        for key, t in state.items()
        if key.startswith(f"{ours}.")
    }
    assert len(found) == len(state)
    assert len({theirs for theirs, _ in pairs}) == len({ours for _, ours in pairs}) == len(pairs)
    return found


@pytest.mark.parametrize("levels", [2, 3, 4])
def test_pyramid_and_logits_are_the_published_ones(levels):
    channels, heads = (32, 16, 24, 16)[:levels], (16, 8, 16, 24)[:levels]
    model = small(channels=channels, head_channels=heads, blocks=2).eval()
    x = images()
    maps, logits = release(under_their_names(model), x, levels, levels, blocks=2)
    ours = model.forward_intermediates(x, intermediates_only=True)
    for found, expected in zip(ours, maps, strict=True):
        assert torch.allclose(found, expected, rtol=0, atol=1e-11)
    assert torch.allclose(model(x), logits, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "expected"), [*zip(REVBIFPNS, PARAMETERS, strict=True)])
def test_parameters_match_the_release(name, expected):
    with torch.device("meta"):
        model = create_model(name, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == expected
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    assert {(m.eps, m.momentum) for m in norms} == {(1e-3, 0.1)}


@pytest.mark.parametrize("mode", ["recompute", "offload", "invert", "exact"])
def test_training_equals_store_with_random_drops(mode):
    model = small(drop_path_rate=0.5, drop_rate=0.2)
    assert_trains_as_stored(model, mode, images(4), drops=True, tolerance=1e-11)


def test_rates_of_drops_rise_with_the_stages_and_spare_new_levels():
    model = small(drop_path_rate=0.3)
    found = {n: m.p for n, m in model.named_modules() if n.endswith("drop_path")}
    blocks = [f"block0_{i}_{name}" for i in range(3) for name in "fg"]
    steps = {
        "0": ["up_1_0", *blocks[:2]],
        "1": ["down_0_1", "up_1_0", "up_2_0", "up_2_1", *blocks[:4]],
    }
    steps["2"] = [*steps["1"], "down_0_2", "down_1_2", *blocks[4:]]
    expected = {
        f"stages.{stage}.steps.{step}.branch.drop_path": pytest.approx(0.1 * (int(stage) + 1))
        for stage, names in steps.items()
        for step in names
    }
    assert found == expected


@pytest.mark.parametrize("training", [False, True])
def test_an_exact_network_gives_the_image_back_bit_for_bit(training):
    model = small(in_chans=1, memory="exact").float().train(training)
    x = torch.randint(256, (3, 1, 32, 32)) / 256 - 0.5
    z = model.encode(x)
    assert z.shape == (3, 32 * 16 + 16 * 4 + 24, 2, 2)
    assert torch.equal(model.inverse(z), x)
    with pytest.raises(ValueError, match=r"with 600 channels"):
        model.inverse(z[:, :-1])


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_memory_of_a_training_step_in_depth(mode):
    peaks = []
    for fusions in (1, 4):
        model = small(fusions=fusions, memory=mode).float()
        x = images(4, size=64).float()  # the guard's samples do not count beside larger maps
        model(x).sum().backward()  # allocates the gradients
        with LiveMemory() as memory:
            model(x).sum().backward()
        peaks.append(memory.peak)
    assert (peaks[1] / peaks[0] < 1.1) == (mode in ("invert", "exact"))


@pytest.mark.parametrize("indices", [(0, 1, 2), (2, 0), (1,)])
@pytest.mark.parametrize("mode", ["store", "invert", "exact"])
def test_each_parameter_of_a_backbone_gets_a_gradient(indices, mode):
    whole = small(memory="store").eval()
    x = images()
    every = whole.forward_intermediates(x, intermediates_only=True)
    net = FeatureNet(whole, indices)
    set_memory(net, mode)
    maps = net(x)
    assert net.feature_info.reduction() == [4 * 2**i for i in indices]
    for i, found in zip(indices, maps, strict=True):
        assert torch.allclose(found, every[i], rtol=0, atol=1e-7 if mode == "exact" else 0)
    sum(m.square().sum() for m in maps).backward()
    assert [n for n, p in net.named_parameters() if p.grad is None] == []
    assert {name.split(".")[1] for name, _ in net.named_parameters()} == {"stages"}


def test_an_early_stop_omits_neck_and_head():
    model = small().eval()
    features, maps = model.forward_intermediates(images(), [1])
    assert features.shape == (2, 24, 2, 2)
    assert torch.equal(features, model.forward_features(images()))
    last, maps = model.forward_intermediates(images(), [1], stop_early=True)
    assert last is maps[0]


def test_channels_of_the_image_are_copied():
    grey = create_model("revbifpn_s0", channels=(48, 16), head_channels=(16, 16), in_chans=1)
    colour = create_model("revbifpn_s0", channels=(48, 16), head_channels=(16, 16))
    colour.load_state_dict(grey.state_dict())
    x = torch.randn(2, 1, 16, 16)
    assert torch.equal(grey.eval()(x), colour.eval()(x.expand(2, 3, 16, 16)))


def test_images_of_another_size_are_refused():
    with pytest.raises(ImageSizeError, match=r"40 x 32 .* multiples of 16, .*image_size=(32|48)"):
        small()(torch.randn(1, 2, 40, 32, dtype=torch.float64))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"in_chans": 3}, r"in_chans=3: expected at most 2, .*channels=\(48, \.\.\.\)"),
        ({"channels": (40, 16, 24)}, "channels=.*the first is a multiple of 16"),
        ({"channels": (32, 15, 24)}, "channels=.*even numbers"),
        ({"channels": (32,), "head_channels": (16,)}, "expected 2 to 4"),
        ({"head_channels": (16, 8)}, "expected one value of each"),
        ({"blocks": -1}, "blocks=-1"),
        ({"features": 0}, "features=0"),
        ({"drop_path_rate": 1.0}, "drop_path_rate=1.0"),
        ({"activation": "swish"}, "activation=swish: expected one of .*hardswish"),
        ({"units": 3}, "no keyword 'units'"),
    ],
)
def test_arguments_out_of_range_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        small(**keywords)
