"""Compiled branches and compiled models give the gradients of eager ones."""

import pytest
import torch
from compare import assert_same_training, conv_net, error, images, linear_net, twin
from torch import nn

from revzoo import AdditiveCoupling, ReversibleSequence, set_memory

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


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["store", "invert"])
@pytest.mark.parametrize("what", ["branches", "wrapped branches", "model"])
def test_inductor(mode, what):
    # Its backward graphs insist on the strides of the forward pass, which chunks of a merged output
    # do not have.
    net = conv_net(depth=1)
    reference = twin(net, "store")
    set_memory(net, mode)
    for coupling in net[0] if what != "model" else []:
        if what == "branches":
            coupling.branch.compile()
        else:
            coupling.branch = torch.compile(coupling.branch)
    if what == "model":
        net.compile()
    assert_same_training(net, reference, images(), steps=2)


class StrictAboutStrides(torch.autograd.Function):
    """Saves its input laid out as it comes, as a compiled branch does."""

    @staticmethod
    def forward(ctx, x):
        ctx.stride = x.stride()
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        assert x.stride() == ctx.stride
        return gradient * x.cos()


class Strict(nn.Module):
    @torch.compiler.disable
    def forward(self, x):
        return StrictAboutStrides.apply(x)


@pytest.mark.parametrize("mode", ["store", "recompute", "invert"])
@pytest.mark.parametrize("wrap", [False, True])
def test_the_strides_of_streams_return_where_a_branch_is_compiled(mode, wrap):
    net = ReversibleSequence([AdditiveCoupling(Strict()) for _ in range(3)])
    reference = twin(net, "store")
    set_memory(net, mode)
    for step in net:
        if wrap:
            step.branch = torch.compile(step.branch, backend="eager")
        else:
            step.branch.compile(backend="eager")
    assert error(gradients(net, images()), gradients(reference, images())) < 1e-12
