"""Adapters for branches: beside MemCNN's, in every mode."""

import copy

import pytest
import torch
from compare import assert_same_training, images, twin
from torch import nn

from revzoo import (
    AffineAdapterNaive,
    AffineAdapterSigmoid,
    ReversibleSequence,
    ScaledCoupling,
    check_inverse,
)

ADAPTERS = {"naive": (AffineAdapterNaive, 1), "sigmoid": (AffineAdapterSigmoid, 2)}
every_adapter = pytest.mark.parametrize("name", ADAPTERS)


def branch(name, channels=4):
    adapter, width = ADAPTERS[name]
    layers = nn.Conv2d(channels, width * channels, 3, padding=1), nn.BatchNorm2d(width * channels)
    return adapter(nn.Sequential(*layers, nn.Tanh()))


def net(name, depth=4):
    torch.manual_seed(0)
    return ReversibleSequence([ScaledCoupling(branch(name)) for _ in range(depth)]).double()


@every_adapter
@pytest.mark.parametrize("mode", ["offload", "recompute", "invert"])
def test_training_equals_store(name, mode):
    assert_same_training(twin(net(name), mode), twin(net(name), "store"), images(), tolerance=1e-9)


@every_adapter
def test_round_trip_and_log_determinant(name):
    flow = net(name).eval()
    assert check_inverse(flow, images()).worst(torch.float64) < 1e-12
    x = images(batch=1, size=2).flatten(1)

    def flat(v):
        return flow(v.reshape(1, 8, 2, 2)).flatten()

    expected = torch.linalg.slogdet(torch.func.jacrev(flat)(x[0])).logabsdet
    _, log_det = flow.forward_with_log_det(x.reshape(1, 8, 2, 2))
    assert abs(log_det - expected) < 1e-10 < abs(expected)
    assert torch.equal(log_det, flow.log_det(x.reshape(1, 8, 2, 2)))


@every_adapter
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_values_are_memcnns(name):
    memcnn = pytest.importorskip("memcnn")
    theirs = {"naive": memcnn.AffineAdapterNaive, "sigmoid": memcnn.AffineAdapterSigmoid}[name]
    f, g = (branch(name).f.double().eval() for _ in range(2))
    coupling = memcnn.AffineCoupling(copy.deepcopy(f), copy.deepcopy(g), adapter=theirs).eval()
    adapter = ADAPTERS[name][0]
    ours = ReversibleSequence([ScaledCoupling(adapter(f)), ScaledCoupling(adapter(g))]).eval()
    x = images()
    torch.testing.assert_close(ours(x), coupling(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.inverse(x), coupling.inverse(x), rtol=0, atol=0)


def test_refusals():
    x = torch.zeros(1, 2)
    for adapter in (AffineAdapterNaive, AffineAdapterSigmoid, ScaledCoupling):
        with pytest.raises(TypeError, match="is 'f', expected a module or a function"):
            adapter("f")
    with pytest.raises(ValueError, match=r"shape \(1, 3\) for a stream of shape \(1, 2\)"):
        ScaledCoupling(AffineAdapterNaive(nn.Linear(2, 3)))(x, x)
    with pytest.raises(ValueError, match="expected an even number of channels"):
        ScaledCoupling(AffineAdapterSigmoid(nn.Linear(2, 3)))(x, x)
