"""Zero channels: appended, stripped, checked; the couplings that read them."""

import pytest
import torch
from compare import assert_same_training, conv_branch, images, twin
from torch.nn import functional

from revzoo import ChannelPadding, ReversibleSequence, SpatialPadding, set_memory
from revzoo.layers.coupling import AdditiveCoupling
from revzoo.layers.padding import PaddedCoupling
from revzoo.layers.streams import Merge, Split


def test_zeros_come_last_and_are_stripped():
    x = torch.randn(2, 3, 4, 5)
    y = ChannelPadding(5)(x)
    assert y.shape == (2, 8, 4, 5)
    assert torch.equal(y[:, :3], x)
    assert not y[:, 3:].any()
    back = ChannelPadding(5).inverse(y)
    assert torch.equal(back, x)


def test_refusals():
    with pytest.raises(ValueError, match="extra=0"):
        ChannelPadding(0)
    with pytest.raises(ValueError, match=r"shape \(1, 2, 2, 2\).*more than 2 channels"):
        ChannelPadding(2).inverse(torch.zeros(1, 2, 2, 2))


@pytest.mark.parametrize("mode", ["offload", "recompute", "invert"])
def test_inside_a_sequence(mode):
    torch.manual_seed(0)
    steps = [ChannelPadding(2), Split(), *(PaddedCoupling(conv_branch(4)) for _ in range(2))]
    steps += [AdditiveCoupling(conv_branch(4)), Merge()]
    net = ReversibleSequence(steps).double()
    assert_same_training(twin(net, mode), twin(net, "store"), images(channels=6))


def test_couplings_that_read_zeros_keep_their_input_where_others_are_inverted():
    coupling = PaddedCoupling(conv_branch(4))
    expected = {"store": "store", "exact": "exact", "invert": "recompute"}
    for mode, read in expected.items():
        set_memory(coupling, mode)
        assert coupling.memory == read


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [(1, 0), (1, 2, 0, 1), 2])
def test_frames_are_torchs_and_are_cropped(mode, padding):
    x = torch.randn(2, 3, 5, 6)[..., : 6 if padding != (1, 0) else 4]
    x = x[:, :, 0] if padding == (1, 0) else x
    value = 3.0 if mode == "constant" else 0.0
    frame = SpatialPadding(padding, mode=mode, value=value, streams=1)
    pads = (2,) * 4 if padding == 2 else padding
    y = frame(x)
    assert torch.equal(y, functional.pad(x, pads, mode, value or None))
    assert torch.equal(frame.inverse(y), x)
    assert frame.exact == (value == 0)


def test_frames_that_are_refused():
    for padding in ((), (1,), (1, -1)):
        with pytest.raises(ValueError, match="expected two numbers, 0 or more"):
            SpatialPadding(padding)
    with pytest.raises(ValueError, match="mode=mirror: expected one of constant"):
        SpatialPadding(1, mode="mirror")
    with pytest.raises(ValueError, match="repeats the image"):
        SpatialPadding(1, mode="reflect", value=1.0)
    with pytest.raises(ValueError, match="larger than the frame"):
        SpatialPadding(1, streams=1).inverse(torch.zeros(1, 1, 2, 5))
    assert not SpatialPadding(1, value=0.3).exact


@pytest.mark.parametrize("shape", [(2, 3, 8), (2, 3)])
def test_neither_channels_nor_the_batch_are_padded(shape):
    """One number pads two dimensions, which in a signal include the channels."""
    with pytest.raises(ValueError, match="neither batch nor channels"):
        SpatialPadding(1, streams=1)(torch.zeros(shape))
