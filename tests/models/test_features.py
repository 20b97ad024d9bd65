"""Feature maps: shapes, gradients in every memory mode, and memory."""

import copy

import pytest
import torch
from compare import error
from small_weights import small

import revzoo
from revzoo.core.live import LiveMemory
from revzoo.core.modes import MODES
from revzoo.models import FeatureNet, create_model

ALL = ("resnet32", "revnet164")


def modes(name):
    return [m for m in MODES if name.startswith("revnet") or m not in ("invert", "exact")]


@pytest.mark.parametrize("name", ALL)
def test_maps_have_the_shapes_that_feature_info_tells(name):
    net = create_model(name, features_only=True, units=(1, 2, 1))
    x = torch.randn(2, 3, 16, 8)
    maps = net(x)
    assert len(maps) == len(net.feature_info) == 3
    for y, channels, reduction in zip(
        maps, net.feature_info.channels(), net.feature_info.reduction(), strict=True
    ):
        assert y.shape == (2, channels, 16 // reduction, 8 // reduction)


def test_feature_info_matches_the_whole_model():
    info = create_model("revnet38").feature_info
    assert [tuple(i) for i in info] == [
        (32, 1, "stages.0"),
        (64, 2, "stages.1"),
        (112, 4, "stages.2"),
    ]
    with torch.device("meta"):
        model = create_model("revnet56")
    assert [i.reduction for i in model.feature_info] == [4, 8, 16, 32]
    assert [i.num_chs for i in model.feature_info] == [512, 1024, 2048, 3328]
    assert all(model.get_submodule(i.module) is not None for i in model.feature_info)


@pytest.mark.parametrize("name", ["resnet32", "revnet38"])
def test_the_last_map_is_what_the_head_normalises(name):
    model = small(name).eval()
    x = torch.randn(2, 3, 8, 8)
    expected = model.forward_features(x)
    norm = copy.deepcopy(model.norm)
    (last,) = FeatureNet(model, (-1,))(x)
    assert torch.equal(norm(last).relu(), expected)


def test_maps_come_in_the_order_asked_for():
    torch.manual_seed(0)
    net = small().eval()
    x = torch.randn(2, 3, 8, 8)
    every = FeatureNet(copy.deepcopy(net))(x)
    chosen = FeatureNet(net, (-1, 0))
    assert chosen.feature_info.channels() == [8, 4]
    for ours, expected in zip(chosen(x), (every[2], every[0]), strict=True):
        assert torch.equal(ours, expected)


def test_nothing_is_left_of_what_comes_after_the_last_map():
    net = FeatureNet(small(), (0,))
    net(torch.randn(2, 3, 8, 8))[0].sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert {name.split(".")[1] for name, _ in net.named_parameters()} == {"stem", "stages"}


@pytest.mark.parametrize("indices", [(), (3,), (-4,), (0, -3), (1.0,)])
def test_indices_that_choose_no_stage_are_refused(indices):
    with pytest.raises(ValueError, match="indices="):
        FeatureNet(small(), indices)


def test_indices_without_features_are_refused():
    with pytest.raises(ValueError, match="features_only=True"):
        create_model("revnet38", out_indices=(0,))


def gradients(net, x, weights):
    x = x.clone().requires_grad_()
    torch.manual_seed(3)
    maps = net(x)
    loss = sum((y * w).sum() for y, w in zip(maps, weights, strict=True))
    return torch.autograd.grad(loss, [x, *net.parameters()]), [y.detach() for y in maps]


@pytest.mark.parametrize(
    ("name", "indices"), [("resnet32", (0, 1, 2)), ("revnet38", (0, 1, 2)), ("revnet164", (1,))]
)
def test_gradients_equal_store_in_every_mode(name, indices):
    keywords = {"stem_width": 8, "widths": (8, 8, 16)}
    net = FeatureNet(small(name, drop_path_rate=0.5, dropout=0.2, **keywords).double(), indices)
    initial = copy.deepcopy(net.state_dict())
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        weights = [torch.randn_like(y) for y in net(x)]
    for mode in modes(name):
        grid = 14 if mode == "exact" else None
        outcomes = []
        for m in ("store", mode):
            revzoo.set_memory(net, m, grid=grid)
            net.load_state_dict(initial)
            found, maps = gradients(net, x, weights)
            outcomes.append((found, maps, [b.clone() for b in net.buffers()]))
        (stored, maps, buffers), (ours, our_maps, our_buffers) = outcomes
        assert all(map(torch.equal, our_maps, maps))
        assert all(map(torch.equal, our_buffers, buffers))
        assert error(ours, stored) <= (0 if mode == "exact" else 1e-12), mode


def kept(mode, indices):
    """Bytes alive after the forward pass, and the bytes of the maps."""
    net = FeatureNet(small(units=(4, 4, 4), memory=mode), indices)
    x = torch.randn(8, 3, 32, 32)
    net(x)
    with LiveMemory() as memory:
        maps = net(x)
        now = memory.now
    return now, sum(y.untyped_storage().nbytes() for y in maps)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_taps_keep_only_the_tapped_maps(mode):
    alone, last = kept(mode, (2,))
    tapped, maps = kept(mode, (0, 1, 2))
    assert maps > last
    assert tapped - alone == maps - last


def test_memory_grows_with_depth_only_in_store():
    def growth(mode):
        x = torch.randn(8, 3, 64, 64)
        found = []
        for units in ((2, 2, 2), (6, 6, 6)):
            net = FeatureNet(small(units=units, memory=mode))
            sum(y.sum() for y in net(x)).backward()  # allocates the gradients
            with LiveMemory() as memory:
                sum(y.sum() for y in net(x)).backward()
            found.append(memory.peak)
        return found[1] / found[0]

    assert growth("store") > 1.8
    assert growth("invert") < 1.05
