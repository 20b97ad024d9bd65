"""The grid of a chain of steps: one scale for each sample.

Words are block floating point: integers with one power of two for each sample, the *scale*.

NOTE [ A scale for each sample ]
    1. A sample is an entry along dimension 0. Its range is ``4 max(r m, a)``, rounded up to a power
       of two, where ``m`` is the largest value of the sample that enters the chain. So a sample
       does not change the others, whether it is large, NaN or infinite.
    2. The ratio ``r`` and the floor ``a`` are what values of this chain were seen to reach: the
       :class:`Growth`. The step that starts the chain holds it. A value beyond ``max(r m, a)``
       raises one of them: ``r`` if the sample's input alone is larger than ``a``, otherwise ``a``.
       So an outlier that a network scales does not make the grid of other samples coarser.
    3. The factor 4 is a reserve: values that grow slowly raise ``r`` and ``a`` before a stream
       leaves its range. A stream that leaves it reads as NaN. Without gradients, the sequence then
       runs again on the new grid; in training, the backward pass raises a RangeError.
    4. At first ``r = 4`` and ``a = 16``: units of ``2**-23`` for inputs below 4. If the first pass
       stays far below ``a``, ``a`` falls to what it reached.
    5. With a number as ``grid`` all samples have the same unit, and nothing adapts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from revzoo.core.tensors import in_memory_order

if TYPE_CHECKING:
    from revzoo.core.invertible import Step

DEFAULT_BITS = 23
MAX_BITS = 29
# 23 + 29 fractional bits: as precise as float64 near 1
EXTRA_BITS = 29  # of float64 streams

_RESERVE = 4.0
_FIRST_RATIO = 4.0
_FIRST_FLOOR = 16.0  # 4 * (the next power of two) = 128 = 2**(30 - DEFAULT_BITS)
_FAR_BELOW = 2.0**-6  # of the range: then the first pass makes the grid finer
_AMPLE = 2.0**3  # times more, once two passes in a row have failed
_SMALLEST, _LARGEST = 2.0**-64, 2.0**116  # of floors: units and ranges must be float32 numbers
_FREE_TO_READ = {"cpu"}  # devices whose values the host reads without waiting


def free_to_read(t: Tensor) -> bool:
    """Whether the host reads the values of ``t`` without waiting for a device."""
    return t.device.type in _FREE_TO_READ


class Growth:
    """How far the values of a chain grow (NOTE [ A scale for each sample ]).

    Attributes:
        ratio: the largest value of a chain, relative to the sample's input.
        floor: the largest value that steps reach whatever comes in.
        seen: the grid of the first pass, once it is over.
        failures: how often in a row a sample left its range.
    """

    __slots__ = ("failures", "floor", "ratio", "seen")

    def __init__(self) -> None:
        self.failures = 0
        self.ratio, self.floor = _FIRST_RATIO, _FIRST_FLOOR
        self.seen: int | str | None = None

    def units(self, sizes: Tensor) -> Tensor:
        """The value of one 32-bit unit for samples with these largest inputs, ``(B,)``."""
        base = self.base(sizes) + 0 * sizes  # NaN where the input is not finite
        # frexp instead of log2, which may round to the wrong power of two
        mantissa, _ = torch.frexp(base)  # in [0.5, 1), so that the quotient is a power of two
        return (base / mantissa * (_RESERVE * 2.0**-30)).float()

    def widen(self, reached: Sequence[tuple[float, float]], *, failed: bool) -> None:
        """Raise the ratio or the floor if samples reached more.

        Args:
            reached: the largest input of a sample, and the largest value that it reached.
            failed: whether a sample left its range. If one did in the last pass, too, we leave
                ample room: behind a stream that left its range no value is known.
        """
        margin = _AMPLE if failed and self.failures else 1.0
        ratio, floor = self.ratio, self.floor
        for size, peak in reached:
            if not max(ratio * size, floor) < peak < math.inf:
                continue
            if size > floor:
                self.ratio = max(self.ratio, margin * peak / size)
            else:
                self.floor = min(max(self.floor, margin * peak), _LARGEST)

    def settle(self, measured: Sequence[Measured]) -> bool:
        """Lower ratio and floor if a first pass stayed far below; returns whether it did."""
        top = ratio = 0.0
        for m in measured:
            known = (m.peaks > 0) & m.peaks.isfinite()
            sizes, peaks = m.sizes[known], m.peaks[known]
            if bool((peaks >= _FAR_BELOW * self.base(sizes)).any()):
                return False
            if len(peaks):
                top = max(top, float(peaks.amax()))
                ratio = max(ratio, float((peaks / sizes).nan_to_num(0, 0).amax()))
        if top:
            self.floor = max(min(self.floor, top), _SMALLEST)
            self.ratio = max(min(self.ratio, ratio), 1.0)
        return top > 0

    def base(self, sizes: Tensor) -> Tensor:
        """What samples with these largest inputs were seen to reach."""
        return (sizes * self.ratio).clamp(self.floor, _LARGEST)


class Measured(NamedTuple):
    """What a sum of a chain reached.

    Attributes:
        step: the step that computed it; None outside of steps.
        peaks: the largest value of the sum and its summand, for each sample ``(B,)``.
        sizes: the largest input of each sample; NaN where it is not finite.
        down: one unit of each sample.
    """

    step: Step | None
    peaks: Tensor
    sizes: Tensor
    down: Tensor


class Scale:
    """The grid of a chain, whose streams share this object.

    Attributes:
        bits: the fractional bits; None if they follow from the input.
        down: the value of one unit, a power of two, for each sample: ``(B,)``, or ``(1,)`` for all.
        up: ``1 / down``.
        sizes: the largest input of each sample, ``(B,)``.
        growth: of the chain.
        word_type: the dtype of the words.
        limit: streams and summands are exact below this number of units.
        log: the sums of the chain that were measured, until they are read.
        failure: the first that left its range, with its largest value and the end of the range.
    """

    def __init__(
        self, down: Tensor, sizes: Tensor, growth: Growth, word_type: torch.dtype, bits: int | None
    ) -> None:
        self.bits = bits
        self.word_type = word_type
        self.down = down
        self.up = down.reciprocal()
        self.sizes = sizes
        self.growth = growth
        # two bits less than the word: the sum of two such values still fits, with the sign
        self.limit = 2.0 ** (torch.iinfo(word_type).bits - 2)
        self.log: list[Measured] = []
        self.failure: tuple[Measured, float, float] | None = None
        self._shaped: dict[int, tuple[Tensor, Tensor]] = {}

    def shaped(self, dim: int) -> tuple[Tensor, Tensor]:
        """``up`` and ``down``, to multiply a tensor of ``dim`` dims."""
        found = self._shaped.get(dim)
        if found is None:
            found = for_samples_of(self.up, dim), for_samples_of(self.down, dim)
            self._shaped[dim] = found
        return found

    @property
    def end(self) -> Tensor:
        """The end of each sample's range ``(B,)``."""
        return self.down * self.limit

    @property
    def guarded(self) -> bool:
        """Whether a logged step has a guard; without one, nothing reads the log."""
        return any(m.step is None or m.step.drift_limit is not None for m in self.log)

    @property
    def grid(self) -> int | str:
        """As users give it."""
        return "auto" if self.bits is None else self.bits

    def forget(self, peaks: Tensor) -> None:
        """Drop the last sum, whose result nobody uses."""
        if self.log and self.log[-1].peaks is peaks:
            self.log.pop()
        self.failure = None


def fraction_bits(scale: Scale) -> int | None:
    """The fractional bits of the coarsest sample, as users give them; None without finite ones.

    Without ``EXTRA_BITS``. Needs a host sync.
    """
    extra = EXTRA_BITS if scale.word_type == torch.int64 else 0
    units = [unit for unit in scale.down.tolist() if math.isfinite(unit)]
    return round(-math.log2(max(units))) - extra if units else None


def sample_count(state: Sequence[Tensor]) -> int:
    """How many samples have a scale of their own; 1 if dimension 0 is not a batch."""
    counts = {t.shape[0] if t.dim() > 1 else 1 for t in state}
    return counts.pop() if len(counts) == 1 else 1


def for_samples_of(rows: Tensor, dim: int) -> Tensor:
    """A figure of each sample, ``(B,)`` or ``(1,)``, to multiply a tensor of ``dim`` dims."""
    return rows.view(()) if len(rows) == 1 else rows.view(-1, *[1] * (dim - 1))


def as_rows(t: Tensor, count: int) -> Tensor | None:
    """``t`` as a view ``(count, n)``, one row a sample; None if memory does not allow it."""
    flat = in_memory_order(t)
    return None if flat is None else flat.view(count, -1)


def magnitudes(t: Tensor, count: int) -> Tensor:
    """The largest magnitude in each of ``count`` samples of ``t``; NaN for a NaN."""
    t = t.detach()
    rows = as_rows(t, count)
    dims = (1,) if rows is not None else tuple(range(int(count > 1), t.dim()))
    rows = t if rows is None else rows
    # two reductions: on a CPU, torch.aminmax is 30 times as slow for rows
    kind = torch.float64 if t.dtype == torch.float64 else torch.float32
    return torch.maximum(rows.amax(dims).to(kind), -rows.amin(dims).to(kind)).view(count)
