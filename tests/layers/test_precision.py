"""Streams are widened and branches narrowed only if autocast is on."""

import pytest
import torch

from revzoo.layers.streams import narrowed, widened
from revzoo.models.components import Branch

AUTOCAST = [torch.bfloat16, torch.float16]


def test_without_autocast_everything_is_as_it_is():
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.zeros(2, dtype=dtype)
        assert widened((x,))[0] is x
        assert narrowed(x) is x


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_streams_of_autocasts_type_are_widened(dtype):
    narrow, wide, double = (torch.ones(2, dtype=d) for d in (dtype, torch.float32, torch.float64))
    with torch.autocast("cpu", dtype=dtype):
        state = widened((narrow, wide, double))
    assert [t.dtype for t in state] == [torch.float32, torch.float32, torch.float64]
    assert state[1] is wide
    assert state[2] is double


def test_streams_of_another_narrow_type_are_the_users_own():
    x = torch.ones(2, dtype=torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert widened((x,))[0] is x


@pytest.mark.parametrize("dtype", AUTOCAST)
def test_float32_is_narrowed_to_autocasts_type(dtype):
    with torch.autocast("cpu", dtype=dtype):
        assert narrowed(torch.ones(2)).dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64])
def test_what_is_not_float32_is_not_narrowed(dtype):
    x = torch.ones(2, dtype=dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert narrowed(x) is x


def test_a_region_that_switches_autocast_off():
    x = torch.ones(2)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert narrowed(x) is x
        assert widened((x.bfloat16(),))[0].dtype == torch.bfloat16


def test_a_device_that_has_no_autocast():
    x = torch.ones(2, device="meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert narrowed(x) is x


def test_gradients_keep_the_type_of_the_stream():
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        narrowed(x).sum().backward()
    assert x.grad.dtype == torch.float32


def test_the_first_normalisation_of_a_branch_computes_in_the_narrow_type():
    branch = Branch(4, out_channels=4)
    seen = []
    branch.norm1.register_forward_hook(lambda _m, args, y: seen.extend((args[0].dtype, y.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        branch(torch.randn(2, 4, 4, 4))
    branch(torch.randn(2, 4, 4, 4))
    assert seen == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
