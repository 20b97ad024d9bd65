"""ActNorm: its values, and that it initialises exactly once."""

import copy

import pytest
import torch
from compare import error, images, twin
from torch import nn

from revzoo import (
    ActNorm,
    AdditiveCoupling,
    Reversed,
    ReversibleSequence,
    Split,
    check_inverse,
    set_memory,
)

MODES = ["store", "offload", "recompute", "invert"]


def net(mode="invert"):
    torch.manual_seed(0)
    steps = [ActNorm(8), AdditiveCoupling(nn.Conv2d(4, 4, 1)), ActNorm(8)]
    return ReversibleSequence(steps, memory=mode).double()


def batch(seed=1, *, scale=3.0):
    return 2 + scale * images(seed=seed)


def parameters(model):
    return [p.detach().clone() for p in model.parameters()]


def test_the_first_batch_comes_out_normalised():
    norm = ActNorm(8, streams=1).double()
    x = batch() * torch.arange(8.0).reshape(-1, 1, 1)  # the first channel is constant
    y = norm(x)
    var, mean = torch.var_mean(y, (0, 2, 3), correction=0)
    assert mean.abs().max() < 1e-12
    assert (var[1:] - 1).abs().max() < 1e-5
    assert y.isfinite().all()
    assert norm.initialised
    scale, shift = norm.log_scale.exp(), norm.shift
    expected = x * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)
    torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("mode", MODES)
def test_once_in_every_mode(mode):
    model = net(mode)
    loss = model(batch()).square().mean()
    first = parameters(model)
    loss.backward()  # replays the initialising pass
    assert error(parameters(model), first) == 0
    model(batch(2, scale=9.0)).sum().backward()
    model.inverse(batch(3))
    assert error(parameters(model), first) == 0
    assert all(model[i].initialised for i in (0, 2))


@pytest.mark.parametrize("mode", MODES[1:])
def test_gradients_of_the_initialising_pass_equal_store(mode):
    results = []
    for m in (mode, "store"):
        model, x = twin(net(), m), batch().requires_grad_()
        y = model(x)
        results.append(torch.autograd.grad(y.sin().sum(), [x, *model.parameters()]))
        results[-1] += tuple(parameters(model))
    assert error(*results) < 1e-10


@pytest.mark.parametrize("mode", ["recompute", "invert"])
def test_after_an_outer_checkpoint(mode):
    model = net(mode)
    x = batch().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    first = parameters(model)
    y.sum().backward()
    assert error(parameters(model), first) == 0


def test_a_checkpoint_decides():
    trained = net()
    trained(batch())
    fresh = net()
    fresh.load_state_dict(trained.state_dict())
    fresh(batch(2, scale=9.0))
    assert error(parameters(fresh), parameters(trained)) == 0
    unset = net().state_dict()
    fresh.load_state_dict(unset)
    assert not fresh[0].initialised
    fresh(batch(2, scale=9.0))  # such a state initialises again
    assert fresh[0].initialised
    assert error(parameters(fresh), parameters(trained)) > 0.1
    assert error(parameters(copy.deepcopy(fresh)), parameters(fresh)) == 0


def test_evaluation_does_not_initialise():
    model = net().eval()
    before = parameters(model)
    model(batch())
    check_inverse(model, batch())
    check_inverse(model.train(), batch())
    model.inverse(batch())
    model(batch()[:0])
    Reversed(model).inverse(batch())
    assert error(parameters(model), before) == 0
    with torch.no_grad():
        model(batch())
    assert model[0].initialised


def test_a_graph_from_before_the_initialisation_is_stale():
    model = net().eval()
    y = model(batch().requires_grad_())
    model.train()(batch())
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        y.sum().backward()


def test_inside_a_branch():
    results = []
    for mode in ("invert", "store"):
        torch.manual_seed(0)
        branch = nn.Sequential(nn.Conv2d(4, 4, 1), ActNorm(4, streams=1), nn.Tanh())
        model = ReversibleSequence([AdditiveCoupling(branch)], memory=mode).double()
        model(batch()).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
        assert branch[1].initialised
    assert error(*results) < 1e-10


def test_a_first_batch_that_is_not_finite():
    model = net()
    x = batch()
    x[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"steps\.0 ActNorm got a first training batch"):
        model(x)
    assert not model[0].initialised
    model(batch())
    assert model[0].initialised


def test_narrow_streams():
    model = ReversibleSequence([Split(), ActNorm(8)]).bfloat16()
    set_memory(model, "store")
    y1, y2 = model(batch().bfloat16())
    y = torch.cat((y1, y2), 1).float()
    assert (y.var((0, 2, 3)) - 1).abs().max() < 0.1
    assert y1.dtype == torch.bfloat16


def test_a_single_value_per_channel_has_no_spread():
    with pytest.raises(ValueError, match=r"shape \(1, 4, 1, 1\).*at least two"):
        ActNorm(4, streams=1)(torch.randn(1, 4, 1, 1))


@pytest.mark.parametrize("unbiased", [False, True])
def test_the_deviation_with_and_without_correction(unbiased):
    x = torch.randn(5, 3, dtype=torch.float64)
    y = ActNorm(3, unbiased=unbiased, streams=1).double()(x)
    assert (y.std(0, correction=int(unbiased)) - 1).abs().max() < 1e-5
    assert (y.std(0, correction=int(not unbiased)) - 1).abs().min() > 1e-2


def test_a_rollback_in_place_takes_the_next_batch():
    """A flag in Python stayed set: the next batch was not normalised."""
    norm = ActNorm(8, streams=1)
    fresh = copy.deepcopy(norm.state_dict())
    norm(5 * torch.randn(16, 8))
    with torch.no_grad():
        for name, value in norm.state_dict().items():
            value.copy_(fresh[name])
    assert norm(5 * torch.randn(16, 8) + 2).std().item() == pytest.approx(1, abs=0.1)
    assert norm.initialised


@pytest.mark.parametrize("trained", [True, False], ids=["trained state", "fresh state"])
def test_a_functional_call_uses_the_state_that_it_gets(trained):
    """A flag in Python belonged to the module instead of its state."""
    norm = ActNorm(8, streams=1)
    state = copy.deepcopy(norm.state_dict())
    if trained:
        state["initialised"].fill_(True)
    else:
        norm(torch.randn(16, 8))
    x = 5 * torch.randn(16, 8) + 2
    y = torch.func.functional_call(norm, state, x)
    if trained:
        assert torch.equal(y, x)
        assert not norm.initialised
        y = norm(x)
    assert y.std().item() == pytest.approx(1, abs=0.1)
