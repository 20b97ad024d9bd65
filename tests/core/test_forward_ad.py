"""Forward-mode AD, alone and around a backward pass: the numbers of store, or an error."""

import pytest
import torch
from compare import error, linear_net
from torch.autograd import forward_ad

from revzoo import ReversibleSequence, set_memory
from revzoo.core.kernels import round_to_grid

# torch compiles its own forward-mode formulas with torch.jit.script on first use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:FutureWarning")
MODES = ["offload", "recompute", "invert", "exact"]


def vectors(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, 8, dtype=torch.float64, generator=generator)


def tangent_of_the_input(net):
    """A Hessian-vector product, forward over reverse."""
    with forward_ad.dual_level():
        x = forward_ad.make_dual(vectors().requires_grad_(), vectors(2))
        gradients = torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])
        return [part for g in gradients for part in forward_ad.unpack_dual(g)]


def tangent_of_the_parameters(net):
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(p, torch.ones_like(p)) for name, p in net.named_parameters()
        }
        x = vectors().requires_grad_()
        loss = torch.func.functional_call(net, duals, (x,)).square().sum()
        return list(forward_ad.unpack_dual(*torch.autograd.grad(loss, x)))


def tangent_of_the_output_gradient(net):
    y = net(x := vectors().requires_grad_())
    with forward_ad.dual_level():
        seed = forward_ad.make_dual(torch.ones_like(y), vectors(2))
        return list(forward_ad.unpack_dual(*torch.autograd.grad(y, x, seed)))


def backward_outside_the_level(net):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(vectors().requires_grad_(), vectors(2))
        y = net(x)
    return list(torch.autograd.grad(y.square().sum(), x))


def product_by_torch_func(net):
    gradient = torch.func.grad(lambda x: net(x).square().sum())
    return list(torch.func.jvp(gradient, (vectors(),), (vectors(2),)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "compute",
    [
        tangent_of_the_input,
        tangent_of_the_parameters,
        tangent_of_the_output_gradient,
        backward_outside_the_level,
        product_by_torch_func,
    ],
)
def test_forward_over_reverse_equals_store(mode, compute):
    net = linear_net(depth=2)
    results = []
    for m in (mode, "store"):
        set_memory(net, m, grid="auto" if mode == "exact" else None)
        results.append(compute(net))
    assert all(r is not None for r in results[0])
    assert error(*results) < 1e-12


def test_a_nested_sequence_replayed_at_a_level_is_recorded_as_in_its_forward():
    inner, outer = linear_net(depth=1, width=2), linear_net(depth=1)
    outer[0][0].branch.append(inner)
    results = []
    for mode in ("invert", "store"):
        set_memory(outer, mode)
        results.append(tangent_of_the_output_gradient(outer))
    assert error(*results) < 1e-12


def test_a_tangent_passes_through_the_rounding():
    tangent = vectors(2)
    _, actual = torch.func.jvp(lambda x: round_to_grid(x, 3), (vectors(),), (tangent,))
    assert torch.equal(actual, tangent)


@pytest.mark.parametrize("mode", MODES[:-1])
def test_gradcheck_of_forward_mode(mode):
    net = ReversibleSequence(list(linear_net(depth=1, width=2)), memory=mode)
    x = vectors()[:2, :4].clone().requires_grad_()
    assert torch.autograd.gradcheck(net, x, check_forward_ad=True)
    if mode not in ("invert", "exact"):  # first derivatives only
        assert torch.autograd.gradgradcheck(net, x, check_fwd_over_rev=True)
