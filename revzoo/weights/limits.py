"""Limits of mean, deviation, side and crop in files that may be untrusted: entries, checkpoints."""

from __future__ import annotations

from typing import Any

from revzoo._checks import is_count, is_number

MAX_SIDE = 2**14  # pixels; a batch of one such RGB image is 3 GiB in float32
MAX_OPTION = 10_000  # of a network: its depths, widths and sides
MAX_VALUE = 1e9  # of a mean; scales are at least 1 / MAX_VALUE, so normalised pixels fit in float32


def is_option(value: Any) -> bool:
    """Whether a network with this option, a number or lists of numbers, may be built."""
    if isinstance(value, (list, tuple)):
        return all(map(is_option, value))
    return not is_number(value) or abs(value) <= MAX_OPTION


def is_side(value: Any) -> bool:
    """Whether ``value`` may be the side of an image, in pixels."""
    return is_count(value) and value <= MAX_SIDE


def is_mean(value: Any) -> bool:
    """Whether ``value`` may be the mean of a channel."""
    return is_number(value) and abs(value) <= MAX_VALUE


def is_scale(value: Any) -> bool:
    """Whether ``value`` may be the deviation of a channel, or the largest pixel."""
    return is_number(value) and 1 / MAX_VALUE <= value <= MAX_VALUE


def is_crop(value: Any, side: int) -> bool:
    """Whether ``value`` may be a ``crop_pct``: images are resized to ``side / crop_pct``."""
    return is_number(value) and max(side / MAX_SIDE, 1 / MAX_VALUE) <= value <= 1
