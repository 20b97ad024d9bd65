"""Contractive layers and blocks: bounds, inverse, gradients in every mode, log-determinants."""

import copy
import math

import pytest
import torch
from compare import error
from torch import nn

import revzoo
from revzoo import (
    ContractiveBlock,
    ContractiveConv2d,
    ContractiveLinear,
    DriftError,
    ReversibleSequence,
    set_memory,
)


def matrix_of(layer, shape):
    """The matrix of a linear layer without its bias."""
    units = torch.eye(torch.Size(shape).numel()).view(-1, *shape).double()
    return (layer(units) - layer(0 * units[:1])).flatten(1).T


LAYERS = {
    "linear": (lambda c: ContractiveLinear(6, 5, coefficient=c), (6,)),
    "conv 1x1": (lambda c: ContractiveConv2d(3, 4, 1, size=(4, 5), coefficient=c), (3, 4, 5)),
    "conv 3x3": (lambda c: ContractiveConv2d(3, 2, 3, size=(4, 5), coefficient=c), (3, 4, 5)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_singular_values_are_bounded(kind):
    torch.manual_seed(0)
    make, shape = LAYERS[kind]
    layer = make(0.7).double()
    nn.init.normal_(layer.weight)
    for _ in range(500):
        layer.iterate()
    sigma = torch.linalg.svdvals(matrix_of(layer, shape))[0]
    assert torch.allclose(sigma, torch.full_like(sigma, 0.7), atol=1e-6)
    with torch.no_grad():
        layer.weight *= 1e-2  # below the bound: unchanged
    assert torch.equal(layer.bounded_weight(), layer.weight)


def test_the_gradient_of_a_bounded_weight():
    torch.manual_seed(0)
    layer = ContractiveConv2d(2, 2, 3, size=(4, 4), coefficient=0.5).double()
    nn.init.normal_(layer.weight)

    def bounded(weight):
        return torch.func.functional_call(layer, {"weight": weight}, (x,))

    x = torch.randn(1, 2, 4, 4, dtype=torch.float64)
    assert torch.autograd.gradcheck(bounded, layer.weight)


def block(*, std=0.3, scale=1.0, **keywords):
    def conv(channels, outputs, side):
        layer = ContractiveConv2d(channels, outputs, side, size=(4, 4))
        nn.init.normal_(layer.weight, std=std)
        return layer

    layers = [conv(2, 3, 3), nn.ELU(), conv(3, 2, 3)]
    if scale != 1:
        layers.append(Scaled(scale))
    return ContractiveBlock(nn.Sequential(*layers), **keywords)


class Scaled(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


def net(depth=3, **keywords):
    torch.manual_seed(0)
    blocks = [block(**keywords) for _ in range(depth)]
    return ReversibleSequence(blocks, memory="store").double()


def images(batch=2):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, 2, 4, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("log_det", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_training_equals_store(mode, log_det):
    effects = []
    for each in ("store", mode):
        model = net()
        set_memory(model, each)
        found = []
        for seed in range(2):  # the second pass starts from the vectors of the first
            torch.manual_seed(seed)
            x = images().requires_grad_()
            if log_det:
                y, logs = model.forward_with_log_det(x)
                loss = y.square().sum() + 3 * logs.sum()
            else:
                loss = model(x).square().sum()
            # another forward pass moves the vectors on before the backward pass
            kept = copy.deepcopy(model.state_dict())
            model(images())
            loss.backward()
            model.load_state_dict(kept)
            found += [x.grad, *(p.grad.clone() for p in model.parameters())]
        effects.append((found, list(model.buffers())))
    (expected, vectors), (actual, others) = effects
    assert error(actual, expected) <= (1e-11 if mode == "invert" else 0)
    assert all(map(torch.equal, vectors, others))


@pytest.mark.parametrize("training", [False, True])
def test_the_inverse(training):
    model = net()
    x = images()
    with torch.no_grad():
        for _ in range(20):  # brings the vectors close to singular vectors
            model(x)
        model.train(training)
        y = model(x)
        vectors = [v.clone() for v in model.buffers()]
        assert torch.allclose(model.inverse(y), x, rtol=0, atol=1e-11)
    assert all(map(torch.equal, vectors, model.buffers()))


def test_an_inverse_that_does_not_converge_raises():
    model = net(depth=1, scale=20.0)
    set_memory(model, "invert")
    with pytest.raises(DriftError, match=r"0 ContractiveBlock did not converge in 100.*recompute"):
        model(images()).sum().backward()


def test_the_log_determinant():
    torch.manual_seed(0)
    layer = ContractiveLinear(8, 8)
    nn.init.eye_(layer.weight)
    with torch.no_grad():
        layer.weight *= 0.8  # unchanged by the bound; log det (1.8 I) = 8 log 1.8
    step = ContractiveBlock(layer, terms=30, probes=500).eval()
    with torch.no_grad():
        found = step.log_det(torch.randn(3, 8))
    assert torch.allclose(found, torch.full((3,), 8 * math.log(1.8)), rtol=0.05)
    assert not found.requires_grad


def test_mode_exact_is_refused():
    with pytest.raises(ValueError, match="fixed-point iteration in floating point"):
        set_memory(net(), "exact")


def test_errors():
    with pytest.raises(ValueError, match=r"coefficient=1: expected a number in \(0, 1\)"):
        ContractiveLinear(2, 2, coefficient=1)
    with pytest.raises(ValueError, match="kernel_size=4: expected an odd number"):
        ContractiveConv2d(2, 2, 4, size=(4, 4))
    with pytest.raises(ValueError, match="terms"):
        revzoo.ContractiveBlock(nn.Identity(), terms=0)
