"""Parses and formats numbers of bytes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from revzoo._checks import is_number

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 2 ** (10 * (i + 1)) for i, letter in enumerate("kmgtp")},
    **{f"{letter}b": 10 ** (3 * (i + 1)) for i, letter in enumerate("kmgtp")},
}


def bytes_from(value: int | str, *, name: str = "budget", least: int = 1) -> int:
    """Parse a number, or a string such as ``4GiB`` (4 * 2**30) or ``4GB`` (4 * 10**9).

    Raises:
        ValueError: it is not a number of bytes, or less than ``least``, which is 0 or 1.
    """
    count: Any = value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:e\d+)?)\s*([kmgtp]i?b|b|)\s*", value.lower())
        count = float(match[1]) * _UNITS[match[2]] if match else None
    if is_number(count) and least <= count < 2**63:
        return int(count)
    raise ValueError(
        f"{name}={value!r}: expected {'a positive' if least else '0 or a positive'} number of "
        "bytes, such as 2**32, '4GiB' or '500MB'"
    )


_SIZES = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def in_units(count: float) -> str:
    """Format bytes in three digits: ``99.2 MiB``, ``18 GiB``."""
    unit, size = next(((u, s) for u, s in _SIZES if count >= s), ("bytes", 1))
    return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:,.0f} {unit}"


def in_one_unit(largest: float) -> Callable[[float], str]:
    """A function like :func:`in_units` for several sizes: in KiB, MiB or, from 4 GiB on, in GiB.

    Sizes in several units cannot be compared at a glance. Small ones read ``<0.01 MiB``. In MiB
    beside a size of 1 GiB, sizes have no decimals.
    """
    unit, size = _SIZES[0 if largest >= 2**32 else 1 if largest >= 2**20 else 2]
    digits = 0 if largest >= 2**30 and unit == "MiB" else 2
    least = 10**-digits

    def sized(count: float) -> str:
        tiny = 0 < count / size < least / 2
        return f"{f'<{least:g}' if tiny else f'{count / size:,.{digits}f}'} {unit}"

    return sized


def peak_note(extra: int = 0, sized: Callable[[float], str] = in_units) -> str:
    """A line with the contents of a counted peak, the same in audits, plans and benches.

    Args:
        extra: the bytes added for an optimiser's state.
        sized: formats them.
    """
    if extra:
        return f"peak: weights, gradients, input, activations, and {sized(extra)} for the optimiser"
    return "peak: weights, gradients, input and activations; not the optimiser's state"
