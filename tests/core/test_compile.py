"""Compiled branches and compiled models give the gradients of eager ones."""

import pytest
import torch
from compare import conv_net, error, images, linear_net, twin

from revzoo import set_memory

# Dynamo itself looks at .grad of the non-leaf tensors that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def gradients(net, x):
    net.zero_grad()
    x = x.clone().requires_grad_()
    net(x).square().mean().backward()
    return [x.grad, *(p.grad.clone() for p in net.parameters())]


@pytest.mark.parametrize("mode", ["store", "recompute", "invert"])
def test_compiled_branches(mode):
    net = conv_net(depth=1)
    reference = gradients(twin(net, "store"), images())
    set_memory(net, mode)
    for block in net:
        for coupling in block:
            coupling.branch.compile(backend="aot_eager")
    assert error(gradients(net, images()), reference) < 1e-10


@pytest.mark.parametrize("mode", ["store", "recompute", "invert"])
def test_a_compiled_model(mode):
    net = linear_net(depth=2)
    x = torch.randn(3, 8, dtype=torch.float64)
    reference = gradients(twin(net, "store"), x)
    set_memory(net, mode)
    net.compile(backend="aot_eager")
    assert error(gradients(net, x), reference) < 1e-10
