"""The documented features of InvTorch 0.5.0: its README and modules, beside ours.

InvTorch has no tests; we test the behaviours in its README and the properties that ``check()``
verifies. Our own code; each docstring names the module or the section. Its ``x + f(x)`` crashes,
since it empties the storage of ``x``; ours works.
"""

import pytest
import torch
from compare import error
from torch import nn

import revzoo
from revzoo import (
    InjectiveLinear,
    Invertible,
    InvertibleBatchNorm,
    InvertibleFlatten,
    PatchConv,
    ReversibleSequence,
    SpatialPadding,
    Squeeze,
    checkpoint,
    is_invertible,
    memory,
)

MODES = ["store", "recompute", "offload", "invert"]


class InvertibleLinear(Invertible):
    """README, "Usage": the class that a user writes, with a rectangular weight."""

    streams = 1

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features, in_features))
        self.bias = nn.Parameter(torch.randn(out_features))

    def forward(self, inputs):
        return inputs @ self.weight.T + self.bias

    def inverse(self, outputs):
        return (outputs - self.bias) @ self.weight.T.pinverse()


def test_a_users_module_that_is_called_directly():
    """README, "Usage" and "checkpoint, invertible, and seed": flags that may change at any time."""
    torch.manual_seed(0)
    model = InvertibleLinear(3, 5).double()
    x = torch.randn(10, 3, dtype=torch.float64)
    assert is_invertible(model, x)
    found = []
    for mode in MODES:
        revzoo.set_memory(model, mode)
        assert repr(model) == f"InvertibleLinear[{mode}]()"  # the mode in repr
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        assert leaf.untyped_storage().nbytes() > 0
        found.append(torch.autograd.grad((y + model(leaf) * y).sum(), [leaf, *model.parameters()]))
    assert all(error(grads, found[0]) < 1e-12 for grads in found)


def test_an_input_that_is_used_again():
    """README, "Limitations": ``x + f(x)``."""
    model = InvertibleLinear(3, 3).double()
    x = torch.randn(10, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for mode in MODES:
        revzoo.set_memory(model, mode)
        z = x.sin()
        found.append(torch.autograd.grad((z + model(z)).square().sum(), x))
    assert all(error(grads, found[0]) < 1e-12 for grads in found)


def test_temp_mode():
    """``temp_mode``: another mode inside a ``with`` block, each module's mode after it."""
    net = ReversibleSequence([InjectiveLinear(3, 4, streams=1), InjectiveLinear(4, 4, streams=1)])
    revzoo.set_memory(net[0], "recompute")
    with memory(net, "store"):
        assert [step.memory for step in net] == ["store", "store"]
    assert [step.memory for step in net] == ["recompute", "invert"]


def test_checkpoint_without_an_inverse():
    """README, "invtorch.checkpoint()": outputs know whether they require gradient."""
    x = torch.randn(3, requires_grad=True)
    y, z = checkpoint(lambda t: (t.exp(), t.detach() * 2), x)
    assert y.requires_grad
    assert not z.requires_grad
    assert not checkpoint(torch.exp, x.detach()).requires_grad
    y.sum().backward()
    assert torch.equal(x.grad, x.exp())


class Hidden(Invertible):
    """README, "num_outputs": buffers keep values for the inverse that callers do not receive."""

    streams = 1
    carried = ("scale",)

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64), persistent=False)

    def forward(self, x):
        scale = x.detach().abs().amax()
        self.scale.copy_(scale)
        return x / scale

    def inverse(self, y):
        return y * self.scale


class Extra(Invertible):
    """An output for the caller that the inverse does not receive."""

    streams = extras = 1

    def forward(self, x):
        return x * 2, x.square().sum()

    def inverse(self, y):
        return y / 2


def test_outputs_that_are_not_streams():
    """README, "num_outputs", both ways."""
    found = []
    for mode in ("invert", "store"):
        net = ReversibleSequence([Hidden(), Extra(), Hidden()], memory=mode)
        xs = [torch.linspace(1, k, 5, dtype=torch.float64).requires_grad_() for k in (2, 3)]
        outputs = [net(x.sin()) for x in xs]  # two passes with different scales
        loss = sum(y.square().sum() + total for y, total in outputs)
        found.append(torch.autograd.grad(loss, xs))
    assert error(*found) < 1e-12


LAYERS = {
    "Linear": (lambda: InjectiveLinear(3, 5, dim=-1, streams=1), (4, 3)),
    "Conv1d": (lambda: PatchConv(2, 8, (2,), streams=1), (4, 2, 6)),
    "Conv2d": (lambda: PatchConv(2, 12, (2, 3), streams=1), (4, 2, 4, 6)),
    "Conv3d": (lambda: PatchConv(1, 8, (2, 2, 2), streams=1), (4, 1, 2, 4, 2)),
    "BatchNorm1d": (lambda: InvertibleBatchNorm(3, statistics="batch", streams=1), (4, 3, 5)),
    "BatchNorm2d": (lambda: InvertibleBatchNorm(3, statistics="batch", streams=1), (4, 3, 5, 5)),
    "BatchNorm3d": (lambda: InvertibleBatchNorm(3, statistics="batch", streams=1), (4, 3, 2, 2, 2)),
    "Flatten": (lambda: InvertibleFlatten((3, 2, 5), start_dim=2, streams=1), (4, 3, 2, 5)),
    "Pad": (lambda: SpatialPadding((1, 2), mode="reflect", streams=1), (4, 3, 5)),
    "PixelShuffle": (lambda: Squeeze((2, 3), order="irevnet", streams=1), (4, 2, 4, 6)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_each_layer_in_each_mode(name):
    """``invtorch.nn``: the layer of that name; ``check()``."""
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    layer = build().double()
    x = torch.randn(shape, dtype=torch.float64)
    assert is_invertible(layer, x)
    found = []
    for mode in MODES:
        net = ReversibleSequence([Extra(), layer], memory=mode)
        leaf = x.clone().requires_grad_()
        y, total = net(leaf)
        found.append(torch.autograd.grad(y.pow(3).sum() + total, [leaf, *layer.parameters()]))
    assert all(error(grads, found[0]) < 1e-10 for grads in found)
