"""Couplings that scale: extra outputs of their branches, and branches that do not fit."""

import pytest
import torch
from compare import error, twin
from torch import nn

from revzoo import (
    AffineAdapterNaive,
    AffineCoupling,
    ReversibleSequence,
    ScaledCoupling,
    set_memory,
)


class Scales(nn.Module):
    """Scale and shift, side by side if ``joined``, and a loss."""

    def __init__(self, *, joined):
        super().__init__()
        self.linear, self.joined = nn.Linear(3, 6), joined

    def forward(self, x):
        h = self.linear(x).tanh() + 2
        return (h, h.mean()) if self.joined else (*h.chunk(2, dim=1), h.mean())


def couplings():
    torch.manual_seed(0)
    for kind, joined in ((AffineCoupling, True), (ScaledCoupling, False)):
        coupling = kind(Scales(joined=joined)).double()
        coupling.extras = 1
        yield coupling


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_extra_outputs_follow_the_streams(mode):
    """ScaledCoupling refused them."""
    net, x = ReversibleSequence(couplings()), torch.randn(2, 6, dtype=torch.float64)
    results = []
    for m in (mode, "store"):
        y, *losses = twin(net, m)(x := x.detach().requires_grad_())
        results.append([y.detach(), *torch.autograd.grad(y.square().sum() + sum(losses), x)])
        assert len(losses) == 2
    assert error(*results) < 1e-12
    assert error([net.inverse(y)], [x]) < 1e-12
    z, log_det = net.forward_with_log_det(x)
    expected = torch.func.jacrev(lambda v: net(v)[0])(x[:1])[0, :, 0]
    assert torch.equal(z, y)
    assert error([log_det[0]], [torch.linalg.slogdet(expected).logabsdet]) < 1e-12


class Returns(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.fn = fn

    def forward(self, x):
        return self.fn(x)


@pytest.mark.parametrize(
    ("fn", "kind", "message"),
    [
        (lambda x: x, TypeError, "Returns returned a Tensor, expected a pair"),
        (lambda x: (x,), TypeError, "Returns returned a tuple, expected a pair"),
        (lambda x: (x, None), TypeError, "Returns returned a tuple, expected a pair"),
        (lambda x: (x, x, x), TypeError, "Returns returned 3 tensors, expected 2"),
        (lambda x: (x[:, :1], x), ValueError, r"shapes \(2, 1\) and \(2, 4\)"),
        (lambda x: (x[:, :1],) * 2, ValueError, r"shape \(2, 1\) for a stream of shape \(2, 4\)"),
    ],
)
def test_a_branch_that_does_not_return_scale_and_shift_is_refused(fn, kind, message):
    x = torch.ones(2, 4)
    coupling = ScaledCoupling(Returns(fn))
    for call in (coupling, coupling.inverse, coupling.log_det, coupling.forward_with_log_det):
        with pytest.raises(kind, match=message):
            call(x, x)


@pytest.mark.parametrize(
    "coupling", [AffineCoupling(nn.Tanh()), ScaledCoupling(AffineAdapterNaive(nn.Tanh()))]
)
def test_scales_are_not_exact(coupling):
    with pytest.raises(ValueError, match="is not exact on fixed-point streams, since products"):
        set_memory(ReversibleSequence([coupling]), "exact")
