"""Invertible batch normalisation: its statistics, and the map that its inverse undoes."""

import pytest
import torch
from compare import error, images, twin
from torch import nn

from revzoo import (
    AdditiveCoupling,
    InvertibleBatchNorm,
    Reversed,
    ReversibleSequence,
    check_inverse,
    set_memory,
)

MODES = ["offload", "recompute", "invert"]


def net(**options):
    torch.manual_seed(0)
    steps = [
        AdditiveCoupling(nn.Conv2d(4, 4, 1)),
        InvertibleBatchNorm(8, **options),
        AdditiveCoupling(nn.Tanh()),
        InvertibleBatchNorm(8, **options),
    ]
    return ReversibleSequence(steps).double()


def batch(seed=1):
    return 2 + 3 * images(seed=seed)


def test_it_normalises_by_averages_that_include_the_batch():
    norm, x = InvertibleBatchNorm(8, momentum=0.25, streams=1).double(), batch()
    y = norm(x)
    var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
    mean, var = 0.25 * mean, 0.75 + 0.25 * var
    assert error([norm.running_mean, norm.running_var], [mean, var]) < 1e-14
    expected = (x - mean.reshape(-1, 1, 1)) / (var + 1e-5).sqrt().reshape(-1, 1, 1)
    assert error([y], [expected]) < 1e-14


def test_a_whole_share_is_batch_normalisation():
    x = batch()
    y = InvertibleBatchNorm(8, momentum=1.0, streams=1).double()(x)
    assert error([y], [nn.BatchNorm2d(8, affine=False).double()(x)]) < 1e-14


def test_evaluation_uses_the_averages_as_they_are():
    model = net()
    model(batch())
    before = [b.clone() for b in model.buffers()]
    y = model.eval()(batch(2))
    assert error(list(model.buffers()), before) == 0
    parts = [model.eval()(x[None])[0] for x in batch(2)]
    assert error(parts, list(y)) < 1e-14


@pytest.mark.parametrize("training", [True, False])
def test_the_inverse_undoes_the_last_pass(training):
    model = net().train(training)
    for seed in (1, 2):
        x = batch(seed)
        y = model(x)
    buffers = [b.clone() for b in model.buffers()]
    assert error([model.inverse(y)], [x]) < 1e-13
    assert error(list(model.buffers()), buffers) == 0
    assert check_inverse(model, x, dtypes=[torch.float64]).worst(torch.float64) < 1e-13


def test_the_inverse_of_an_earlier_pass_is_off_in_training():
    model, x = net(), batch()
    y = model(x)
    model(batch(2))
    assert error([model.inverse(y)], [x]) > 1e-3


@pytest.mark.parametrize("momentum", [0.1, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_two_passes_before_their_backward_passes(mode, momentum):
    # By the time of the first replay the averages have moved on.
    results = []
    for m in (mode, "store"):
        model = twin(net(momentum=momentum), m)
        x1, x2 = batch(1).requires_grad_(), batch(2).requires_grad_()
        loss = model(x1).sin().sum() + 2 * model(x2).sin().sum()
        gradients = torch.autograd.grad(loss, [x1, x2, *model.parameters()])
        results.append([*gradients, *model.buffers()])
    assert error(*results) < 1e-10


def test_walking_back_over_it_without_recording():
    # A backward pass from before the layer, whose averages have moved on.
    results = []
    for mode in ("invert", "store"):
        model, x = twin(net(), mode), batch().requires_grad_()
        front = ReversibleSequence([model[0]], memory=mode)
        s = front(*x.chunk(2, dim=1))
        kept = ReversibleSequence([model[1]], memory=mode)(*s)
        model[1](*batch(2).chunk(2, dim=1))
        results.append(torch.autograd.grad(s[1].sin().sum(), [x, *front.parameters()]))
        assert kept[0].grad_fn is not None
    assert error(*results) < 1e-10


@pytest.mark.parametrize("mode", ["store", "recompute"])
def test_in_any_order_and_twice(mode):
    results = []
    for m in (mode, "store"):
        model, x = twin(net(), m), batch().requires_grad_()
        loss = model(x).sin().sum()
        (first,) = torch.autograd.grad(loss, [x], create_graph=True)
        results.append([first.detach(), *torch.autograd.grad(first.square().sum(), [x])])
    assert error(*results) < 1e-10


def test_log_det_in_training_is_that_of_the_averages_with_the_batchs_gradient():
    norm, x = InvertibleBatchNorm(8, momentum=0.25, streams=1).double(), batch().requires_grad_()
    _, log_det = norm.forward_with_log_det(x)
    var = 0.75 + 0.25 * x.var((0, 2, 3), correction=0)
    expected = -0.5 * 36 * (var + 1e-5).log().sum()
    assert torch.allclose(log_det, expected.expand(3))
    actual, wanted = (torch.autograd.grad(v, [x]) for v in (log_det[0], expected))
    assert error(actual, wanted) < 1e-12


def test_reversed_only_in_evaluation():
    model, x = net(), batch()
    back = Reversed(model)
    with pytest.raises(ValueError, match=r"ReversedStep got a InvertibleBatchNorm in training.*ev"):
        back(x)
    back.eval()
    assert error([back(model(x))], [x]) < 1e-13


def test_refusals():
    for momentum in (0, -1, 1.5):
        with pytest.raises(ValueError, match=f"momentum={momentum}: expected a number in"):
            InvertibleBatchNorm(2, momentum=momentum)
    with pytest.raises(ValueError, match="eps=0"):
        InvertibleBatchNorm(2, eps=0)


def test_statistics_of_the_batch_are_torchs():
    """Values, gradients and running statistics, over a few steps."""
    ours = InvertibleBatchNorm(4, statistics="batch", streams=1, momentum=0.2).double()
    theirs = nn.BatchNorm2d(4, affine=False, momentum=0.2).double()
    for seed in range(3):
        x = torch.randn(5, 4, 3, 3, generator=torch.Generator().manual_seed(seed)).double()
        x.requires_grad_()
        y, z = ours(x), theirs(x)
        torch.testing.assert_close(y, z)
        found = [torch.autograd.grad(t.pow(3).sum(), x)[0] for t in (y, z)]
        torch.testing.assert_close(*found)
        torch.testing.assert_close(ours.inverse(y), x)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    torch.testing.assert_close(ours.inverse(ours(x)), x)
    assert list(ours.state_dict()) == ["running_mean", "running_var"]


def test_statistics_of_the_batch_with_several_passes_before_a_backward_pass():
    """Each replay inverts with its own batch's statistics. The outputs do not contain them."""
    found = []
    for mode in ("invert", "store"):
        torch.manual_seed(0)
        steps = [AdditiveCoupling(nn.Conv2d(2, 2, 1)), InvertibleBatchNorm(4, statistics="batch")]
        net = ReversibleSequence([*steps, AdditiveCoupling(nn.Tanh())]).double()
        set_memory(net, mode)
        xs = [torch.randn(5, 4, 3, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        loss = sum(net(x * k).pow(3).sum() for k, x in enumerate(xs, 1))
        found.append(torch.autograd.grad(loss, [*xs, *net.parameters()]))
    assert error(*found) < 1e-12


def test_one_value_per_channel_has_no_statistics():
    with pytest.raises(ValueError, match=r"batch of shape \(1, 4\).*at least two"):
        InvertibleBatchNorm(4, statistics="batch", streams=1)(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="expected one of running, batch"):
        InvertibleBatchNorm(4, statistics="moving")
