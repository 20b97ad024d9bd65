"""The range of fixed-point streams, beyond which their sums wrap around.

NOTE [ Streams beyond their range ]
    A sample beyond the range of its grid reads as NaN, and so does every value computed from it.
    The scale of its chain logs the peaks of measured sums (rule 6 of NOTE [ Words and floats ]).

    1. Every gradient that flows through a sum, or through a replay, notes the chain's scale. We
       read the logs of all noted scales once, after the backward pass, and raise a RangeError.
    2. A chain whose outputs need no gradient is checked where it ends: by the sequence, or by the
       step that was called alone. In evaluation mode it then runs again on the adapted grid, mostly
       once, at most five times.
    3. The first pass of a chain is read where it ends, too. It sets the floor of
       :class:`~revzoo.core.fixedpoint.scale.Growth`, and warns if tokens or channels have few
       units.
    4. Infinite values and NaN are not an error here, as in a plain network.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from revzoo.core.ambient import capturing_cuda_graph
from revzoo.core.fixedpoint.scale import EXTRA_BITS, Scale, fraction_bits, free_to_read
from revzoo.core.fixedpoint.words import Fixed, fixed_of
from revzoo.core.invertible import State, Step, name_of
from revzoo.core.tensors import has_values

_FEWEST_UNITS = 1024  # a token or channel should span so many units of the grid
_FEW = 0.25  # warn if so many of the tokens or channels have fewer


class RangeError(RuntimeError):
    """A stream left the range in which its fixed-point sums are exact.

    Attributes:
        adapted: whether the grid is coarser now, so that the same pass would succeed.
        grid: fractional bits that fit, for :func:`revzoo.set_memory`; None if none do, or if the
            grid adapts.
        reason: which stream left which range, without remedies.
    """

    adapted: bool = False
    grid: int | None = None
    reason: str = ""


def range_failure(scale: Scale) -> RangeError | None:
    """The error for the first stream beyond its range; adapts the grid (host sync)."""
    if scale.log:
        _read(scale)
        scale.log.clear()
        scale.growth.failures = 0 if scale.failure is None else scale.growth.failures + 1
    if scale.failure is None:
        return None
    measured, value, end = scale.failure
    error = _range_error(measured.step, scale, value, end)
    error.adapted = scale.bits is None and bool((_units(scale) > scale.down).any())
    return error


def _read(scale: Scale) -> None:
    """Note the first sum beyond its range; adapt the grid."""
    sizes = torch.cat([m.sizes for m in scale.log])
    peaks = torch.cat([m.peaks for m in scale.log])
    ends = torch.cat([m.down for m in scale.log]) * scale.limit
    # one value is read, unless something has grown
    usual = ends
    if scale.bits is None:  # another chain may have widened the grid since
        usual = torch.minimum(scale.growth.base(sizes), ends)
    grown = (peaks >= usual) & peaks.isfinite()
    if not bool(grown.any()):
        return
    rows: list[int] = grown.nonzero().flatten().tolist()
    of_rows = torch.stack([sizes.double(), peaks.double(), ends.double()])[:, grown].T.tolist()
    for row, (_, peak, end) in zip(rows, of_rows, strict=True):
        if peak >= end and scale.failure is None:
            scale.failure = scale.log[row // len(scale.down)], peak, end
    if scale.bits is None:
        reached = [(size, peak) for size, peak, _ in of_rows]
        scale.growth.widen(reached, failed=scale.failure is not None)


def _units(scale: Scale) -> Tensor:
    units = scale.growth.units(scale.sizes)
    return units * 2.0**-EXTRA_BITS if scale.word_type == torch.int64 else units


def check_ranges(scales: Iterable[Scale]) -> None:
    """Raise a RangeError for the first stream beyond its range (host sync)."""
    errors = [error for scale in scales if (error := range_failure(scale)) is not None]
    if errors:
        raise errors[0]


def scales_of(state: Iterable[Tensor | Fixed]) -> list[Scale]:
    """The scales of the streams that have words, each once."""
    fixed = (t if isinstance(t, Fixed) else fixed_of(t) for t in state)
    return list(dict.fromkeys(f.scale for f in fixed if f is not None))


def finish_chains(scales: Sequence[Scale], outputs: State) -> RangeError | None:
    """Check the chains that began in a call, at its end (NOTE [ Streams beyond their range ]).

    Returns:
        An error if the call should run again, on a grid that has adapted: to values beyond the
        range, or to small ones.

    Raises:
        RangeError: a stream left its range, no gradient needs the outputs, and no grid fits.
    """
    again: RangeError | None = None
    trained = any(t.requires_grad for t in outputs)
    for scale in scales:
        growth = scale.growth
        if not has_values(scale.down) or capturing_cuda_graph():
            continue
        if growth.seen != scale.grid:
            if scale.guarded and scale.bits is None and growth.settle(scale.log):
                again = RangeError("values are small: run the chain again, on a finer grid")
            else:
                growth.seen = scale.grid
                if scale.guarded:
                    _warn_of_coarse_grids(scale, outputs)
        if not scale.guarded:
            growth.failures = 0
            continue
        if trained and not free_to_read(scale.down):
            continue  # reading would stall: rule 1
        error = range_failure(scale)
        if error is not None and error.adapted:
            again = error
        elif error is not None and not trained:
            raise error
    return again


def _warn_of_coarse_grids(scale: Scale, outputs: State) -> None:
    """Warn if values have so few units that the grid rounds them.

    On a grid that adapts we look at tokens and channels, on a chosen one at the largest value.
    """
    if scale.bits is not None:
        largest = max(float(m.peaks.amax()) for m in scale.log)
        if 0 < largest < _FEWEST_UNITS * float(scale.down[0]):
            _warn_of_rounding(scale, "all values")
        return
    for t in outputs:
        fixed = fixed_of(t)
        if fixed is None or fixed.scale is not scale or not 1 < fixed.words.dim() < 6:
            continue
        words = fixed.words
        for kept in (1, 2) if words.dim() == 3 else (1,):
            others = [d for d in range(words.dim()) if d != kept]
            units = torch.maximum(words.amax(others), -words.amin(others))
            known = units[units > 0]
            few = float((known < _FEWEST_UNITS).float().mean()) if len(known) else 0.0
            if few >= _FEW:
                what = f"{few:.0%} of the channels or tokens (dimension {kept})"
                _warn_of_rounding(scale, what)
                return


def _warn_of_rounding(scale: Scale, what: str) -> None:
    bits = fraction_bits(scale)
    finer = "" if scale.bits is None else ", or choose more bits or grid='auto'"
    warnings.warn(
        f"{_name(scale.log[-1].step)} and the steps before it: {what} reach less than "
        f"{_FEWEST_UNITS} units of the grid (grid={bits}: multiples of 2**-{bits}), which rounds "
        f"them: scale the input or normalise the branches{finer}, or use memory='invert'",
        RuntimeWarning,
        stacklevel=5,
    )


def _name(step: Step | None) -> str:
    return "a step" if step is None else name_of(step)


def _range_error(step: Step | None, scale: Scale, value: float, end: float) -> RangeError:
    """The error for a stream of this magnitude; names the step and, for a number, a grid."""
    reason = f"{_name(step)}: a stream or a value added to it reached {value:.3g}"
    if scale.bits is None:
        reason += f", but the range of its sample ends at {end:g}"
        error = RangeError(
            f"{reason}. The grid adapts to what a chain has seen: compute the step again. If this "
            "repeats, normalise the branches, or lower the learning rate if the training diverges"
        )
    else:
        # one bit in reserve, since training changes the values
        excess = math.ceil(math.log2(value / end)) + 1
        fitting = scale.bits - excess if excess <= scale.bits else None
        reason += f", but with grid={scale.bits} sums are exact only below {end:g}"
        choice = "" if fitting is None else f", or grid={fitting}"
        error = RangeError(
            f"{reason}: choose revzoo.set_memory(model, 'exact', grid='auto'){choice}; normalise "
            "the branches, or lower the learning rate if the training diverges"
        )
        error.grid = fitting
    error.reason = reason
    return error
