"""Linear maps into more features: torch's own maps with a weight that loses nothing."""

import pytest
import torch
from torch.nn import functional

import revzoo
from revzoo import InjectiveLinear, PatchConv, Squeeze


def tokens(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("matrix", ["orthogonal", "plu"])
def test_it_is_torchs_linear_map_with_a_left_inverse(matrix):
    """Asked at https://github.com/silvandeleemput/memcnn/issues/63."""
    torch.manual_seed(0)
    layer = InjectiveLinear(3, 5, matrix=matrix, streams=1).double()
    with torch.no_grad():
        layer.bias.normal_()
        for p in layer.matrix.parameters():
            p += 0.1 * torch.randn_like(p)
    weight = layer.matrix()[:, :3]
    x = tokens(10, 3)
    y = layer(x)
    torch.testing.assert_close(y, functional.linear(x, weight, layer.bias))
    torch.testing.assert_close(layer.inverse(y), x)
    assert torch.linalg.matrix_rank(weight) == 3


def test_the_inverse_of_the_orthogonal_one_is_the_pseudo_inverse():
    """InvTorch's; also for values outside the range of the map."""
    layer = InjectiveLinear(3, 5, streams=1).double()
    with torch.no_grad():
        layer.matrix.skew.normal_()
    y = tokens(10, 5)
    expected = y @ torch.linalg.pinv(layer.matrix()[:, :3]).mT
    torch.testing.assert_close(layer.inverse(y), expected)


@pytest.mark.parametrize("size", [(2,), (2, 3), (2, 1, 3)])
def test_patches_are_a_convolution_with_stride(size):
    torch.manual_seed(0)
    conv = PatchConv(2, 16, size, streams=1).double()
    with torch.no_grad():
        conv[1].bias.normal_()
    x = tokens(3, 2, *(2 * b for b in size))
    weight = conv[1].matrix()[:, : conv[1].size].reshape(16, 2, *size)
    plain = (functional.conv1d, functional.conv2d, functional.conv3d)[len(size) - 1]
    y = conv(x)
    torch.testing.assert_close(y, plain(x, weight, conv[1].bias, stride=size))
    torch.testing.assert_close(conv.inverse(y), x)


def test_refusals():
    with pytest.raises(ValueError, match="out_features=2: expected at least in_features=3"):
        InjectiveLinear(3, 2)
    with pytest.raises(ValueError, match="expected multiples of streams=2"):
        InjectiveLinear(4, 5)
    with pytest.raises(ValueError, match="matrix=svd"):
        InjectiveLinear(4, 4, matrix="svd")
    with pytest.raises(ValueError, match=r"got streams of shape \(1, 1\), \(1, 3\): expected 2"):
        InjectiveLinear(4, 4)(torch.zeros(1, 1), torch.zeros(1, 3))
    with pytest.raises(ValueError, match="out_features=8: expected at least in_features=12"):
        PatchConv(3, 8, 2, streams=1)
    assert isinstance(PatchConv(3, 12, 2, streams=1)[0], Squeeze)


def test_patches_name_their_own_channels():
    for channels, streams, x in ((3, 1, (1, 5, 8, 8)), (4, 2, (1, 8, 8, 8))):
        with pytest.raises(ValueError, match=rf"PatchConv got .*expected {channels // streams} ch"):
            PatchConv(channels, 64, 4, streams=streams)(torch.zeros(x))


def test_channels_that_do_not_split_are_refused_when_the_layer_is_made():
    with pytest.raises(ValueError, match="in_channels=3: expected a multiple of streams=2"):
        revzoo.PatchConv(3, 64, 4)
    with pytest.raises(ValueError, match="out_features='5'"):
        revzoo.InjectiveLinear(4, "5")
