"""Reversed: directions swapped, containers step by step, the same parameters."""

import pytest
import torch
from compare import conv_net, error, images, linear_net, twin
from torch import nn

import revzoo
from revzoo import (
    AdditiveCoupling,
    InvertibleConv1x1,
    NotInvertibleError,
    Reversed,
    ReversibleSequence,
    Squeeze,
    Step,
    set_memory,
)


def test_directions_are_swapped():
    net, x = conv_net().eval(), images()
    back = Reversed(net)
    assert torch.equal(back(x), net.inverse(x))
    assert torch.equal(back.inverse(x), net(x))
    assert error([Reversed(back)(x)], [net(x)]) == 0
    assert {id(p) for p in back.parameters()} == {id(p) for p in net.parameters()}


def test_containers_are_reversed_step_by_step():
    inner = ReversibleSequence([Squeeze(2), ReversibleSequence([InvertibleConv1x1(32)])])
    kinds = [type(s.step).__name__ for s in Reversed(ReversibleSequence([*conv_net(1), inner]))]
    assert kinds == ["InvertibleConv1x1", "Squeeze", "AdditiveCoupling", "AdditiveCoupling"]


def test_the_dimension_is_kept():
    net = ReversibleSequence(list(linear_net()), dim=-1).double()
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    assert error([Reversed(net)(net(x))], [x]) < 1e-13


@pytest.mark.parametrize("mode", ["offload", "recompute", "invert", "exact"])
def test_training_equals_store(mode):
    # Dropout: both evaluations of a replay must draw the forward pass's masks.
    results = []
    grid = 14 if mode == "exact" else None
    for m in (mode, "store"):
        net = twin(Reversed(conv_net(dropout=0.5)), "store")
        set_memory(net, m, grid=grid)
        torch.manual_seed(7)
        x = images().requires_grad_()
        y = net(x)
        results.append(torch.autograd.grad(y.sin().sum(), [x, *net.parameters()]))
        results[-1] += (*net.buffers(), torch.get_rng_state())
    assert error(*([t.double() for t in r] for r in results)) < (1e-30 if grid else 1e-10)


def test_refusals():
    class Halve(Step):
        def forward(self, x1, x2):
            return x1[:, ::2], x2[:, ::2]

    with pytest.raises(TypeError, match="Reversed got a Linear, expected an Invertible"):
        Reversed(nn.Linear(2, 2))
    with pytest.raises(NotInvertibleError, match=r"steps\.1 Halve has no inverse"):
        Reversed(ReversibleSequence([AdditiveCoupling(nn.Tanh()), Halve()]))


class _Scaled(revzoo.ReversibleSequence):
    def forward(self, *state, **context):
        return 2 * super().forward(*state, **context)

    def inverse(self, *state, **context):
        return super().inverse(*(y / 2 for y in state), **context)


def test_a_container_that_overrides_its_directions_is_one_step():
    """Its own forward and inverse were ignored."""
    sequence = _Scaled([revzoo.AdditiveCoupling(nn.Linear(2, 2))], memory="invert").double()
    x = torch.randn(3, 4, dtype=torch.float64)
    back = revzoo.Reversed(sequence, memory="store")
    assert torch.allclose(back(sequence(x)), x)


def test_an_attribute_called_dim_is_not_a_dimension():
    class Wide(revzoo.Invertible):
        dim = 64  # a width

        def forward(self, x1, x2):
            return x2, x1

        def inverse(self, y1, y2):
            return y2, y1

    x = torch.randn(3, 4)
    assert torch.equal(revzoo.Reversed(Wide())(x), torch.cat((x[:, 2:], x[:, :2]), 1))


class Log(revzoo.Invertible):
    """A replay of its inverse does more than the call, after the last tensor that it saves."""

    streams = 1
    forward = torch.log

    def inverse(self, y):
        x = y.exp()
        return x.exp().log() if revzoo.is_replaying() else x


def test_a_step_that_is_replayed_to_its_end_is_so_reversed():
    """As any step with code that we do not know."""
    net = Reversed(Log(), memory="recompute")
    y = net(torch.randn(2, 3, requires_grad=True))
    with pytest.raises(revzoo.ReplayMismatchError, match="save more tensors"):
        y.sum().backward()


def test_reversing_leaves_the_module_its_modes_and_names():
    encoder = ReversibleSequence([AdditiveCoupling(nn.Tanh())], memory="exact")
    decoder = Reversed(encoder)
    assert (encoder[0].memory, encoder[0].grid, encoder[0].label) == ("exact", "auto", "steps.0")
    assert (decoder[0].memory, decoder[0].grid) == ("exact", "auto")
    x = torch.randint(-9, 9, (2, 4)) / 8
    assert torch.equal(decoder(encoder(x)), x)
