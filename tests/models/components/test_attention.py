"""Attention and MLP against their definitions; stochastic depth."""

import math

import torch
import torch.nn.functional as F

from revzoo.models.components.attention import MLP, Attention


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
