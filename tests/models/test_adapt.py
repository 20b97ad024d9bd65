"""Weights for images of other channels."""

import torch

from revzoo.models.adapt import adapt_channels


def test_one_channel_is_the_sum_and_more_are_repeated_at_the_same_scale():
    weight = torch.tensor([1.0, 2.0, 6.0]).view(1, 3, 1, 1)
    assert adapt_channels(weight, 1).flatten().tolist() == [9]
    assert adapt_channels(weight, 4).flatten().tolist() == [0.75, 1.5, 4.5, 0.75]
    assert adapt_channels(weight, 6).sum() == 9
    assert adapt_channels(weight, 2).flatten().tolist() == [1.5, 3]
    assert adapt_channels(weight[:, :1], 3).sum() == 1
