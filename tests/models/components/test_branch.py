import pytest
import torch
from torch import nn

from revzoo.models.components.branch import BRANCHES, BasicBranch, BottleneckBranch

BASIC = ["norm1", "relu1", "conv1", "norm2", "relu2", "conv2"]
BOTTLENECK = [*BASIC, "norm3", "relu3", "conv3"]


@pytest.mark.parametrize(("kind", "names"), [("basic", BASIC), ("bottleneck", BOTTLENECK)])
def test_layers_come_in_pre_activation_order(kind, names):
    branch = BRANCHES[kind](8, out_channels=16)
    assert [name for name, _ in branch.named_children()] == names


@pytest.mark.parametrize("kind", BRANCHES)
def test_without_first_activation_only_the_leading_norm_and_relu_are_missing(kind):
    full = BRANCHES[kind](8, out_channels=16)
    bare = BRANCHES[kind](8, out_channels=16, activate_first=False)
    assert list(full.state_dict())[5:] == list(bare.state_dict())
    assert [n for n, _ in bare.named_children()] == [n for n, _ in full.named_children()][2:]


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("size", [8, 7])
def test_stride_halves_rounding_up(kind, size):
    branch = BRANCHES[kind](8, out_channels=16, stride=2)
    assert branch(torch.randn(2, 8, size, size)).shape == (2, 16, 4, 4)


def test_the_first_convolution_carries_the_stride():
    for branch in (
        BasicBranch(4, out_channels=8, stride=2),
        BottleneckBranch(4, out_channels=8, stride=2),
    ):
        strides = [m.stride for m in branch if isinstance(m, nn.Conv2d)]
        assert strides == [(2, 2)] + [(1, 1)] * (len(strides) - 1)


def test_inner_width_of_a_bottleneck_is_a_quarter_of_its_output():
    branch = BottleneckBranch(8, out_channels=64)
    widths = [(m.in_channels, m.out_channels) for m in branch if isinstance(m, nn.Conv2d)]
    assert widths == [(8, 16), (16, 16), (16, 64)]


@pytest.mark.parametrize("kind", BRANCHES)
def test_dropout_precedes_the_last_convolution_and_leaves_the_keys_alone(kind):
    plain = BRANCHES[kind](8, out_channels=16)
    dropping = BRANCHES[kind](8, out_channels=16, dropout=0.25)
    assert list(dropping.state_dict()) == list(plain.state_dict())
    *_, relu, dropout, conv = dropping
    assert isinstance(relu, nn.ReLU)
    assert isinstance(dropout, nn.Dropout)
    assert dropout.p == 0.25
    assert isinstance(conv, nn.Conv2d)


@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.parametrize("activate_first", [True, False])
def test_the_stream_that_a_branch_reads_is_left_alone(kind, activate_first):
    branch = BRANCHES[kind](8, out_channels=8, activate_first=activate_first, dropout=0.5)
    x = torch.randn(2, 8, 4, 4)
    before = x.clone()
    branch(x)
    assert x._version == 0
    assert torch.equal(x, before)


@pytest.mark.parametrize("out_channels", [6, 0])
def test_a_bottleneck_of_no_quarter_width_is_refused(out_channels):
    with pytest.raises(ValueError, match=f"out_channels={out_channels}.*multiple of 4"):
        BottleneckBranch(8, out_channels=out_channels)
