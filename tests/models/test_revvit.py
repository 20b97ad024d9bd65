"""Reversible ViTs and their baseline: formulas, memory modes, stochastic depth, errors."""

import math

import pytest
import torch
import torch.nn.functional as F
from model_checks import assert_trains_as_stored

import revzoo
from revzoo import NotInvertibleError, set_memory
from revzoo.models import create_model
from revzoo.models.revvit import MLP, Attention

TINY = {"width": 8, "depth": 3, "heads": 2, "img_size": 8, "patch_size": 4}
# width D, depth, patch p, image side: the paper's S, B and L, and ours for 32x32
SIZES = {
    "revvit_small": (384, 12, 16, 224),
    "revvit_base": (768, 12, 16, 224),
    "revvit_large": (1024, 24, 16, 224),
    "revvit_cifar": (128, 6, 4, 32),
}


def parameters(d, depth, patch, side, classes=1000):
    """Parameters from the definition, term by term."""
    embedding = 3 * patch**2 * d + d + (side // patch) ** 2 * d
    attention = 2 * d + (d * 3 * d + 3 * d) + (d * d + d)  # LN, queries to values, projection
    mlp = 2 * d + (d * 4 * d + 4 * d) + (4 * d * d + d)
    return embedding + depth * (attention + mlp) + 2 * (2 * d) + (2 * d + 1) * classes


@pytest.mark.parametrize("name", SIZES)
def test_parameters_follow_the_definition(name):
    with torch.device("meta"):
        model = create_model(name, num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == parameters(*SIZES[name])


def test_a_network_is_its_formula():
    torch.manual_seed(0)
    model = create_model("revvit_cifar", **TINY).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    (stem,) = model.stem
    patches = F.unfold(x, 4, stride=4).mT  # (B, N, 3 p p)
    tokens = patches @ stem.conv.weight.flatten(1).T + stem.conv.bias + stem.positions
    x1, x2 = tokens, tokens
    for block in model.stages[0]:
        x1 = x1 + block[0].branch(x2)
        x2 = x2 + block[1].branch(x1)
    fused = F.layer_norm(torch.cat((x1, x2), -1), (16,), model.norm.weight, model.norm.bias, 1e-6)
    assert torch.allclose(model.forward_features(x), fused, rtol=0, atol=1e-12)
    expected = fused.mean(1) @ model.fc.weight.T + model.fc.bias
    assert torch.allclose(model(x), expected, rtol=0, atol=1e-12)


def test_the_baseline_is_its_formula():
    torch.manual_seed(0)
    model = create_model("vit_cifar", **TINY).double().eval()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    (tokens,) = model.stem[0](x)
    for block in model.stages[0]:
        tokens = tokens + block[0].branch(tokens)
        tokens = tokens + block[1].branch(tokens)
    normed = F.layer_norm(tokens, (8,), model.norm.weight, model.norm.bias, 1e-6)
    assert torch.allclose(model(x), model.fc(normed.mean(1)), rtol=0, atol=1e-12)


def test_the_baseline_differs_from_the_reversible_network_in_the_head_alone():
    plain, reversible = (
        {key: value.shape for key, value in create_model(name).state_dict().items()}
        for name in ("vit_cifar", "revvit_cifar")
    )
    assert plain.keys() == reversible.keys()
    differing = {key for key in plain if plain[key] != reversible[key]}
    assert differing == {"norm.weight", "norm.bias", "fc.weight"}


def test_the_baseline_becomes_reversible():
    model = create_model("vit_cifar", **TINY, reversible_bits=4)
    assert len(revzoo.reversible_blocks(model)) == TINY["depth"]
    x, labels = torch.randn(4, 3, 8, 8), torch.arange(4)
    gradients = []
    for mode, grid in (("exact", None), ("store", "auto")):
        set_memory(model, mode, grid=grid)
        model.zero_grad()
        F.cross_entropy(model(x), labels).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("mode", ["recompute", "offload", "invert", "exact"])
def test_training_equals_store_with_stochastic_depth_and_dropout(mode):
    torch.manual_seed(0)
    model = create_model("revvit_cifar", **TINY, drop_path_rate=0.5, dropout=0.2).double()
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    assert_trains_as_stored(model, mode, x, drops=True, tolerance=1e-12)


def test_stochastic_depth_grows_linearly():
    model = create_model("revvit_cifar", **TINY, drop_path_rate=0.4)
    first, *others = ([c.branch.drop_path for c in block] for block in model.stages[0])
    assert all(isinstance(layer, torch.nn.Identity) for layer in first)
    assert [[layer.p for layer in layers] for layers in others] == [[0.2] * 2, [0.4] * 2]


def test_blocks_are_inverted_and_the_embedding_is_named():
    model = create_model("revvit_cifar", **TINY).double()
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    tokens = model.stem(x)
    back = model.stages[0].inverse(*model.stages[0](*tokens))
    assert all(torch.allclose(b, t, rtol=0, atol=1e-12) for b, t in zip(back, tokens, strict=True))
    with pytest.raises(NotInvertibleError, match=r"stem\.steps\.0 PatchEmbedding loses"):
        model.inverse(model.encode(x))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"heads": 3}, "width=8: expected a multiple of heads=3"),
        ({"patch_size": 3}, "img_size=8: expected a multiple of patch_size=3"),
        ({"depth": 0}, "depth=0"),
        ({"drop_path_rate": 1.0}, "drop_path_rate=1.0"),
        ({"activation": "rely"}, "activation=rely: expected one of .*gelu"),
        ({"units": 3}, "no keyword 'units'"),
    ],
)
def test_arguments_out_of_range_are_refused(keywords, message):
    with pytest.raises(ValueError, match=message):
        create_model("revvit_cifar", **{**TINY, **keywords})


@pytest.mark.parametrize(("size", "remedy"), [((16, 16), r"model.img_size=16"), ((8, 4), "square")])
def test_images_of_another_size_are_refused(size, remedy):
    with pytest.raises(ValueError, match=f"expected 8 x 8, .*{remedy}"):
        create_model("revvit_cifar", **TINY)(torch.randn(1, 3, *size))


def normed(x, norm):
    centred = x - x.mean(-1, keepdim=True)
    scale = (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()
    return centred / scale * norm.weight + norm.bias


def test_attention_is_softmax_of_scaled_products():
    torch.manual_seed(0)
    layer = Attention(8, heads=2).double()
    torch.nn.init.normal_(layer.norm.weight)
    x = torch.randn(3, 5, 8, dtype=torch.float64)
    q, k, v = (normed(x, layer.norm) @ layer.qkv.weight.T + layer.qkv.bias).split(8, dim=-1)
    heads = []
    for at in (slice(0, 4), slice(4, 8)):
        weights = (q[..., at] @ k[..., at].mT / math.sqrt(4)).softmax(-1)
        heads.append(weights @ v[..., at])
    expected = torch.cat(heads, -1) @ layer.proj.weight.T + layer.proj.bias
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_mlp_is_two_linear_layers_on_each_token():
    layer = MLP(4, hidden=6).double()
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    hidden = F.gelu(normed(x, layer.norm) @ layer.fc1.weight.T + layer.fc1.bias)
    expected = hidden @ layer.fc2.weight.T + layer.fc2.bias
    assert torch.allclose(layer(x), expected, rtol=0, atol=1e-12)
