"""One tensor into two streams and back."""

import pytest
import torch
from compare import error

from revzoo import ReversibleSequence, check_inverse
from revzoo.layers.split import Merge, Split


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_the_halves_along_dim(dim):
    x = torch.arange(2.0 * 4 * 6 * 8).view(2, 4, 6, 8)
    x1, x2 = Split(dim)(x)
    half = x.shape[dim] // 2
    assert torch.equal(x1, x.narrow(dim, 0, half))
    assert torch.equal(x2, x.narrow(dim, half, half))
    assert torch.equal(Split(dim).inverse(x1, x2)[0], x)
    assert torch.equal(Merge(dim)(x1, x2)[0], x)
    assert all(torch.equal(a, b) for a, b in zip(Merge(dim).inverse(x), (x1, x2), strict=True))


@pytest.mark.parametrize(("shape", "dim"), [((2, 3, 4), 1), ((2, 4), 2), ((2, 4), -3), ((4,), 1)])
def test_what_cannot_be_halved(shape, dim):
    with pytest.raises(ValueError, match=rf"\({shape[0]},.* along dim {dim}: expected an even"):
        Split(dim)(torch.zeros(shape))


def test_an_error_of_zero_in_every_type():
    net = ReversibleSequence([Split(), Merge(), Split(-1), Merge(-1)])
    report = check_inverse(net, torch.randn(2, 4, 6))
    assert len(report) == 3 * 5
    assert all(row.absolute == 0 for row in report)


@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_gradients_pass_through(mode):
    net = ReversibleSequence([Split(), Merge()], memory=mode)
    x = torch.randint(-9, 9, (3, 4, 2), generator=torch.Generator().manual_seed(0)).float()
    (gradient,) = torch.autograd.grad(net(x.requires_grad_()).square().sum(), x)
    assert error([gradient], [2 * x.detach()]) == 0


def test_halves_are_dense_as_reconstructed_streams_are():
    x = torch.randn(2, 4, 3, 3)
    for kind in (torch.contiguous_format, torch.channels_last):
        y = x.to(memory_format=kind)
        for half in (*Split()(y), *Merge().inverse(y)):
            assert half.is_contiguous(memory_format=kind)
        assert torch.equal(torch.cat(Split()(y), dim=1), x)
