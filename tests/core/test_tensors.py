"""Strides: a replay has those of the forward pass."""

import pytest
import torch
from compare import LAYOUTS, error, streams
from torch import nn

from revzoo import AdditiveCoupling, Invertible, ReversibleSequence, set_memory


class Attends(nn.Module):
    """Its kernels and saved tensors depend on the strides of its input."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


class Remembers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, x):
        return self.gru(x)[0]


class Permutes(nn.Module):
    """As in ConvNeXt: channels last for the linear layers, and back; a mask drawn in between."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return nn.functional.dropout(self.linear(x.mT), 0.3).mT


def gradients_of_streams(net, mode, state, *, grid=None, seed=3):
    set_memory(net, mode, grid=grid)
    torch.manual_seed(seed)
    loss = sum((y.square() * (i + 1)).sum() for i, y in enumerate(net(*state)))
    return torch.autograd.grad(loss, [*state, *net.parameters()])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("branch", [Attends, Remembers, Permutes])
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_streams_have_the_strides_of_the_forward_pass_again(branch, layout, mode):
    """Reconstructed streams had a different layout: replays saved other tensors or drew other
    masks."""
    torch.manual_seed(0)
    mixed = [branch(8), nn.Linear(8, 8), Permutes(8), branch(8)]
    net = ReversibleSequence([AdditiveCoupling(b) for b in mixed]).double()
    state, grid = streams(layout), 14 if mode == "exact" else None
    expected = gradients_of_streams(net, "store", state, grid=grid)
    actual = gradients_of_streams(net, mode, state, grid=grid)
    assert error(actual, expected) < 1e-11


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_of_any_kind_sees_the_strides_of_the_forward_pass(layout):
    """A step's own inverse returns any layout that its operators happen to give."""

    class Watched(Invertible):
        def __init__(self):
            super().__init__()
            self.seen = []

        def forward(self, x1, x2):
            self.seen.append((x1.stride(), x2.stride()))
            return x1.exp(), x2 * x1.sigmoid()

        def inverse(self, y1, y2):
            x1 = y1.log()
            return x1.mT.contiguous().mT, (y2 / x1.sigmoid()).flip(0).flip(0)

    steps = [Watched() for _ in range(2)]
    x = streams(layout)
    seq = ReversibleSequence(steps)
    sum(y.sum() for y in seq(*x)).backward()
    for step in steps:
        first, *rest = step.seen
        assert rest == [first]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own
@pytest.mark.parametrize("mode", ["recompute", "invert", "exact"])
def test_an_expanded_stream_of_a_compiled_branch(mode):
    """It was copied into memory with overlapping elements, which copy_() refuses."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = ReversibleSequence([AdditiveCoupling(nn.Linear(8, 8)) for _ in range(3)]).double()
    state, grid = streams("expanded"), 14 if mode == "exact" else None
    expected = gradients_of_streams(net, "store", state, grid=grid)
    for step in net:
        step.branch.compile(backend="aot_eager")
    assert error(gradients_of_streams(net, mode, state, grid=grid), expected) < 1e-12
    torch._dynamo.reset()
