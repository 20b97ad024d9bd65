"""Learned rotations: the Cayley transform, its couplings, memory modes."""

import math

import pytest
import torch
from compare import error

import revzoo
from revzoo.layers.orthogonal import OrthogonalMix

MODES = ("recompute", "invert", "exact")


def mix(*shape, streams=1, takes=(0,), **keywords):
    weight = 0.3 * torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return OrthogonalMix(weight, streams=streams, takes=takes, **keywords)


def values(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_a_rotation_of_two_channels_is_one_by_an_angle():
    step = OrthogonalMix(torch.tensor([[0.0, math.tan(0.4)], [0.0, 0.0]]))  # half the angle
    expected = torch.tensor([[math.cos(0.8), -math.sin(0.8)], [math.sin(0.8), math.cos(0.8)]])
    assert torch.allclose(step.matrix()[0], expected, atol=1e-6)


@pytest.mark.parametrize("rotation", ["cayley", "exp"])
def test_the_matrix_is_a_rotation(rotation):
    q = mix(3, 6, 6, rotation=rotation).matrix().double()
    assert torch.allclose(q @ q.mT, torch.eye(6).double().expand(3, 6, 6), atol=1e-6)
    assert torch.allclose(torch.linalg.det(q), torch.ones(3).double(), atol=1e-6)


def test_each_block_of_channels_has_its_own_matrix():
    step, x = mix(3, 4, 4), values(2, 12, 5)
    q = step.matrix()
    expected = torch.cat([q[i] @ x[:, 4 * i : 4 * i + 4] for i in range(3)], dim=1)
    assert torch.allclose(step(x)[0], expected, atol=1e-6)
    back = mix(3, 4, 4, back=True)
    assert torch.allclose(back(step(x)[0])[0], x, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (5, 5), (16, 16), (3, 4, 4)])
@pytest.mark.parametrize("back", [False, True])
def test_training_equals_store_and_the_couplings_are_the_product(shape, back):
    step = mix(*shape, back=back)
    channels = shape[-1] * (shape[0] if len(shape) == 3 else 1)
    x, found = values(2, channels, 3, 5), {}
    for mode in ("store", "store on the grid", *MODES):
        seq = revzoo.ReversibleSequence([step], memory=mode.split()[0])
        if "grid" in mode:
            revzoo.set_memory(seq, "store", grid="auto")
        leaf = x.clone().requires_grad_()
        step.zero_grad()
        y = seq(leaf)
        (y.square() * values(*y.shape)).sum().backward()
        found[mode] = [y.detach(), leaf.grad, step.weight.grad]
    assert all(map(torch.equal, found["exact"], found["store on the grid"]))
    for mode in MODES:
        assert error(found[mode], found["store"]) < 2e-5, mode


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_returns_every_bit_of_unequal_streams(dtype):
    step = mix(7, 7, streams=3, takes=(2, 0)).to(dtype)
    seq = revzoo.ReversibleSequence([step], memory="exact")
    state = [torch.round(values(2, c, 6) * 2**20).to(dtype) / 2**20 for c in (4, 2, 3)]
    with torch.no_grad():
        outputs = seq(*state)
        assert all(map(torch.equal, seq.inverse(*outputs), state))
    assert torch.equal(outputs[1], state[1])
    together = step.matrix()[0].to(dtype) @ torch.cat((state[2], state[0]), dim=1)
    assert torch.allclose(torch.cat((outputs[2], outputs[0]), dim=1), together, atol=1e-5)


def test_the_matrix_exponential_does_not_fit_exact():
    with pytest.raises(ValueError, match="only the Cayley transform"):
        revzoo.ReversibleSequence([mix(4, 4, rotation="exp")], memory="exact")
