"""The contents of the graph, the comparison of a replay with it, and the error if they differ."""

import gc
import weakref

import pytest
import torch
from torch import nn

from revzoo import (
    AdditiveCoupling,
    Invertible,
    ReversibleSequence,
    is_replaying,
)
from revzoo.core.saved import Versioned
from revzoo.core.tensors import unshared


def streams(width=4):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, width, generator=generator, requires_grad=True) for _ in range(2)]


def train(step, *state):
    sum(t.square().sum() for t in ReversibleSequence([step])(*state)).backward()


class Returns(Invertible):
    """Doubles its streams; its inverse returns a given result."""

    def __init__(self, inverse):
        super().__init__()
        self.told = inverse

    def forward(self, x1, x2):
        return x1 * x1.exp(), x2 * 2

    def inverse(self, y1, y2):
        return self.told(y1, y2)


@pytest.mark.parametrize(
    ("inverse", "kind", "message"),
    [
        (lambda a, b: None, TypeError, "steps.0 Returns returned a NoneType, expected a tensor"),
        (lambda a, b: a, ValueError, r"Returns returned streams of shape \[\(3, 4\)\], expected"),
        (lambda a, b: (a, b, b), ValueError, r"shape \[.*, .*, .*\], expected \[.*, .*\], those"),
        (lambda a, b: (a, 1.0), TypeError, r"returned \(Tensor, float\), expected"),
        (lambda a, b: (a[:, :2], b), ValueError, r"shape \[\(3, 2\).*expected \[\(3, 4\)"),
    ],
)
def test_an_inverse_that_returns_something_else_is_named(inverse, kind, message):
    with pytest.raises(kind, match=message):
        train(Returns(inverse), *streams())


def test_a_forward_that_returns_something_else_is_named():
    class Nothing(Invertible):
        def forward(self, x1, x2):
            return x1, None

        def inverse(self, y1, y2):
            return y1, y2

    with pytest.raises(TypeError, match=r"steps.0 Nothing returned \(Tensor, NoneType\)"):
        train(Nothing(), *streams())


def test_a_branch_that_returns_several_tensors_is_named():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match=r"Pair returned 2 values.*steps.0 AdditiveCoupling"):
        train(AdditiveCoupling(Pair()), *streams())


def test_the_graph_holds_no_activation_until_it_is_asked_for():
    kept = []

    class Watch(nn.Module):
        def forward(self, x):
            y = x.exp()
            if not is_replaying():
                kept.append(weakref.ref(y))
            return y.sin()  # saves y

    x = streams()
    gc.disable()  # reference counting alone must free it
    try:
        out = ReversibleSequence([AdditiveCoupling(Watch()), AdditiveCoupling(nn.Tanh())])(*x)
        assert kept[0]() is None
    finally:
        gc.enable()
    sum(t.sum() for t in out).backward()
    assert x[1].grad is not None


class _Filling:
    """A tape that fills the slot it is given."""

    def __init__(self):
        self.asked = []

    def replay(self, index):
        self.asked.append(index)
        self.slot.value = torch.ones(2)


def test_a_resident_result_does_not_hold_its_graph():
    x = torch.ones(3, requires_grad=True)
    y = x.exp()
    held = Versioned.of(y)
    assert held.tensor.grad_fn is None
    assert held.tensor.data_ptr() == y.data_ptr()
    assert Versioned.of(x).tensor is x


def test_a_tensor_may_be_overwritten_only_if_nobody_else_sees_its_values():
    t = torch.ones(4)
    assert unshared(t)
    view = t[:2]
    assert not unshared(t)
    assert not unshared(view)
    del view
    assert unshared(t)
    assert not unshared(torch.ones(1).expand(4))
