"""Reversible multiscale ViTs: formula, parameters, memory modes, maps, weights of the release."""

import pytest
import torch
import torch.nn.functional as F
from model_checks import (
    assert_exact_is_near_store,
    assert_features,
    assert_trains_as_stored,
    under_published_names,
)

import revzoo
from revzoo import NotInvertibleError, set_memory
from revzoo.models import create_model
from revzoo.models.network import ImageSizeError

TINY = {"width": 4, "units": (1, 2, 2), "heads": 2, "img_size": 32}


def small(**keywords):
    """A network in float64 whose biases and scales all matter."""
    torch.manual_seed(0)
    model = create_model("revmvit_base", **{**TINY, "num_classes": 5, **keywords}).double()
    for p in model.parameters():
        if p.dim() == 1:
            torch.nn.init.normal_(p)
        else:
            p.data *= 20  # 0.02 would leave attention uniform
    return model


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1)).double()


def parameters(width, units, side, classes=1000):
    """Parameters from the definition, term by term."""
    total = 3 * 49 * width + width + (side // 4) ** 2 * width
    for stage, count in enumerate(units):
        d, head = width * 2**stage, 96  # the width of a head is the same throughout
        pool = 9 * head + 2 * head
        attention = 2 * d + 4 * (d * d + d) + 2 * pool
        mlp = 2 * d + (d * 4 * d + 4 * d) + (4 * d * d + d)
        total += count * (attention + mlp)
        if stage:
            total += pool + (d * 2 * d + 2 * d) + (2 * d * d + d)  # queries, fuse
    return total + 2 * 2 * d + (2 * d + 1) * classes


def test_parameters_follow_the_definition():
    with torch.device("meta"):
        model = create_model("revmvit_base", num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == parameters(96, (1, 2, 11, 2), 224)


def linear(x, layer):
    return x @ layer.weight.T + layer.bias


def norm(x, layer):
    return F.layer_norm(x, x.shape[-1:], layer.weight, layer.bias, 1e-6)


def pool(x, layer, side, stride):
    """Head by head: ``(B, N, C)`` to a list of ``(B, N', C / heads)``."""
    pooled = []
    for head in x.chunk(layer.heads, -1):
        maps = head.mT.unflatten(2, (side, side))
        conv = F.conv2d(maps, layer.conv.weight, stride=stride, padding=1, groups=maps.shape[1])
        pooled.append(norm(conv.flatten(2).mT, layer.norm))
    return pooled


def attention(x, layer, side, stride, key_stride):
    x = norm(x, layer.norm)
    q, k, v = linear(x, layer.q), linear(x, layer.k), linear(x, layer.v)
    q = q.chunk(layer.heads, -1) if stride == 1 else pool(q, layer.pool_q, side, stride)
    k, v = pool(k, layer.pool_k, side, key_stride), pool(v, layer.pool_v, side, key_stride)
    mixed = [
        (a @ b.mT / a.shape[-1] ** 0.5).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)
    ]
    return linear(torch.cat(mixed, -1), layer.proj)


def mlp(x, layer):
    return linear(F.gelu(linear(norm(x, layer.norm), layer.fc1)), layer.fc2)


def test_a_network_is_its_formula():
    model = small().eval()
    set_memory(model, "store")
    x = images()
    (stem,) = model.stem
    tokens = F.conv2d(x, stem.conv.weight, stem.conv.bias, stride=4, padding=3).flatten(2).mT
    x1 = x2 = tokens + stem.positions
    maps, side = [], 8
    for stage, key_stride in zip(model.stages, (4, 2, 1), strict=True):
        blocks = list(stage)
        if stage is not model.stages[0]:
            fuse, transition, *blocks = blocks
            u = torch.cat((x1, x2), -1)
            u = u + linear(F.gelu(linear(u, fuse.branch[0])), fuse.branch[2])
            shortcut = torch.cat(pool(u, transition.attention.pool_q, side, 2), -1)
            v = shortcut + attention(u, transition.attention, side, 2, key_stride)
            x1 = x2 = v + mlp(v, transition.mlp)
            side //= 2
        for block in blocks:
            x1 = x1 + attention(x2, block[0].branch, side, 1, key_stride)
            x2 = x2 + mlp(x1, block[1].branch)
        maps.append(torch.cat((x1, x2), -1).mT.unflatten(2, (side, side)))
    features, found = model.forward_intermediates(x)
    for one, other in zip(found, maps, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10)
    expected = norm(torch.cat((x1, x2), -1), model.norm)
    assert torch.allclose(features, expected, rtol=1e-10, atol=1e-10)
    assert torch.allclose(model(x), linear(expected.mean(1), model.fc), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_training_equals_store(mode):
    assert_trains_as_stored(small(drop_path_rate=0.4, dropout=0.1), mode, images(), drops=True)


def test_exact_in_float32_is_store_on_the_grid_and_near_it():
    assert_exact_is_near_store(small().float(), images().float(), tolerance=1e-3)


def test_blocks_keep_no_activations():
    """Asked at https://github.com/karttikeya/minREV/issues/7."""

    def kept(mode, depth):
        model = create_model("revmvit_base", **{**TINY, "units": (1, depth)}, memory=mode)
        return revzoo.audit(model, (2, 3, 32, 32), modes=[]).kept_bytes

    growth = {mode: kept(mode, 6) - kept(mode, 3) for mode in ("store", "invert", "exact")}
    assert growth["invert"] == 0
    assert growth["exact"] == 6 * 8  # the sums that the guard compares, of each coupling
    assert growth["store"] > 1000 * growth["exact"]


@pytest.mark.parametrize("indices", [(0,), (1,), (0, -1)])
def test_feature_maps_of_a_shortened_network(indices):
    assert_features(small().eval(), images(), indices, "revmvit_base", **TINY)


def test_errors():
    model = small()
    with pytest.raises(ImageSizeError, match=r"expected 32 x 32, .*img_size=48"):
        model(images(48))
    with pytest.raises(NotInvertibleError, match=r"PatchEmbedding, .*FuseStreams.* lose"):
        model.inverse(model.encode(images()))
    with pytest.raises(ValueError, match="img_size=40: expected a multiple of 16, since 3 stages"):
        small(img_size=40)
    with pytest.raises(ValueError, match="width=4: expected a multiple of heads=3"):
        small(heads=3)


def test_a_file_of_the_release_loads(tmp_path):
    model, path = small().float(), tmp_path / "REV_MVIT.pyth"
    tensors = {
        name: t.unsqueeze(2) if ".pool_" in name else t  # a convolution of videos
        for name, t in under_published_names(model).items()
    }
    assert {
        *("patch_embed.proj.weight", "pos_embed", "norm.bias", "head.projection.bias"),
        *("rev_backbone.layers.0.F.attn.norm_k.bias", "rev_backbone.layers.4.G.mlp.fc2.weight"),
        *("rev_backbone.layers.3.F.attn.pool_q.weight", "rev_backbone.layers.2.G.norm.weight"),
        "rev_backbone.layers.3.pre_q_fuse.fuse_fn.fc2.weight",
    } <= {*tensors}
    assert tensors["rev_backbone.layers.1.F.attn.pool_q.weight"].shape == (2, 1, 1, 3, 3)
    torch.save({"model_state": tensors}, path)
    again = create_model("revmvit_base", **TINY, checkpoint_path=path)
    assert torch.equal(again(images().float()), model(images().float()))
    larger = create_model("revmvit_base", **{**TINY, "img_size": 48}, checkpoint_path=path)
    assert larger(images(48).float()).shape == (2, 5)
