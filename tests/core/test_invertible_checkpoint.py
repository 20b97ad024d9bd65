"""Arbitrary invertible functions: several inputs and outputs, other arguments, joined chains."""

import functools

import pytest
import torch
from compare import error, leaf_rows
from torch import nn

from revzoo import invertible_checkpoint, is_replaying


def vectors(*shape, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def scale(x, factor, *, shift):
    return (x * factor).asinh() + shift


def unscale(y, factor, *, shift):
    return (y - shift).sinh() / factor


def test_other_arguments_and_keywords():
    results = []
    for call in (functools.partial(invertible_checkpoint, scale, unscale), scale):
        x, shift = vectors(3, 4), vectors(4, seed=2)
        y = x
        for _ in range(3):
            y = call(y, 2.0, shift=shift)
        assert isinstance(y, torch.Tensor)
        results.append(torch.autograd.grad(y.square().sum(), [x, shift]))
    assert error(*results) < 1e-12


def shear(a, b):
    return a + b.sin(), b.exp()


def unshear(c, d):
    b = d.log()
    return c - b.sin(), b


def test_several_inputs_and_outputs():
    results = []
    for call in (functools.partial(invertible_checkpoint, shear, unshear), shear):
        a, b = vectors(3, 4), vectors(3, 4, seed=2)
        c, d = call(*call(a, b))
        results.append(torch.autograd.grad((c * d.sin()).sum(), [a, b]))
    assert error(*results) < 1e-12


def test_inputs_are_freed_and_outputs_kept():
    replays = []

    def fn(x):
        replays.append(is_replaying())
        return x.exp()

    x = vectors(3)
    y = invertible_checkpoint(fn, torch.log, x)
    z = invertible_checkpoint(fn, torch.log, y)
    z.sum().backward()
    assert replays == [False, False, True, True]
    torch.testing.assert_close(x.grad, (x.exp().exp() * x.exp()).detach())


@pytest.mark.parametrize("wrap", ["module", "method", "closure", "partial"])
def test_modules_of_the_function_are_replayed_faithfully(wrap):
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(1).double()

        def amount(self):
            return self.norm(torch.arange(4.0, dtype=torch.float64)[:, None]).squeeze(1)

        def forward(self, x):
            return x + self.amount()

        def inverse(self, y):
            return y - self.amount()

    shift = Shift()
    fn = {
        "module": shift,
        "method": shift.forward,
        "closure": lambda x: shift(x),
        "partial": functools.partial(shift.forward),
    }[wrap]
    y = invertible_checkpoint(fn, shift.inverse, vectors(3, 4))
    shift.eval()
    y.square().sum().backward()
    assert shift.norm.num_batches_tracked == 1


def test_no_tensor():
    with pytest.raises(ValueError, match="no tensor among its positional arguments"):
        invertible_checkpoint(scale, unscale, 1.0, factor=vectors(1))


def test_no_function():
    with pytest.raises(TypeError, match="fn is 3, expected a module or a function"):
        invertible_checkpoint(3, unscale, vectors(2))
    with pytest.raises(TypeError, match="inverse is None, expected a module or a function"):
        invertible_checkpoint(scale, None, vectors(2))


def test_an_inverse_without_a_result_is_named():
    """The error named the function instead."""
    y = invertible_checkpoint(torch.exp, lambda y: None, vectors(3))
    with pytest.raises(TypeError, match=r"^the inverse of \S*exp \w+ returned a NoneType"):
        y.sum().backward()


@pytest.mark.parametrize("way", ["children", "get_submodule", "_modules"])
def test_statistics_of_submodules_that_a_function_walks_over(way):
    """As above, if the model that calls invertible_checkpoint finds them by walking."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8).double()

        def find(self):
            if way == "children":
                return next(iter(self.children()))
            return self.get_submodule("norm") if way == "get_submodule" else self._modules["norm"]

        def forward(self, *state):
            return invertible_checkpoint(
                lambda a, b: (b, a + self.find()(b).tanh()),
                lambda a, b: (b - self.find()(a).tanh(), a),
                *state,
            )

    net, x = Model(), leaf_rows()
    net(x, x.sin())[1].square().sum().backward()
    assert net.norm.num_batches_tracked == 1
