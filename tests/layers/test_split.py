"""One tensor into two streams and back."""

import pytest
import torch
from compare import assert_same_training, error, images, twin
from torch import nn

from revzoo import (
    AdditiveCoupling,
    Reversed,
    ReversibleBlock,
    ReversibleSequence,
    Squeeze,
    check_inverse,
)
from revzoo.layers.streams import Merge, Split


@pytest.mark.parametrize("dim", [1, -1, 2])
def test_the_halves_along_dim(dim):
    x = torch.arange(2.0 * 4 * 6 * 8).view(2, 4, 6, 8)
    x1, x2 = Split(dim)(x)
    half = x.shape[dim] // 2
    assert torch.equal(x1, x.narrow(dim, 0, half))
    assert torch.equal(x2, x.narrow(dim, half, half))
    assert torch.equal(Split(dim).inverse(x1, x2), x)
    assert torch.equal(Merge(dim)(x1, x2), x)
    assert all(torch.equal(a, b) for a, b in zip(Merge(dim).inverse(x), (x1, x2), strict=True))


@pytest.mark.parametrize(
    "cut", [lambda x, dim: Split(dim)(x), lambda x, dim: Merge(dim).inverse(x)]
)
def test_an_odd_number_of_channels(cut):
    with pytest.raises(ValueError, match=r"\(2, 3, 4\) .* along dim=1: expected an even number"):
        cut(torch.zeros(2, 3, 4), 1)


@pytest.mark.parametrize(("shape", "dim"), [((2, 4), 2), ((2, 4), -3), ((4,), 1)])
def test_a_tensor_without_that_dim(shape, dim):
    x = torch.zeros(shape)
    for call in (lambda: Split(dim)(x), lambda: Merge(dim)(x, x), lambda: Merge(dim).inverse(x)):
        with pytest.raises(ValueError, match=rf"^dim={dim}: got .*\({shape[0]},.* expected a dim"):
            call()


def test_an_error_names_the_argument():
    for cut in (Split, Merge):
        with pytest.raises(ValueError, match=r"^dim='1': expected a dimension"):
            cut(dim="1")
        with pytest.raises(ValueError, match=r"^parts=3: expected .* two whole numbers"):
            cut(parts=3)
    with pytest.raises(ValueError, match=r"^dim=None: expected a dimension"):
        ReversibleSequence([], dim=None)
    with pytest.raises(ValueError, match=r"^split=\(1,\): expected .* two whole numbers"):
        ReversibleSequence([], split=(1,))


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


@pytest.mark.parametrize("mode", ["store", "recompute", "invert", "exact"])
def test_parts_of_another_size(mode):
    """Three channels: one and two, through blocks and a squeeze."""
    torch.manual_seed(0)
    branches = [nn.Conv2d(a, b, 3, padding=1) for a, b in ((2, 1), (1, 2), (8, 4), (4, 8))]
    f, g, h, k = (nn.Sequential(b, nn.Tanh()) for b in branches)
    steps = [ReversibleBlock(f, g), Squeeze(2), ReversibleBlock(h, k)]
    net = ReversibleSequence(steps, memory=mode, split=(1, 2)).double()
    x = images(channels=3)
    y = net(x)
    assert y.shape == (3, 12, 3, 3)
    assert (net.inverse(y) - x).abs().max() < (1e-3 if mode == "exact" else 1e-12)
    assert torch.equal(y, torch.cat(net(x[:, :1], x[:, 1:]), dim=1))
    assert_same_training(net, twin(net, "store"), x, tolerance=1e-2 if mode == "exact" else 1e-12)
    assert check_inverse(twin(net, "store"), x).worst(torch.float64) < 1e-12
    assert net[1:].split == Reversed(net).split == (1, 2)


def test_parts_that_do_not_fit():
    with pytest.raises(ValueError, match="expected a multiple of 3 of channels there"):
        Split(1, (1, 2))(torch.zeros(1, 4))
    for parts in ((1,), (0, 1), (1, 2.0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"expected .* two whole numbers of at least 1"):
            Split(1, parts)
    swaps = ReversibleSequence([AdditiveCoupling(nn.Linear(2, 1))], split=(1, 2))
    with pytest.raises(ValueError, match=r"expected sizes of 1 to 2 there.*swaps the streams"):
        swaps(torch.zeros(1, 3))


def test_a_nested_tensor_is_refused():
    rows = [torch.randn(n, 8) for n in (2, 4)]
    with pytest.raises(ValueError, match=r"nested tensor .*: pass two streams"):
        Split(-1)(torch.nested.nested_tensor(rows, layout=torch.jagged))
