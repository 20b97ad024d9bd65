"""RevCols: formula, parameters, memory modes, feature maps, weights of the release."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from compare import twin
from model_checks import (
    assert_exact_is_near_store,
    assert_features,
    assert_trains_as_stored,
)

import revzoo
from revzoo import NotInvertibleError, set_memory
from revzoo.models import create_model
from revzoo.models.network import ImageSizeError
from revzoo.weights.table import SHIPPED

TINY = {"columns": 3, "widths": (4, 8, 4, 8), "units": (1, 2, 1, 1)}
# columns, width of level 0, blocks: table 11 of the paper
SIZES = {
    "revcol_tiny": (4, 64, (2, 2, 4, 2)),
    "revcol_small": (8, 64, (2, 2, 4, 2)),
    "revcol_base": (16, 72, (1, 1, 3, 2)),
    "revcol_large": (8, 128, (1, 2, 6, 2)),
    "revcol_xlarge": (8, 224, (1, 2, 6, 2)),
    "revcol_huge": (8, 360, (1, 2, 6, 2)),  # the release's models/revcol_huge.py
}


def small(*, gammas=None, **keywords):
    """A network in float64 whose blocks all matter, with ``gammas`` spread over that range."""
    torch.manual_seed(0)
    model = create_model("revcol_tiny", **{**TINY, "num_classes": 5, **keywords}).double()
    for name, p in model.named_parameters():
        if name.endswith("gamma") and p.dim() == 1:  # 1e-6 at first
            torch.nn.init.normal_(p)
        elif name.endswith("gamma") and gammas is not None:
            torch.nn.init.uniform_(p, *gammas)
    return model


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def parameters(columns, width, units, classes=1000):
    """Parameters from the definition, term by term."""
    widths = [width * 2**level for level in range(4)]
    blocks = sum(
        n * (10 * c + 2 * c + 8 * c * c + 5 * c + c) for n, c in zip(units, widths, strict=True)
    )
    pairs = list(itertools.pairwise(widths))
    down = sum(4 * a * b + b + 2 * b for a, b in pairs)
    up = sum(b * a + a + 2 * a for a, b in pairs)
    stem = 3 * 16 * width + width + 2 * width
    column = blocks + down
    later = column + up + sum(widths)  # and gamma
    return stem + column + (columns - 1) * later + 2 * widths[3] + (widths[3] + 1) * classes


@pytest.mark.parametrize("name", SIZES)
def test_parameters_follow_the_definition(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=1000)
    expected = parameters(*SIZES[name])
    if name == "revcol_huge":  # seven upsamplings from the last level to level 0
        expected += 7 * (2880 * 360 + 360 + 2 * 360)
    assert sum(p.numel() for p in model.parameters()) == expected


def norm(x, layer):
    """Over the channels of ``(B, C, H, W)``."""
    centred = x - x.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-6).sqrt()
    return scaled * layer.weight[:, None, None] + layer.bias[:, None, None]


def linear(x, layer):
    return F.conv2d(x, layer.weight[:, :, None, None], layer.bias)


def branch(module, below, above, top):
    x = (
        below
        if isinstance(module.down, torch.nn.Identity)
        else norm(
            F.conv2d(below, module.down[0].weight, module.down[0].bias, stride=2), module.down[1]
        )
    )
    if above is not None:
        y = norm(linear(above, module.up.project), module.up.norm)
        x = x + y.repeat_interleave(2, 2).repeat_interleave(2, 3)
    if above is not None and module.up2 is not None:
        y = norm(linear(top, module.up2.project), module.up2.norm)
        x = x + y.repeat_interleave(8, 2).repeat_interleave(8, 3)
    for block in module.blocks:
        conv = block.dwconv
        y = norm(F.conv2d(x, conv.weight, conv.bias, padding=1, groups=x.shape[1]), block.norm)
        y = linear(F.gelu(linear(y, block.pwconv1)), block.pwconv2)
        x = x + block.gamma[:, None, None] * y
    return x


@pytest.mark.parametrize("huge", [False, True])
def test_a_network_is_its_formula(huge):
    model = small(gammas=(-1.5, 1.5), top_to_bottom=huge).eval()
    assert sum("up2" in key for key in model.state_dict()) == 8 * huge
    set_memory(model, "store")
    x = images(64)
    (stem,) = model.stem
    stem = norm(F.conv2d(x, stem.conv.weight, stem.conv.bias, stride=4), stem.norm)
    levels = []
    for step in model.stages[0]:
        levels.append(branch(step.branch, levels[-1] if levels else stem, None, None))
    for column in list(model.stages)[1:]:
        for i, step in enumerate(column):
            above = levels[i + 1] if i < 3 else None
            value = branch(step.branch, levels[i - 1] if i else stem, above, levels[-1])
            levels[i] = step.gamma * levels[i] + value
    features, maps = model.forward_intermediates(x)
    for found, level in zip(maps, levels, strict=True):
        assert torch.allclose(found, level, rtol=0, atol=1e-11)
    assert torch.equal(features, maps[-1])
    pooled = F.layer_norm(levels[-1].mean((2, 3)), (8,), model.norm.weight, model.norm.bias, 1e-6)
    assert torch.allclose(model.forward_head(features, pre_logits=True), pooled, rtol=0, atol=1e-11)
    expected = pooled @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("gammas", [None, (-0.01, 0.01), (-3, 3)], ids=["half", "small", "large"])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_training_equals_store(mode, gammas):
    model = small(gammas=gammas, drop_path_rate=0.4, top_to_bottom=gammas is None)
    if mode == "invert" and gammas == (-0.01, 0.01):
        # each level divides by gamma and reads levels that the column has divided already
        set_memory(model, mode)
        with pytest.raises(revzoo.DriftError, match="exact"):
            model(images()).sum().backward()
    else:
        assert_trains_as_stored(model, mode, images(), drops=True)


def test_exact_in_float32_is_store_on_the_grid_and_near_it():
    assert_exact_is_near_store(small(gammas=(-1.0, 1.0)).float(), images().float(), tolerance=1e-4)


def test_a_gamma_of_zero_acts_as_the_smallest_and_learns():
    model = small()
    gamma = model.stages[1][0].gamma
    torch.nn.init.zeros_(gamma)
    for mode in ("store", "exact"):
        set_memory(model, mode)
        model.zero_grad()
        loss = model(images()).square().sum()
        loss.backward()
        assert loss.isfinite()
        assert gamma.eq(0).all()
        assert gamma.grad.abs().min() > 0


def test_a_level_beyond_its_range_is_found():
    model = small().eval()
    expected = twin(model, "store")
    torch.nn.init.constant_(model.stages[1][0].gamma, 3e4)
    torch.nn.init.constant_(expected.stages[1][0].gamma, 3e4)
    x = images()
    with torch.no_grad():  # the grid adapts
        assert torch.allclose(model(x), expected(x), rtol=1e-4, atol=1e-6)
        torch.nn.init.constant_(model.stages[1][0].gamma, torch.nan)
        assert model(x).isnan().all()


def test_a_column_keeps_one_bit_for_each_value():
    def kept(mode, columns):
        model = create_model("revcol_tiny", **{**TINY, "columns": columns}, memory=mode)
        return revzoo.audit(model, (2, 3, 64, 64), modes=[]).kept_bytes

    assert 0 < kept("exact", 1) - kept("invert", 1) < 200  # one chain: one state is kept
    growth = {mode: kept(mode, 6) - kept(mode, 3) for mode in ("store", "invert", "exact")}
    values = 3 * 2 * sum(w * (16 >> level) ** 2 for level, w in enumerate(TINY["widths"]))
    assert growth["invert"] == 0
    # and the sums that the guard compares
    assert growth["exact"] == values / 8 + 12 * 8
    assert growth["store"] > 100 * growth["exact"]


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("indices", [(0,), (1,), (0, -1)])
@pytest.mark.parametrize("huge", [False, True])
def test_feature_maps_keep_the_levels_they_read(huge, columns, indices):
    row = {**TINY, "columns": columns, "top_to_bottom": huge}
    assert_features(small(**row).eval(), images(), indices, "revcol_tiny", **row)


@pytest.mark.parametrize("kind", ["avg", "catavgmax", ""])
def test_the_head_normalises_what_it_pooled(kind):
    model = small(num_classes=0, global_pool=kind).eval()
    x = images(64)
    features = model.forward_features(x)
    halves = {"avg": [features.mean((2, 3))], "": [features]}
    parts = halves.get(kind, [features.mean((2, 3)), features.amax((2, 3))])
    expected = [norm(p.view(*p.shape[:2], *(p.shape[2:] or (1, 1))), model.norm) for p in parts]
    assert torch.allclose(model(x), torch.cat(expected, 1).view_as(model(x)))


def test_errors():
    model = small()
    with pytest.raises(ImageSizeError, match="multiples of 32, since this model halves"):
        model(images(48))
    with pytest.raises(NotInvertibleError, match=r"stem\.steps\.0 PlainStem loses"):
        model.inverse(model.encode(images()))
    with pytest.raises(ValueError, match="kernel_size=4: expected an odd number"):
        small(kernel_size=4)
    with pytest.raises(ValueError, match="expected one value of each per stage"):
        small(widths=(4, 8))


def test_a_column_is_inverted():
    model = small(memory="invert")
    before = model.stages[0](model.stem(images()))
    after = model.stages[1](*before)
    back = model.stages[1].inverse(*after)
    assert all(torch.allclose(b, t, rtol=0, atol=1e-12) for b, t in zip(back, before, strict=True))
    (stem,) = [model.stages[0].inverse(*before)]
    assert torch.equal(stem, model.stem(images()))


@pytest.mark.parametrize("head", ["cls_blocks.3", "cls"])
def test_weights_of_the_release_load(head):
    options = {"top_to_bottom": head == "cls"}  # revcol_huge
    model, other = small(**options), small(**options)
    torch.nn.init.normal_(other.fc.weight)
    ours = dict(model.published_keys())
    theirs = {new: old for old, new in ours.items() if old.startswith(head) or "cls" not in old}
    tensors = {}
    for key, t in other.state_dict().items():
        module, _, leaf = key.rpartition(".")
        tensors[theirs[key] if key in theirs else f"{theirs[module]}.{leaf}"] = t
    assert {
        *("stem.0.weight", f"{head}.classifier.1.bias", "subnet2.alpha3"),
        *("subnet0.level1.fusion.down.1.bias", "subnet1.level0.blocks.0.pwconv1.weight"),
        *("subnet1.level2.fusion.up.channel_reschedule.1.weight", "subnet1.level0.blocks.0.gamma"),
    } <= {*tensors}
    tensors["subnet0.alpha0"] = tensors["cls_blocks.1.classifier.1.bias"] = torch.zeros(1)
    model.load_state_dict(model.adapt_state_dict(tensors))
    assert torch.equal(model(images()), other(images()))


def release_shapes(row, classes, head):
    """Names and shapes in the release's file, of models/revcol.py and revcol_huge.py."""
    shapes = {}

    def layer(name, *shape):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    widths = row.widths
    layer("stem.0", widths[0], 3, 4, 4)
    layer("stem.1", widths[0])
    for i, level in itertools.product(range(row.columns), range(4)):
        start, width = f"subnet{i}.level{level}", widths[level]
        shapes[f"subnet{i}.alpha{level}"] = (1, width, 1, 1)
        ups = {"up": widths[level + 1]} if i and level < 3 else {}
        if row.top_to_bottom and i and not level:
            ups["up2"] = widths[3]
        for up, above in ups.items():
            layer(f"{start}.fusion.{up}.channel_reschedule.0", width, above)
            layer(f"{start}.fusion.{up}.channel_reschedule.1", width)
        if level:
            layer(f"{start}.fusion.down.0", width, widths[level - 1], 2, 2)
            layer(f"{start}.fusion.down.1", width)
        for j in range(row.units[level]):
            block = f"{start}.blocks.{j}"
            shapes[f"{block}.gamma"] = (width,)
            layer(f"{block}.dwconv", width, 1, 3, 3)
            layer(f"{block}.norm", width)
            layer(f"{block}.pwconv1", 4 * width, width)
            layer(f"{block}.pwconv2", width, 4 * width)
    for name in [head] if head == "cls" else [f"cls_blocks.{k}" for k in range(4)]:
        layer(f"{name}.classifier.0", widths[3])
        layer(f"{name}.classifier.1", classes, widths[3])
    if head != "cls":
        layer("decoder_blocks.2.projback.1", 3072, widths[3], 1, 1)
    return shapes


@pytest.mark.parametrize("name", SHIPPED.names("revcol_*"))
def test_each_published_file_fits_its_network(name):
    entry = SHIPPED.entries[name]
    head = "cls" if "_in1k" in name else "cls_blocks.3"  # fine-tuned without the other losses
    with torch.device("meta"):
        model = create_model(entry.architecture, num_classes=entry.num_classes)
        shapes = release_shapes(model.variant, entry.num_classes, head)
        tensors = model.adapt_state_dict({key: torch.empty(s) for key, s in shapes.items()})
    own = {key: t.shape for key, t in model.state_dict().items()}
    assert {key: t.shape for key, t in tensors.items()} == own
    assert entry.parameters == pytest.approx(sum(s.numel() for s in own.values()) / 1e6, rel=5e-3)


def test_a_published_file_gives_its_network_by_path(tmp_path):
    """By the tag of a pretraining, with its classes; and with others."""
    row = create_model("revcol_tiny", **TINY).variant
    generator = torch.Generator().manual_seed(0)
    file = {
        key: torch.randn(s, generator=generator)
        for key, s in release_shapes(row, 7, "cls_blocks.3").items()
    }
    torch.save({"model": file, "epoch": 89}, tmp_path / "revcol.pth")
    for classes in (7, 3):
        keywords = {} if classes == 7 else {"num_classes": classes}
        model = create_model(
            "revcol_tiny", **TINY, **keywords, checkpoint_path=tmp_path / "revcol.pth"
        )
        assert model.num_classes == classes
        assert torch.equal(model.stages[2][0].gamma, file["subnet2.alpha0"])
    assert torch.equal(model.norm.weight, file["cls_blocks.3.classifier.0.weight"])
