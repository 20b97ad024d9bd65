"""timm's interface: headless models, pooling, intermediates, error messages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import error
from PIL import Image
from small_weights import FACTS, small, write_entry
from torch import nn

from revzoo import set_memory
from revzoo.models import FeatureNet, ImageNetwork, create_model
from revzoo.weights.table import WeightsTable

VIT = {"width": 8, "depth": 3, "heads": 2, "img_size": 8, "patch_size": 4}
PYRAMID = {"channels": (48, 16), "head_channels": (16, 24), "features": 32, "blocks": 1}
MULTISCALE = {"width": 4, "units": (1, 1), "img_size": 8}
IREVNET = {"units": (1, 2), "strides": (1, 2), "channels": (4, 16), "bottleneck": 2}


SMALL: dict[str, dict[str, Any]] = {
    "irevnet13": IREVNET,
    "revvit_cifar": VIT,
    "revbifpn_s0": PYRAMID,
    "revmvit_base": MULTISCALE,
}


def network(name: str, **keywords: Any) -> ImageNetwork:
    torch.manual_seed(0)
    if name in SMALL:
        return create_model(name, **SMALL[name], **keywords)
    return small(name, **keywords)


NAMES = ["resnet32", "revnet38", *SMALL]
POOLED = {
    "avg": lambda f, places: f.mean(places),
    "max": lambda f, places: f.amax(places),
    "avgmax": lambda f, places: (f.mean(places) + f.amax(places)) / 2,
    "catavgmax": lambda f, places: torch.cat([f.mean(places), f.amax(places)], 1),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*(("revnet38", kind) for kind in POOLED), *((name, "catavgmax") for name in NAMES)],
)
def test_the_head_classifies_what_global_pool_gives(name: str, kind: str) -> None:
    model = network(name, global_pool=kind).eval()
    x = torch.randn(2, 3, 8, 8)
    features = model.forward_features(x)
    pooled = POOLED[kind](features, (1,) if features.dim() == 3 else (2, 3))
    assert torch.equal(model.forward_head(features, pre_logits=True), pooled)
    assert torch.allclose(model(x), model.get_classifier()(pooled))


@pytest.mark.parametrize("name", NAMES)
def test_without_classes_a_model_gives_its_features(name: str) -> None:
    whole, headless = network(name).eval(), network(name, num_classes=0).eval()
    whole.load_state_dict(headless.state_dict(), strict=False)
    x = torch.randn(2, 3, 8, 8)
    features = whole.forward_features(x)
    assert isinstance(headless.get_classifier(), nn.Identity)
    assert torch.equal(headless(x), whole.forward_head(features, pre_logits=True))
    assert headless(x).shape == (2, headless.num_features)
    headless.reset_classifier(0, "")
    assert torch.equal(headless(x), features)


def test_unpooled_features_cannot_be_classified() -> None:
    with pytest.raises(ValueError, match=r"global_pool='' with num_classes=5.*num_classes=0"):
        small(global_pool="")
    with pytest.raises(ValueError, match="global_pool=mean: expected one of avg, max"):
        small(global_pool="mean")


def test_another_pooling_is_saved_with_the_network(tmp_path: Any) -> None:
    model = small()
    model.reset_classifier(3, "catavgmax")
    model.save_pretrained(tmp_path, classes=tuple("abc"))
    again = create_model(tmp_path, pretrained=True).eval()
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(again(x), model.eval()(x))


def test_weights_load_without_their_classifier(tmp_path: Any) -> None:
    write_entry(tmp_path)
    table = WeightsTable(tmp_path)
    whole = create_model("revnet38", pretrained=True, table=table).eval()
    headless = create_model("revnet38", pretrained=True, table=table, num_classes=0).eval()
    x = torch.randn(2, 3, 8, 8)
    features = whole.forward_head(whole.forward_features(x), pre_logits=True)
    assert torch.equal(headless(x), features)


@pytest.mark.parametrize("name", NAMES)
def test_intermediates_are_the_feature_maps_and_the_features(name: str) -> None:
    model = network(name).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model.forward_features(x)
    features, maps = model.forward_intermediates(x)
    assert torch.equal(features, expected)
    of = model.forward_intermediates(x, intermediates_only=True)
    assert all(map(torch.equal, maps, of))
    for info, found in zip(model.feature_info, maps, strict=True):
        assert found.shape == (2, info.num_chs, 8 // info.reduction, 8 // info.reduction)
    for found, by_net in zip(maps, FeatureNet(model)(x), strict=True):
        assert torch.equal(found, by_net)


@pytest.mark.parametrize(
    ("indices", "taken"), [(None, (0, 1, 2)), (2, (1, 2)), ([0, -1], (0, 2)), ((2, 0), (0, 2))]
)
def test_indices_follow_timm(indices: Any, taken: tuple[int, ...]) -> None:
    """A number n selects the last n; maps come in the network's order, in any order of indices."""
    model = small().eval()
    x = torch.randn(2, 3, 8, 8)
    every = model.forward_intermediates(x, intermediates_only=True)
    found = model.forward_intermediates(x, indices, intermediates_only=True)
    assert len(found) == len(taken)
    assert all(torch.equal(f, every[i]) for f, i in zip(found, taken, strict=True))


@pytest.mark.parametrize("indices", [0, 4, [], [3], [-4], [1.0], True])
def test_indices_without_a_map_are_refused(indices: Any) -> None:
    with pytest.raises(ValueError, match="this model has 3 feature maps"):
        small().forward_intermediates(torch.randn(1, 3, 8, 8), indices)


def test_the_norm_applies_where_it_fits() -> None:
    model = small().eval()
    x = torch.randn(2, 3, 8, 8)
    plain = model.forward_intermediates(x, intermediates_only=True)
    features, normed = model.forward_intermediates(x, norm=True)
    assert torch.equal(normed[-1], features)
    assert all(map(torch.equal, plain[:-1], normed[:-1]))
    vit = network("revvit_cifar").eval()
    _, tokens = vit.forward_intermediates(x, output_fmt="NLC")
    _, normed = vit.forward_intermediates(x, norm=True, output_fmt="NLC")
    assert all(torch.equal(vit.norm(t), n) for t, n in zip(tokens, normed, strict=True))


def test_nothing_is_computed_after_an_early_stop() -> None:
    model = small().eval()
    ran: list[int] = []
    for i, stage in enumerate(model.stages):
        stage[0].register_forward_hook(lambda *_, i=i: ran.append(i))
    last, maps = model.forward_intermediates(torch.randn(1, 3, 8, 8), [0], stop_early=True)
    assert ran == [0]
    assert torch.equal(last, maps[0])
    model.forward_intermediates(torch.randn(1, 3, 8, 8), [0])
    assert ran == [0, 0, 1, 2]


def test_formats_are_checked() -> None:
    with pytest.raises(ValueError, match="output_fmt=NLC: expected one of NCHW"):
        small().forward_intermediates(torch.randn(1, 3, 8, 8), output_fmt="NLC")


@pytest.mark.parametrize("memory", ["invert", "exact"])
def test_gradients_enter_at_every_block_of_a_transformer(memory: str) -> None:
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    found = []
    for mode in ("store", memory):
        model = network("revvit_cifar").double()
        set_memory(model, mode, grid=14 if memory == "exact" else None)
        features, maps = model.forward_intermediates(x, [0, 1])
        sum((m.square().sum() for m in maps), features.square().sum()).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) > 10
    assert error(found[1], found[0]) <= (0 if memory == "exact" else 1e-12)


def test_positions_are_resized_to_another_image_size(tmp_path: Any) -> None:
    """A smooth field keeps its values when it is sampled more densely; it was refused."""
    small_model = network("revvit_cifar", num_classes=5)
    with torch.no_grad():
        ramp = torch.linspace(-0.25, 1.25, 6)[1:5:3]  # 2 places a side
        field = ramp[:, None, None].expand(2, 2, 8)
        small_model.stem[0].positions.copy_(field.reshape(1, 4, 8))
    small_model.save_pretrained(tmp_path)
    large = create_model(tmp_path, pretrained=True, img_size=16)
    found = large.stem[0].positions.detach().reshape(4, 4, 8)
    assert torch.allclose(found.mean((0, 1)), field.mean((0, 1)), atol=1e-6)
    assert torch.allclose(found[:, :1].expand_as(found), found)  # equal along a row
    assert (found[1:, 0, 0] > found[:-1, 0, 0]).all()
    assert torch.equal(large.fc.weight, small_model.fc.weight)
    assert large(torch.randn(1, 3, 16, 16)).shape == (1, 5)


@pytest.mark.parametrize("given", [Image.new("RGB", (8, 8)), [1.0]])
def test_inputs_that_are_not_a_tensor_are_refused_by_type(given: Any) -> None:
    kind = type(given).__name__
    with pytest.raises(TypeError, match=rf"type .*{kind}: .* model\.transforms\(\)\(image\)"):
        small()(given)


def test_transforms_match_the_weights(tmp_path: Any) -> None:
    write_entry(tmp_path, crop_pct=0.5)
    model = create_model("revnet38", pretrained=True, table=WeightsTable(tmp_path))
    pixels = torch.arange(3 * 16 * 16, dtype=torch.uint8).reshape(3, 16, 16) // 4
    mean, std = (torch.tensor(FACTS[name]).view(3, 1, 1) for name in ("mean", "std"))
    expected = (pixels[:, 4:12, 4:12] / 255 - mean) / std  # 16 = 8 / 0.5: nothing to resize
    transforms = model.transforms()
    assert torch.allclose(transforms(pixels), expected, atol=1e-6)
    assert torch.allclose(transforms(pixels[None] / 255)[0], expected, atol=1e-6)
    image = Image.fromarray(pixels.permute(1, 2, 0).numpy()).convert("RGBA")
    assert torch.allclose(transforms(image), expected, atol=1e-6)
    assert type(transforms(image)) is torch.Tensor
    assert model.transforms(12)(pixels).shape == (3, 12, 12)


def test_transforms_need_weights() -> None:
    with pytest.raises(ValueError, match=r"images are unknown: .*save_pretrained\(FOLDER, classes"):
        small().transforms()


def test_transforms_are_not_of_other_channels(tmp_path: Any) -> None:
    write_entry(tmp_path)
    model = create_model("revnet38", pretrained=True, table=WeightsTable(tmp_path), in_chans=1)
    with pytest.raises(ValueError, match="takes 1 channels, its weights were trained on 3"):
        model.transforms()


def test_autocast_takes_images_of_a_wider_type():
    model = small(norm="none").bfloat16()  # torch's norms take no float32 on bfloat16 weights
    with torch.autocast("cpu", torch.bfloat16):
        assert model(torch.randn(2, 3, 8, 8)).isfinite().all()


def test_images_with_the_channels_last():
    with pytest.raises(ValueError, match=r"\(2, 32, 32, 3\): .*channels first, x.permute"):
        create_model("revnet38")(torch.rand(2, 32, 32, 3))
