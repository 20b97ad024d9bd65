import torch

from revzoo.layers.split import Merge, Split


def test_halves_are_dense_as_reconstructed_streams_are():
    x = torch.randn(2, 4, 3, 3)
    for kind in (torch.contiguous_format, torch.channels_last):
        y = x.to(memory_format=kind)
        for half in (*Split()(y), *Merge().inverse(y)):
            assert half.is_contiguous(memory_format=kind)
        assert torch.equal(torch.cat(Split()(y), dim=1), x)
