import contextlib

import pytest
import torch
from torch import nn

from revzoo.models import create_model
from revzoo.profiling.count import forward_flops


def test_flops_of_a_convolution_are_two_per_multiplication():
    conv = nn.Conv2d(3, 5, 3, padding=1, bias=False)
    assert forward_flops(conv, torch.zeros(4, 3, 8, 8)) == 2 * 3 * 5 * 9 * 64


def test_counting_flops_leaves_the_model_as_it_was():
    model = create_model("revnet38", units=(1, 1, 1))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    forward_flops(model, torch.randn(2, 3, 8, 8))
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("channels", [3, 4])
def test_counting_flops_keeps_the_mode_of_each_module(channels):
    """After an error, too: images of 4 channels do not fit."""
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5).eval())
    with contextlib.suppress(RuntimeError):
        forward_flops(model, torch.zeros(2, channels, 8, 8))
    assert [m.training for m in model.modules()] == [True, True, False]
