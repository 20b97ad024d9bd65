"""FrEIA's tests, for the features that revzoo has.

Our own code, after tests/ of FrEIA; each docstring names the original. Not here: layers and
frameworks that revzoo lacks (splines, Gaussian mixtures, graphs of nodes, invertible ResNets).
FrEIA's sequence knows its shapes, so it refuses a replacement layer of another size at once; ours
raises at the next call.
"""

import pytest
import torch
from compare import error
from torch import nn

from revzoo import (
    ActNorm,
    AdditiveCoupling,
    AffineCoupling,
    ChannelPermutation,
    InvertibleConv1x1,
    InvertibleLinear,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Squeeze,
    set_memory,
)

MODES = ["store", "recompute", "offload", "invert"]


def affine(channels, out, width=32):
    return AffineCoupling(
        nn.Sequential(nn.Linear(channels, width), nn.ReLU(), nn.Linear(width, 2 * out))
    )


def data(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def log_det_by_hand(flow, x):
    """log|det| of each image's Jacobian (FrEIA's ``_jacobian``, exactly)."""

    def flat(v):
        return flow(v.reshape(1, *x.shape[1:])).flatten()

    jacobians = [torch.func.jacrev(flat)(row.flatten()) for row in x]
    return torch.stack([torch.linalg.slogdet(j).logabsdet for j in jacobians])


@pytest.mark.parametrize("shape", [(20,), (3, 10, 10)])
def test_actnorm_gives_standard_moments(shape):
    """test_invertible_resnet.py, ActNormTest.test_linear and test_conv.

    FrEIA divides by the unbiased deviation, which its test measures: ``unbiased=True``.
    """
    x = data(256, *shape) * data(256, *shape, seed=1) + data(1, *shape, seed=2)
    y = ActNorm(shape[0], unbiased=True, streams=1).double()(x)
    dims = [0, *range(2, y.dim())]
    assert y.mean(dims).abs().max() < 1e-7
    assert (y.std(dims) - 1).abs().max() < 1e-5


def test_append_and_replace():
    """test_sequence.py: test_append_class, test_append_instance, test_replace_layer."""
    seq = ReversibleSequence([])
    for _ in range(3):
        assert seq.append(affine(1, 1)) is seq
    new = affine(1, 1)
    seq[1] = new
    assert seq[1] is new
    flow = seq.double()
    x = data(5, 2)
    assert (flow.inverse(flow(x)) - x).abs().max() < 1e-12
    seq[1] = affine(2, 2).double()  # another size: an error of the call
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        seq(x)


@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize("mode", MODES)
def test_an_odd_number_of_channels(channels, mode):
    """test_conditioning.py and the coupling blocks: ``split_len1 = channels // 2``."""
    torch.manual_seed(0)
    first, second = channels // 2, channels - channels // 2
    # x1 of one size and x2 of another: a branch maps from the one to the other
    steps = [affine(second, first), affine(first, second)] * 2
    flow = ReversibleSequence(steps, split=(first, second), memory=mode).double()
    x = data(4, channels).requires_grad_()
    z, log_det = flow.forward_with_log_det(x)
    assert (flow.inverse(z) - x).abs().max() < 1e-12
    assert (log_det - log_det_by_hand(flow, x.detach())).abs().max() < 1e-10
    grads = torch.autograd.grad(z.square().sum() - log_det.sum(), [x, *flow.parameters()])
    set_memory(flow, "store")
    z, log_det = flow.forward_with_log_det(x)
    expected = torch.autograd.grad(z.square().sum() - log_det.sum(), [x, *flow.parameters()])
    assert error(grads, expected) < 1e-10


class Conditional(nn.Module):
    def __init__(self, channels, conditions):
        super().__init__()
        self.net = nn.Linear(channels + conditions, 2 * channels)

    def forward(self, x, *, c):
        return self.net(torch.cat([x, c], dim=1)).tanh()


@pytest.mark.parametrize("mode", MODES)
def test_conditions(mode):
    """test_conditioning.py: test_output_shape, test_inverse, test_jacobian, with a gradient for
    the condition."""
    torch.manual_seed(0)
    steps = [AffineCoupling(Conditional(2, 3)) for _ in range(4)]
    flow = ReversibleSequence(steps, memory=mode).double()
    x, c = data(6, 4).requires_grad_(), data(6, 3, seed=1).requires_grad_()
    z, log_det = flow.forward_with_log_det(x, c=c)
    assert z.shape == x.shape
    assert (flow.inverse(z, c=c) - x).abs().max() < 1e-12
    grads = torch.autograd.grad(z.square().sum() - log_det.sum(), [x, c])
    set_memory(flow, "store")
    z, log_det = flow.forward_with_log_det(x, c=c)
    assert error(grads, torch.autograd.grad(z.square().sum() - log_det.sum(), [x, c])) < 1e-10


@pytest.mark.parametrize("mode", MODES)
def test_orthogonal_layers_stay_orthogonal_while_they_are_trained(mode):
    """test_orthogonal_layer.py: test_inverse, test_param_update."""
    torch.manual_seed(0)
    layers = [InvertibleLinear(6, matrix="orthogonal", streams=1), AdditiveLike()]
    flow = ReversibleSequence(layers, memory=mode).double()
    x = data(8, 6)
    optimiser = torch.optim.SGD(flow.parameters(), lr=0.1)
    before = flow[0].matrix().detach().clone()
    for _ in range(5):
        optimiser.zero_grad()
        (flow(x) * data(8, 6, seed=1)).mean().backward()
        optimiser.step()
        matrix = flow[0].matrix()
        assert (matrix @ matrix.mT - torch.eye(6)).abs().max() < 1e-12
        assert (flow.inverse(flow(x)) - x).abs().max() < 1e-12
    assert (matrix - before).abs().max() > 1e-4


class AdditiveLike(ReversibleSequence):
    """A coupling that takes one tensor."""

    def __init__(self):
        from revzoo import Merge, Split

        super().__init__([Split(), AdditiveCoupling(nn.Tanh()), Merge()])


@pytest.mark.parametrize("mode", MODES)
def test_a_graph_of_several_kinds(mode):
    """test_reversible_graph_net.py, ComplexComputeGraph: shapes, inverse, Jacobian; its branches
    and joins as one chain."""
    torch.manual_seed(0)
    flow = ReversibleSequence(
        [
            ReversibleBlock(nn.Conv2d(1, 1, 3, padding=1)),
            Squeeze(2),
            ChannelPermutation(8, seed=1),
            InvertibleConv1x1(8),
            AdditiveCoupling(nn.Tanh()),
        ],
        memory=mode,
    ).double()
    x = data(3, 2, 4, 4)
    z, log_det = flow.forward_with_log_det(x)
    assert z.shape == (3, 8, 2, 2)
    assert (flow.inverse(z) - x).abs().max() < 1e-12
    assert (log_det - log_det_by_hand(flow, x)).abs().max() < 1e-10
    assert (Reversed(flow)(z) - x).abs().max() < 1e-12
