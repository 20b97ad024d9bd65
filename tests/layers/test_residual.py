"""Branches as steps: the plain network bit for bit, gradients of ``store``, the same keys."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn

from revzoo import Residual, make_reversible, reversible_blocks, set_memory
from revzoo.core.live import LiveMemory

BF16 = torch.autocast("cpu", dtype=torch.bfloat16)


class Transformer(nn.Module):
    """A block whose attention is a method with a mask, and whose MLP is a module."""

    def __init__(self, width=16, dropout=0.1, *, split=True):
        super().__init__()
        self.split = split
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=dropout, batch_first=True)
        mlp = [nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(dropout)]
        self.mlp = nn.Sequential(*mlp, nn.Linear(2 * width, width))
        if split:
            self.first, self.second = Residual(self.attend), Residual(self.transform)

    def attend(self, x, mask=None):
        x = self.norm(x)
        return self.attention(x, x, x, attn_mask=mask)

    def transform(self, x):
        return self.mlp(x)

    def forward(self, x, mask=None):
        if self.split:
            return self.second(self.first(x, mask=mask)[0])
        x = x + self.attend(x, mask)[0]
        return x + self.mlp(x)


class Encoder(nn.Module):
    def __init__(self, depth=4, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, 16)
        self.layers = nn.ModuleList(Transformer(**options) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        for layer in self.layers:
            x = layer(x, mask)
        return x


def tokens(batch=2):
    return torch.randn(batch, 7, 6, generator=torch.Generator().manual_seed(1))


def effects(net, context=contextlib.nullcontext):
    torch.manual_seed(2)
    with context():
        y = net(tokens())
    gradients = torch.autograd.grad(y.float().square().mean(), list(net.parameters()))
    return [y.detach(), *gradients]


@pytest.mark.parametrize("context", [contextlib.nullcontext, lambda: BF16], ids=["fp32", "bf16"])
def test_each_branch_is_a_step(context):
    whole, net = Encoder(split=False), Encoder()
    assert list(net.state_dict()) == list(whole.state_dict())
    plain = effects(net, context)
    assert all(map(torch.equal, plain, effects(whole, context)))
    make_reversible(net, 8)
    assert list(net.state_dict()) == list(whole.state_dict())
    reversible = effects(net, context)
    rows = reversible_blocks(net)
    paths = [f"layers.{i}.{name}" for i in range(4) for name in ("first", "second")]
    assert [(row.path, row.role) for row in rows] == [
        (path, "joins" if i else "starts") for i, path in enumerate(paths)
    ]
    assert (reversible[0] - plain[0]).norm() < 0.01 * plain[0].norm()
    assert not torch.equal(reversible[0], plain[0])
    set_memory(net, "store", grid="auto")
    assert all(map(torch.equal, reversible, effects(net, context)))
    make_reversible(net, None)
    assert all(map(torch.equal, plain, effects(net, context)))


def test_each_branch_keeps_its_bits():
    x = torch.randn(8, 64, 6)

    def kept(depth):
        net = make_reversible(Encoder(depth, dropout=0.0), 4)
        with LiveMemory() as memory:
            y = net(x)
        return memory.now, y

    kept(2)  # the first call fills caches
    size = 2 * 8 * 64 * 16 // 2  # bytes of 4 bits for each value of two states
    assert (kept(6)[0] - kept(2)[0]) / 4 == pytest.approx(size, rel=0.01)


def test_copies_use_their_own_weights():
    net = make_reversible(Encoder(dropout=0.0))
    expected = effects(net)
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(2)
        assert all(map(torch.equal, effects(twin), expected))
        with torch.no_grad():
            for p in net.parameters():
                p.div_(2)


def test_branches_among_other_blocks():
    linear = nn.Linear(4, 4)
    mixed = nn.Sequential(
        nn.Sequential(Residual(linear), nn.ReLU(), Residual(torch.sin)),
        nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))),
        nn.ModuleDict({"one": Residual(nn.Sequential(Residual(nn.Linear(4, 4)), nn.ReLU()))}),
    )
    paths = {row.path for row in reversible_blocks(make_reversible(mixed))}
    assert {"0.0", "0.2", "2.one"} <= paths
    assert "2.one.fn.0" not in paths
    make_reversible(mixed, None)
    chosen = reversible_blocks(make_reversible(mixed, blocks=["2"]))
    assert [row.path for row in chosen] == ["2.one"]


def test_what_a_branch_may_return():
    x = torch.ones(2, 3)
    with pytest.raises(TypeError, match="fn is 3, expected a module or a function"):
        Residual(3)
    with pytest.raises(ValueError, match=r"shape \(2, 4\) for an input of \(2, 3\)"):
        Residual(nn.Linear(3, 4))(x)
    with pytest.raises(TypeError, match="returned NoneType: expected a tensor, or a tuple"):
        Residual(lambda _: None)(x)


class Counting(nn.Module):
    """Changes a buffer in each forward pass."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        self.count += 1
        return self.linear(x) + self.count


class MethodThenModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.first, self.second = Residual(self.normalise), Residual(Counting())

    def normalise(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("mode", ["recompute", "exact"])
def test_a_branch_may_change_a_buffer_after_a_branch_that_is_a_method(mode):
    """The search followed the method's block into all its branches, so the backward pass raised."""
    torch.manual_seed(0)
    net = make_reversible(nn.Sequential(MethodThenModule(), MethodThenModule()), 4)
    expected = copy.deepcopy(net)
    set_memory(net, mode)
    set_memory(expected, "store", grid="auto" if mode == "exact" else None)
    x = torch.randn(3, 4)
    for each in (net, expected):
        sum(each(k * x).square().sum() for k in range(2)).backward()
    torch.testing.assert_close(*([p.grad for p in m.parameters()] for m in (net, expected)))
    torch.testing.assert_close(list(net.buffers()), list(expected.buffers()))
