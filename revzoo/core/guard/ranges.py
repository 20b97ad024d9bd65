"""The range of fixed-point streams, beyond which their sums wrap around.

NOTE [ Streams beyond their range ]
    A stream beyond the range of its grid reads as NaN, and so does every value computed from it.
    Each sum notes its :class:`~revzoo.core.fixedpoint.words.Amax` in its own backward, so every
    gradient that flows through it is checked, in every mode. It also notes the amaxes of its step's
    streams. A replay notes the amaxes of the state that it starts from. A partial graph needs both,
    since it may not reach the earlier sums. Where no gradient is needed (frozen steps,
    ``torch.no_grad()``), the sequence checks its steps in the forward pass, or, if later steps are
    trained, after their backward pass. The first value beyond the range stays with the words
    (``Fixed.amax``), so later sums on them report it, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from revzoo.core.fixedpoint.words import MAX_BITS, Amax, Scale, amaxes_of, fraction_bits
from revzoo.core.invertible import State, name_of

_FEWEST_UNITS = 1024  # the largest value of a chain should span so many units of the grid


class RangeError(RuntimeError):
    """A stream left the range in which its fixed-point sums are exact.

    Attributes:
        grid: fractional bits that fit, for :func:`revzoo.set_memory`; None if none do.
        reason: which stream left which range, without remedies.
    """

    grid: int | None = None
    reason: str = ""


def check_range(state: State) -> None:
    """Raise a RangeError if sums of the words of ``state`` wrap around (host sync)."""
    beyond = first_beyond_range(magnitudes_of(amaxes_of(state)))
    if beyond is not None:
        raise range_error(*beyond)


def read(scalars: Sequence[Tensor]) -> list[float]:
    """Read scalars: one transfer for each type and device."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, t in enumerate(scalars):
        groups.setdefault((t.dtype, t.device), []).append(i)
    values = [0.0] * len(scalars)
    for indices in groups.values():
        for i, value in zip(
            indices, torch.stack([scalars[i] for i in indices]).tolist(), strict=True
        ):
            values[i] = value
    return values


class _Magnitude(NamedTuple):
    amax: Amax
    value: float
    end: float  # of the grid's range


def magnitudes_of(amaxes: list[Amax]) -> list[_Magnitude]:
    """The magnitudes of streams in forward order, with all sums before them (host sync)."""
    # sums in several steps report the same streams
    every = {a: None for amax in amaxes for a in amax.with_before()}
    ordered = sorted(every, key=lambda amax: amax.number)
    # the stream after the last sum, too: a sum before it is checked by the sum after it
    values = read([amax.value for amax in ordered])
    ends = [(i, end) for i, amax in enumerate(ordered) for end in amax.after]
    for (i, _), end in zip(ends, read([end for _, end in ends]), strict=True):
        known = values[i]
        values[i] = max(known, abs(end)) if known == known and end == end else known
    scales = list(dict.fromkeys(amax.scale for amax in ordered))
    limits = dict(zip(scales, read([scale.end for scale in scales]), strict=True))
    return [_Magnitude(a, v, limits[a.scale]) for a, v in zip(ordered, values, strict=True)]


def first_beyond_range(magnitudes: list[_Magnitude]) -> tuple[Amax, float] | None:
    """The first stream beyond its range, and its magnitude.

    Finite magnitudes go first: a stream beyond its range turns later streams into NaN.
    """
    beyond = [
        # a NaN in one stream makes the scale of all streams NaN
        (amax, math.nan if math.isnan(end) else value)
        for amax, value, end in magnitudes
        if not value < end
    ]
    return next((b for b in beyond if math.isfinite(b[1])), beyond[0] if beyond else None)


def warn_of_coarse_grids(magnitudes: list[_Magnitude]) -> None:
    """Warn if even the largest values of a chain have few bits: the grid rounds them."""
    by_scale: dict[Scale, list[_Magnitude]] = {}
    for magnitude in magnitudes:
        by_scale.setdefault(magnitude.amax.scale, []).append(magnitude)
    for scale, of_scale in by_scale.items():
        largest, end = max(m.value for m in of_scale), of_scale[0].end
        # the unit of int32 words is 2^-30 of the range: reading it stalls, so only if it matters
        if 0 < largest < _FEWEST_UNITS * 2.0**-30 * end:
            unit = float(scale.down)
            if largest < _FEWEST_UNITS * unit:
                _warn_of_rounding(of_scale[-1].amax, unit, end / largest)


def _warn_of_rounding(amax: Amax, unit: float, room: float) -> None:
    bits = fraction_bits(amax.scale)
    finer = min(MAX_BITS, bits + math.floor(math.log2(room)) - 4)  # 16 times the largest value
    remedy = f", or choose revzoo.set_memory(model, 'exact', grid={finer})" if finer > bits else ""
    warnings.warn(
        f"{name_of_amax(amax)} and the steps before it: all values are below "
        f"{_FEWEST_UNITS * unit:.1g}, but grid={bits} rounds them to multiples of {unit:.1g}: "
        f"scale the input{remedy}",
        RuntimeWarning,
        stacklevel=3,
    )


def name_of_amax(amax: Amax) -> str:
    """The step that reported the amax, for messages."""
    return "a step" if amax.step is None else name_of(amax.step)


def range_error(amax: Amax, value: float) -> RangeError:
    """The error for a stream of this magnitude; names the step and a grid that fits."""
    end = float(amax.scale.end)
    name = name_of_amax(amax)
    bits = -1 if math.isnan(end) else fraction_bits(amax.scale)
    if not math.isfinite(value):
        # values beyond the range read as NaN, too
        limit = f" below {end:g} (with grid={bits}; fewer bits allow more)" if bits >= 0 else ""
        return RangeError(
            f"{name}: a stream or a value added to it is {value:g}, expected finite values"
            f"{limit}: check the data, normalise the branches, or lower the learning rate if the "
            "training diverges"
        )
    # one bit in reserve, since training changes the values
    excess = math.ceil(math.log2(value / end)) + 1
    fitting = bits - excess if excess <= bits else None
    remedy = (
        "normalise the branches, or lower the learning rate if the training diverges"
        if fitting is None
        else "normalise the branches, or choose fewer bits: "
        f'revzoo.set_memory(model, "exact", grid={fitting}), or less if later steps need it'
    )
    reason = (
        f"{name}: a stream or a value added to it reached {value:.3g}, but with grid={bits} "
        f"sums are exact only below {end:g}"
    )
    error = RangeError(f"{reason}; {remedy}")
    error.grid, error.reason = fitting, reason
    return error
