import pytest
import torch

from revzoo.models.stem import Stem


@pytest.mark.parametrize("in_chans", [1, 3])
@pytest.mark.parametrize("out_streams", [1, 2])
def test_streams_share_the_channels(in_chans, out_streams):
    stem = Stem(in_chans, channels=8, out_streams=out_streams, downsample=False)
    streams = stem(torch.randn(2, in_chans, 6, 6))
    assert [s.shape for s in streams] == [(2, 8 // out_streams, 6, 6)] * out_streams


def test_streams_are_the_halves_of_the_normalised_activation():
    stem = Stem(3, channels=8, out_streams=2, downsample=False).eval()
    stem.norm.running_mean.normal_()
    x = torch.randn(2, 3, 6, 6)
    expected = torch.relu(stem.norm(stem.conv(x)))
    x1, x2 = stem(x)
    assert torch.equal(x1, expected[:, :4])
    assert torch.equal(x2, expected[:, 4:])
    assert expected.min() == 0 < expected.max()


@pytest.mark.parametrize(("size", "expected"), [(32, 8), (33, 9)])
def test_the_imagenet_stem_quarters_the_size(size, expected):
    stem = Stem(3, channels=8, out_streams=2, downsample=True)
    assert stem.conv.kernel_size == (7, 7)
    assert stem(torch.randn(1, 3, size, size))[0].shape == (1, 4, expected, expected)
