"""Layers of the convolutional networks, and stochastic depth under couplings."""

import copy
import math

import pytest
import torch
from compare import assert_same_training, conv_branch, images, twin
from torch import nn

from revzoo import AdditiveCoupling, ReversibleBlock, ReversibleSequence, set_memory
from revzoo.core.kernels import round_to_grid
from revzoo.models.components import (
    ACTIVATIONS,
    RELEASE,
    Branch,
    NormAct,
    adapt_channels,
    conv2d,
    drop_path_rates,
    stochastic_depth,
)

# Standard deviation of a unit normal truncated at +-2: sqrt(1 - 4 phi(2) / (2 Phi(2) - 1)).
PHI = math.exp(-2.0) / math.sqrt(2 * math.pi)
TRUNCATED_STD = math.sqrt(1 - 4 * PHI / math.erf(math.sqrt(2)))


@pytest.mark.parametrize(("kernel_size", "out_channels"), [(3, 128), (1, 64)])
def test_weights_are_a_normal_cut_at_two_nominal_deviations(kernel_size, out_channels):
    torch.manual_seed(0)
    weight = conv2d(128, out_channels=out_channels, kernel_size=kernel_size).weight
    nominal = math.sqrt(2 / (kernel_size**2 * out_channels))
    standard_error = 1 / math.sqrt(weight.numel())
    assert weight.std().item() == pytest.approx(TRUNCATED_STD * nominal, rel=4 * standard_error)
    assert abs(weight.mean().item()) < 4 * nominal * standard_error
    assert 1.9 * nominal < weight.abs().max().item() <= 2 * nominal * (1 + 1e-6)


@pytest.mark.parametrize("kernel_size", [1, 7])
@pytest.mark.parametrize(("stride", "expected"), [(1, 9), (2, 5)])
def test_size_is_divided_by_the_stride_rounding_up(kernel_size, stride, expected):
    layer = conv2d(3, out_channels=4, kernel_size=kernel_size, stride=stride)
    assert layer.bias is None
    assert layer(torch.randn(1, 3, 9, 9)).shape == (1, 4, expected, expected)


def test_one_channel_is_the_sum_and_more_are_repeated_at_the_same_scale():
    weight = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    assert adapt_channels(weight, 1).flatten().tolist() == [9]
    assert adapt_channels(weight, 4).flatten().tolist() == [0.75, 1.5, 4.5, 0.75]
    assert adapt_channels(weight, 6).sum() == 9
    assert adapt_channels(weight, 2).flatten().tolist() == [1.5, 3]
    assert adapt_channels(weight[:, :1], 3).sum() == 1


def test_running_mean_keeps_99_percent_as_tensorflow_decay_099_does():
    norm = RELEASE.normalise(1)
    norm(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
    assert norm.running_mean.item() == pytest.approx(0.99 * 0.0 + 0.01 * 2.0)


def test_epsilon_is_one_thousandth():
    norm = RELEASE.normalise(1).eval()
    norm.running_var.zero_()
    assert norm(torch.ones(1, 1, 1, 1)).item() == pytest.approx(1000**0.5)


def test_groups_have_16_channels_or_what_divides():
    norms = [NormAct("group").normalise(channels) for channels in (64, 56, 16, 3)]
    assert [norm.num_groups for norm in norms] == [4, 7, 1, 3]
    assert isinstance(NormAct("none").normalise(3), nn.Identity)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_leave_their_input_alone(name):
    x = torch.randn(5)
    before = x.clone()
    assert not torch.equal(NormAct(activation=name).activate()(x), before)
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("field", "value", "known"), [("norm", "layer", "group"), ("activation", "rely", "relu")]
)
def test_unknown_names_are_refused(field, value, known):
    with pytest.raises(ValueError, match=f"{field}={value}.*{known}"):
        NormAct(**{field: value})


BASIC = ["norm1", "relu1", "conv1", "norm2", "relu2", "conv2"]
BOTTLENECK = [*BASIC, "norm3", "relu3", "conv3"]


@pytest.mark.parametrize(("kernels", "names"), [((3, 3), BASIC), ((1, 3, 1), BOTTLENECK)])
def test_layers_come_in_pre_activation_order(kernels, names):
    full = Branch(8, kernels=kernels, out_channels=16)
    assert [name for name, _ in full.named_children()] == names
    bare = Branch(8, kernels=kernels, out_channels=16, activate_first=False)
    assert [name for name, _ in bare.named_children()] == names[2:]
    dropping = Branch(8, kernels=kernels, out_channels=16, dropout=0.25, drop_path=0.5)
    assert list(dropping.state_dict()) == list(full.state_dict())
    *_, relu, dropout, conv, _ = dropping
    assert (type(relu), dropout.p, type(conv)) == (nn.ReLU, 0.25, nn.Conv2d)


@pytest.mark.parametrize("kernels", [(3, 3), (1, 3, 1)])
def test_the_first_convolution_has_the_stride(kernels):
    branch = Branch(8, kernels=kernels, out_channels=16, stride=2)
    assert branch(torch.randn(2, 8, 7, 8)).shape == (2, 16, 4, 4)
    strides = [m.stride for m in branch if isinstance(m, nn.Conv2d)]
    assert strides == [(2, 2)] + [(1, 1)] * (len(strides) - 1)


@pytest.mark.parametrize("activate_first", [True, False])
def test_the_stream_that_a_branch_reads_is_left_alone(activate_first):
    branch = Branch(8, out_channels=8, activate_first=activate_first, dropout=0.5)
    x = torch.randn(2, 8, 4, 4)
    before = x.clone()
    branch(x)
    assert x._version == 0
    assert torch.equal(x, before)


def test_rates_rise_linearly_to_the_last():
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 1) == [0]


def test_whole_images_are_dropped_and_the_others_scaled():
    drop = stochastic_depth(0.75)
    torch.manual_seed(0)
    y = drop(torch.ones(400, 2, 3, 3)).flatten(1)
    assert ((y == 0).all(1) | (y == 4).all(1)).all()
    assert (y[:, 0] == 0).float().mean().item() == pytest.approx(0.75, abs=0.07)
    assert torch.equal(drop.eval()(torch.ones(4, 2)), torch.ones(4, 2))


def dropping(rate):
    return nn.Sequential(*conv_branch(), stochastic_depth(rate))


@pytest.mark.parametrize("mode", ["invert", "recompute", "offload"])
def test_replays_drop_the_same_images(mode):
    torch.manual_seed(0)
    blocks = [ReversibleBlock(dropping(0.5), dropping(0.5)) for _ in range(3)]
    reference = ReversibleSequence(blocks, memory="store").double()
    assert_same_training(twin(reference, mode), reference, images(batch=6))


def test_on_a_grid_reconstruction_and_gradients_stay_exact():
    # 1 / 0.7 is not a multiple of the grid: the value is rounded after the division
    torch.manual_seed(0)
    exact = ReversibleSequence([AdditiveCoupling(dropping(0.3)) for _ in range(6)], memory="exact")
    stored = copy.deepcopy(exact)
    set_memory(stored, "store", grid="auto")
    x = images(batch=6).float()
    found = []
    for sequence in (exact, stored):
        torch.manual_seed(5)
        y = sequence(x)
        found.append((y, *torch.autograd.grad(y.square().sum(), list(sequence.parameters()))))
    assert all(map(torch.equal, *found))
    sequence = exact.eval()
    assert torch.equal(sequence.inverse(sequence(x)), round_to_grid(x, 23))
