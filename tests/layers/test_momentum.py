"""The momentum block: formula, inverse, gradients in every mode."""

import pytest
import torch
from compare import conv_branch, error, images, twin
from torch import nn

import revzoo
from revzoo import MomentumBlock, ReversibleSequence, set_memory


def net(*, depth=4, gamma=0.9):
    torch.manual_seed(0)
    return ReversibleSequence(
        [MomentumBlock(conv_branch(), gamma) for _ in range(depth)], memory="store"
    ).double()


def state(*, channels=4, v=None):
    x = images(channels=channels)
    return x.clone().requires_grad_(), (0.3 * images(channels=channels, seed=2) if v is None else v)


def gradients(model, x, v):
    y, w = model(x, v)
    (y.square().sum() + (3 * w).sin().sum()).backward()
    return [x.grad, *(p.grad for p in model.parameters())]


def test_the_formula():
    model = net(depth=2, gamma=0.7).eval()
    x, v = state()
    found = model(x, v)
    for block in model:
        v = 0.7 * v + 0.3 * block.branch(x)
        x = x + v
    assert all(torch.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(found, (x, v), strict=True))


@pytest.mark.parametrize("gamma", [0.01, 0.5, 0.9])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
@pytest.mark.parametrize("start", ["zeros", "velocity"])
def test_training_equals_store(mode, gamma, start):
    model = net(gamma=gamma, depth=2 if gamma == 0.01 else 4)
    other = twin(model, mode)
    set_memory(model, "store", grid="auto" if mode == "exact" else None)
    v = torch.zeros(3, 4, 6, 6, dtype=torch.float64) if start == "zeros" else None
    expected, actual = (gradients(each, *state(v=v)) for each in (model, other))
    assert error(actual, expected) <= (1e-8 if mode == "invert" else 0)
    means = (torch.stack([b.sum() for b in each.buffers()]) for each in (model, other))
    assert torch.equal(*means)  # a batch counts once


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_undoes_to_the_last_bit(dtype):
    model = net(depth=12).to(dtype)
    set_memory(model, "exact")
    gradients(model, *(t.detach().to(dtype).requires_grad_() for t in state()))
    assert {*revzoo.drift(model).values()} == {0.0}


def test_the_inverse():
    """Asked at https://github.com/michaelsdr/momentumnet/issues/19."""
    model = net().eval()
    x, v = state()
    with torch.no_grad():
        back = model.inverse(*model(x, v))
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(back, (x, v), strict=True))
    assert revzoo.is_invertible(model, x, v)


def test_gradcheck():
    model = ReversibleSequence(
        [MomentumBlock(nn.Sequential(nn.Linear(3, 3), nn.Tanh())) for _ in range(2)],
        memory="invert",
    ).double()
    x, v = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda x, v: sum(model(x, v)), (x, v))


def test_its_reversal_does_not_fit_exact():
    """Mode exact took it, and each backward pass raised a DriftError."""
    model = ReversibleSequence([MomentumBlock(nn.Linear(4, 4))], memory="exact")
    back = revzoo.Reversed(model)
    assert [step.memory for step in back] == ["invert"]
    sum(t.sum() for t in back(*torch.randn(2, 3, 4).requires_grad_())).backward()
    with pytest.raises(ValueError, match="the inverse of its step leaves the grid"):
        set_memory(back, "exact")


def test_errors():
    for gamma in (0, 1, "a"):
        with pytest.raises(ValueError, match=r"gamma=.*: expected a number in \[0.001, 1\)"):
            MomentumBlock(nn.Identity(), gamma)
    with pytest.raises(ValueError, match=r"returned shape \(2, 3\) for a stream of shape \(2, 4\)"):
        MomentumBlock(nn.Linear(4, 3))(torch.zeros(2, 4), torch.zeros(2, 4))
