"""The values that the guard samples, in every layout."""

import math

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from revzoo.core.guard import SAMPLED, _places, operand_of, sample, values_in

LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "turned": lambda t: t.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0),
    "with gaps": lambda t: torch.stack((t, t + 1), -1)[..., 0],
}


def stream(dtype=torch.float32):
    t = torch.randn(3, 5, 6, 7, generator=torch.Generator().manual_seed(0))
    return (100 * t).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64])
@pytest.mark.parametrize("replayed", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replay_may_have_another_layout(layout, replayed, dtype):
    t = LAYOUTS[layout](stream(dtype))
    values = sample((t,), ())[0]
    assert torch.equal(values_in(LAYOUTS[replayed](stream(dtype))), values)
    changed = stream(dtype)
    changed[1] *= -1
    assert not torch.equal(values_in(LAYOUTS[replayed](changed)), values)


def test_a_sample_does_not_keep_the_stream():
    t = stream()
    values = sample((t,), ())[0]
    storage = StorageWeakRef(t.untyped_storage())
    del t
    assert values.numel()
    assert storage.expired()


@pytest.mark.parametrize("count", [1, 2, 63, 255, 256, 257, 4095, 4096, 4097, 65_536, 786_432])
def test_a_sample_is_spread_over_the_whole_stream(count):
    places = _places(count, torch.device("cpu"))
    gap = count / len(places)
    assert len(places) == min(count, SAMPLED)
    ends = torch.cat((torch.tensor([-1]), places, torch.tensor([count])))
    gaps = ends.diff()
    assert gaps.max() <= 2 * gap + 1


SHAPES = [
    *[(batch, channels, side, side) for batch in (2, 8, 128) for channels in (3, 16, 64)
      for side in (4, 8, 32)],
    (2, 256, 8, 8),
    (2048, 16, 32, 32),
    (8, 128, 56, 56),
    (16, 197, 384),
    (64, 512, 100),
]  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_a_sample_touches_every_image_and_every_channel(shape):
    """A stride would visit the same columns or channels of every image."""
    places = torch.unravel_index(_places(torch.Size(shape).numel(), torch.device("cpu")), shape)
    for dim in range(len(shape)):
        expected = shape[dim] * (1 - math.exp(-len(places[0]) / shape[dim]))  # of random places
        assert len(places[dim].unique()) >= 0.9 * expected - 1


def test_the_operand_is_the_stream_that_was_added_to():
    """A stream's error was scaled by a log-determinant a thousand times its size."""
    x, total, z = torch.ones(4, 3), torch.full((4,), 5000.0), torch.ones(4, 3)
    y, sums, indices = x * 2, total * 2, torch.ones(4, 3, dtype=torch.int64)
    assert operand_of(x, (x, total, z), (y, sums, indices, z)) is y
    assert operand_of(total, (x, total, z), (y, sums, indices, z)) is sums
    assert operand_of(x, (x, z), (z, sums)) is x
