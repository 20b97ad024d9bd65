"""Products of words with scales, and their inverse."""

import pytest
import torch

from revzoo.core.saved import saving_for_replay
from revzoo.layers.scaled_words import SMALLEST, divide, multiply


def scales(*values):
    return torch.tensor(values).view(1, -1, 1, 1)


def there_and_back(words, scale):
    saved = []
    with saving_for_replay(saved):
        product, shrinks = multiply(words, scale)
    return product, shrinks, saved, divide(product, scale, saved)


@pytest.mark.parametrize("bits", [32, 64])
def test_a_product_is_rounded_down_and_undone(bits):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.int32 if bits == 32 else torch.int64
    limit = 2 ** (bits - 3)
    words = torch.randint(-limit, limit, (5, 6, 40, 40), generator=generator, dtype=dtype)
    words[0, :, 0, :8] = torch.tensor([0, 1, -1, 2, -2, 3, limit - 1, -limit], dtype=dtype)
    scale = scales(0.5, -0.7312, SMALLEST, -1.9, 1.0, 0.0123)
    product, _, _, back = there_and_back(words, scale)
    assert torch.equal(back, words)
    # Python's integers are exact
    for channel, value in enumerate(scale.flatten().tolist()):
        numerator, denominator = value.as_integer_ratio()
        if denominator > 2**31:  # rounded to multiples of 2**-31
            numerator, denominator = round(value * 2**31), 2**31
        sign = 1 if value > 0 else -1
        for x, y in zip(words[0, channel, 0, :9], product[0, channel, 0, :9], strict=True):
            assert int(y) == sign * int(x) * abs(numerator) // denominator


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ([0.5, 0.5], 1),  # bits for each value
        ([0.75, -0.5], 1),
        ([0.4999, 0.25], 2),
        ([0.5, 0.25], 1.5),
        ([1.0, 0.5], 0.5),
        ([1.0, -1.5], 0),
        ([SMALLEST, 1.0], 5),
    ],
)
def test_only_the_bits_that_a_channel_drops_are_kept(values, kept):
    words = torch.arange(-512, 512, dtype=torch.int32).view(2, 2, 16, 16)
    _, shrinks, saved, back = there_and_back(words, scales(*values))
    assert torch.equal(back, words)
    assert sum(t.numel() for t in saved[1::2]) * 8 == kept * words.numel()
    assert shrinks == (max(map(abs, values)) < 1)


def test_without_a_replay_nothing_is_kept():
    words = torch.arange(8, dtype=torch.int32).view(1, 2, 2, 2)
    assert torch.equal(multiply(words, scales(0.5, 0.5))[0], words >> 1)
