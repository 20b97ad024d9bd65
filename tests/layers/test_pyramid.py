"""Couplings among several streams: gradients as in ``store``, however the backward pass runs."""

import copy

import pytest
import torch
from compare import error
from torch import nn

from revzoo import ReversibleSequence, set_memory
from revzoo.core.replay import PairCall
from revzoo.layers.pyramid import (
    ChannelCopies,
    LevelCoupling,
    MergePyramid,
    NewLevel,
    SplitLevels,
)

SHAPES = ((2, 4, 8, 8), (2, 6, 4, 4), (2, 2, 2, 2))


def down(i, j):
    return nn.Conv2d(SHAPES[i][1], SHAPES[j][1], 2 ** (j - i), stride=2 ** (j - i))


def up(i, j):
    convolution = nn.Conv2d(SHAPES[i][1], SHAPES[j][1], 1)
    return nn.Sequential(convolution, nn.Tanh(), nn.Upsample(scale_factor=2 ** (i - j)))


def net():
    torch.manual_seed(0)
    pairs = [(1, 0), (2, 0), (2, 1), (0, 1), (0, 2), (1, 2), (2, 0)]
    steps = [
        LevelCoupling((up if j > i else down)(j, i), target=i, source=j, streams=3)
        for i, j in pairs
    ]
    return ReversibleSequence(steps).double()


def levels():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(s, dtype=torch.float64, generator=generator) for s in SHAPES]


def of_all(outputs):
    return sum(y.square().sum() for y in outputs)


def gradients(model, mode, run, grid=None):
    model = copy.deepcopy(model)
    set_memory(model, mode, grid=grid)
    x = [t.requires_grad_() for t in levels()]
    return run(model, x, [*x, *model.parameters()])


def plain(model, x, wanted):
    return torch.autograd.grad(of_all(model(*x)), wanted)


def twice(model, x, wanted):
    loss = of_all(model(*x))
    torch.autograd.grad(loss, wanted, retain_graph=True)
    return torch.autograd.grad(loss, wanted)


def one_output(model, x, wanted):
    found = torch.autograd.grad(model(*x)[1].sum(), wanted, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, found, strict=True)]


def one_after_the_other(model, x, wanted):
    y = model(*x)
    parts = [torch.autograd.grad(t.sum(), x, retain_graph=True, allow_unused=True) for t in y]
    return [g for part in parts for g in part if g is not None]


def early_outputs(model, x, wanted):
    first = model[:3](*x)
    return torch.autograd.grad(of_all(first) + of_all(model[3:](*first)), wanted)


def without_a_gradient(model, x, wanted):
    x = [t.detach() if i else t for i, t in enumerate(x)]
    return torch.autograd.grad(of_all(model(*x)), [x[0], *model.parameters()])


def patched(model, x, wanted):
    for step in model:
        step.forward = step.forward  # code that the tape cannot trust to be the class's
    return plain(model, x, wanted)


def hooked(model, x, wanted):
    for step in model:
        step.register_forward_hook(lambda *_: None)
    return plain(model, x, wanted)


RUNS = [
    plain,
    twice,
    one_output,
    one_after_the_other,
    early_outputs,
    without_a_gradient,
    patched,
    hooked,
]


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_gradients_equal_store(mode, run):
    model, grid = net(), "auto" if mode == "exact" else None
    found, expected = gradients(model, mode, run), gradients(model, "store", run, grid)
    assert error(found, expected) <= (0 if mode == "exact" else 1e-12)


@pytest.mark.parametrize("mode", ["invert", "exact"])
def test_a_function_gets_the_two_streams_alone(mode):
    model = net()
    set_memory(model, mode)
    x = [t.requires_grad_() for t in levels()]
    y = model[:1](*x)
    assert isinstance(y[1].grad_fn.call, PairCall)
    for t in (y[0], y[2]):
        assert t.grad_fn is None if mode == "invert" else t.grad_fn.name() == "_RoundedBackward"


def test_a_coupling_adds_to_its_target():
    model, x = net(), levels()
    y = model[:1](*x)
    assert torch.allclose(y[1], x[1] + model[0].branch(x[0]), atol=1e-7)
    assert all(torch.allclose(y[i], x[i], atol=1e-7) for i in (0, 2))
    for back, known in zip(model.inverse(*model(*x)), levels(), strict=True):
        assert torch.allclose(back, known, atol=1e-7)


@pytest.mark.parametrize(
    ("step", "shapes", "expected"),
    [
        (SplitLevels(2), SHAPES[:2], [(2, 2, 8, 8)] * 2 + [(2, 3, 4, 4)] * 2),
        (NewLevel(5, levels=2), SHAPES[:2], [*SHAPES[:2], (2, 5, 2, 2)]),
        (MergePyramid((4, 6, 2)), SHAPES, [(2, 4 * 16 + 6 * 4 + 2, 2, 2)]),
        (ChannelCopies(10, of=4), SHAPES[:1], [(2, 10, 8, 8)]),
    ],
)
def test_moves_are_undone(step, shapes, expected):
    state = levels()[: len(shapes)]
    y = step(*state)
    y = (y,) if isinstance(y, torch.Tensor) else y
    assert [tuple(t.shape) for t in y] == expected
    assert len(y) == step.outputs
    back = step.inverse(*y)
    back = (back,) if isinstance(back, torch.Tensor) else back
    assert all(map(torch.equal, back, state))


def test_copies_repeat_the_channels_in_order():
    x = levels()[0]
    assert torch.equal(ChannelCopies(6, of=4)(x), torch.cat((x, x[:, :2]), 1))
