"""The arithmetic on words, and the grid of a chain: one scale for each sample.

Words are block floating point: integers with one power of two for each sample, the *scale*.

A kernel fills tensors that its caller made. It rounds floating-point values in float32, or in
float64 for words of 64 bits, and returns the *peak* of a rounded value: the largest magnitude, in
units; NaN if there is a NaN. On a CPU the peak is one number for all samples, which the host reads
at no cost. Elsewhere it is a tensor with one for each sample, and a sample beyond the range reads
as NaN. On a GPU, :mod:`revzoo.core.triton_kernels` takes their place.

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

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from revzoo.core.tensors import has_values, in_memory_order

if TYPE_CHECKING:
    from revzoo.core.invertible import Step

DEFAULT_BITS = 23
MAX_BITS = 29
# 23 + 29 fractional bits: as precise as float64 near 1
EXTRA_BITS = 29  # of float64 streams

_RESERVE = 4.0
_FAR_BELOW = 2.0**-6  # of the range: then the first pass makes the grid finer
_AMPLE = 2.0**3  # times more, once two passes in a row have failed
_SMALLEST, _LARGEST = 2.0**-64, 2.0**116  # of floors: units and ranges must be float32 numbers
_FREE_TO_READ = {"cpu"}  # devices whose values the host reads without waiting


def free_to_read(t: Tensor) -> bool:
    """Whether the host reads the values of ``t`` without waiting for a device."""
    return t.device.type in _FREE_TO_READ


class Growth:
    """How far the values of a chain grow (NOTE [ A scale for each sample ])."""

    __slots__ = ("failures", "floor", "ratio", "seen")

    def __init__(self) -> None:
        self.ratio = 4.0  # the largest value of a chain, relative to the sample's input
        # the largest value that steps reach whatever comes in: a range of 128 = 2**(30 - 23)
        self.floor = 16.0
        self.seen: int | str | None = None  # the grid of the first pass, once it is over
        self.failures = 0  # how often in a row a sample left its range

    def units(self, sizes: Tensor) -> Tensor:
        """The value of one 32-bit unit for samples with these largest inputs, ``(B,)``."""
        base = self.base(sizes) + 0 * sizes  # NaN where the input is not finite
        # frexp instead of log2, which may round to the wrong power of two
        mantissa, _ = torch.frexp(base)  # in [0.5, 1), so that the quotient is a power of two
        return (base / mantissa * (_RESERVE * 2.0**-30)).float()

    def widen(self, reached: Sequence[tuple[float, float]], *, failed: bool) -> None:
        """Raise the ratio or the floor if samples of these (input, peak) ``reached`` more."""
        # after two failures in a row: behind a stream that left its range no value is known
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
    """What a sum of a chain reached; tensors have a figure for each sample, ``(B,)``."""

    step: Step | None  # that computed it; None outside of steps
    peaks: Tensor  # the largest value of the sum and its summand
    sizes: Tensor  # the largest input; NaN where it is not finite
    down: Tensor  # one unit


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

    def adapted(self) -> Tensor:
        """``down`` on the grid that the chain would have now."""
        units = self.growth.units(self.sizes)
        return units * 2.0**-EXTRA_BITS if self.word_type == torch.int64 else units

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
    """The fractional bits of the coarsest sample, as users give them; None without finite ones."""
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


_CHUNK = 2**16  # values; the operations of one sum stay in a CPU core's cache
_CHUNK_OF_DEVICES = 2**22  # values; a temporary tensor then has 16 MB, not the size of a stream

backend: str | None = None
"""The backend of ``torch.compile`` that fuses the operations of a sum; None runs them eagerly."""


def _computed_in(words: Tensor) -> torch.dtype:
    return torch.float64 if words.dtype == torch.int64 else torch.float32


def _peak(units: Tensor, up: Tensor) -> Tensor:
    magnitudes = units.abs_()  # in place: nobody reads the units after it
    if free_to_read(units) or not up.dim():
        return magnitudes.amax()
    return magnitudes.amax(tuple(range(1, units.dim())))


def _valid(down: Tensor, peak: Tensor, words: Tensor) -> Tensor:
    """``down``, NaN for samples whose summand is beyond the range."""
    if free_to_read(words):
        return down  # the caller reads the peak
    return torch.where(peak.view_as(down) < 2.0 ** (words.itemsize * 8 - 2), down, math.nan)


def quantise(x: Tensor, words: Tensor, up: Tensor) -> Tensor:
    """The words of ``x``: its values in units, rounded half to even. Returns the peak."""
    kind = _computed_in(words)
    units = (x if x.dtype == kind else x.to(kind)) * up
    words.copy_(units.round_())
    return _peak(units, up)


def read(words: Tensor, floats: Tensor, down: Tensor) -> None:
    """The floats of ``words``."""
    if floats.dtype == _computed_in(words):
        floats.copy_(words).mul_(down)
    else:
        floats.copy_(words.to(_computed_in(words)).mul_(down))


def renew(floats: Tensor, words: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The words of ``floats`` that changed since they were read. Returns whether any did."""
    new = torch.empty_like(words)
    _round(floats, new, up)
    # only changed values: a float32 holds 24 bits of a word, so the others would lose bits (rule 3
    # of NOTE [ Words and floats ] in words.py)
    known = torch.empty_like(floats)
    read(words, known, down)
    # 1 where the float changed: on a CPU, booleans and torch.where are seven times as slow
    # samples that left their range (down is NaN) stay as they are
    changed = known.ne_(floats).mul_(down == down).to(words.dtype)
    words += new.sub_(words).mul_(changed)
    return changed.amax()


def _round(x: Tensor, words: Tensor, up: Tensor) -> None:
    kind = _computed_in(words)
    words.copy_(((x if x.dtype == kind else x.to(kind)) * up).round_())


def subtract(words: Tensor, value: Tensor, out: Tensor, up: Tensor) -> None:
    """``out = words - value``, in units; ``value`` is rounded first."""
    _round(value, out, up)
    torch.sub(words, out, out=out)


def add_and_read(
    x: Tensor, value: Tensor, words: Tensor, total: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """``words = x + value``, in units, and its floats ``total``. Returns the peak."""
    peak = quantise(value, words, up)
    torch.add(x, words, out=words)
    read(words, total, _valid(down, peak, words))
    return peak


# Their results do not depend on how a compiler orders or fuses the operations: each one is exact,
# or is a rounding.
_COMPILABLE = (quantise, read, subtract, add_and_read)


@functools.cache
def _compiled(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled: Callable[..., Any] = torch.compile(fn, backend=backend, dynamic=True)
    return compiled


_with_triton = {"cuda"}  # device types
_TAKEN = (torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)


def triton_for(words: Tensor) -> Any:
    """The module of Triton's kernels if they compute ``words``; None if torch's do."""
    on_gpu = words.device.type in _with_triton
    return _triton_kernels(words.device) if on_gpu and has_values(words) else None


@functools.cache
def _triton_kernels(device: torch.device) -> Any:
    """:mod:`revzoo.core.triton_kernels`; None if Triton does not work on the device."""
    try:
        from revzoo.core import triton_kernels as ours

        one = torch.ones(1, 1, device=device)
        ours.read(one.int(), one, one.flatten())  # compiles
    except Exception as error:  # no Triton, or no C compiler for its launcher
        warnings.warn(
            f"Triton does not work here ({type(error).__name__}: {error}), so mode 'exact' runs "
            "ten kernels a sum, not one: install Triton and a C compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return ours


def on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on the device of ``t``."""
    return torch.cuda.device_of(t)  # type: ignore[no-untyped-call]


def in_chunks(
    fn: Callable[..., Tensor | None], tensors: tuple[Tensor, ...], *figures: Tensor
) -> Tensor | None:
    """``fn(*tensors, *figures)``, piece by piece, so that its temporary tensors are small.

    ``tensors`` have one shape, ``(B, ...)``; ``figures``, of each sample, are shaped to multiply.

    Returns:
        The largest of what the pieces return; of Triton's kernels, what each sample reached, and
        its ``down``, NaN beyond the range, ``(2, B)``.
    """
    if tensors[0].device.type in _with_triton:
        if (found := _by_triton(fn, tensors, figures)) is not None:
            return found[0]
    elif backend is None and tensors[0].numel() <= _CHUNK:
        return fn(*tensors, *figures)
    words = next(t for t in tensors if not t.is_floating_point())
    compiles = backend is not None and fn in _COMPILABLE and has_values(words)
    chunk = _CHUNK if free_to_read(words) else _CHUNK_OF_DEVICES
    flat = _as_rows(tensors, figures[0].numel()) if compiles or words.numel() > chunk else None
    if flat is None:
        return fn(*tensors, *figures)
    of_rows = [for_samples_of(f.flatten(), 2) for f in figures]
    if compiles:
        assert backend is not None
        largest: Tensor | None = _compiled(fn, backend)(*flat, *of_rows)
        return largest
    # rows (B, n): a piece is several samples, or a part of one
    samples, length = flat[0].shape
    high = max(chunk // length, 1)
    wide = -(-length // -(-length // chunk))  # pieces of nearly one size
    peaks = None
    for top in range(0, samples, high):
        band = [t[top : top + high] for t in flat]
        of_band = [f[top : top + high] if f.dim() else f for f in of_rows]
        for at in range(0, length, wide):
            peak = fn(*[t[:, at : at + wide] for t in band], *of_band)
            if not has_values(words):  # one piece takes the memory of all
                return None
            if peak is not None:
                if peaks is None:
                    peaks = peak.new_zeros(samples if peak.dim() else ())
                rows = peaks[top : top + high] if peak.dim() else peaks
                torch.maximum(rows, peak, out=rows)
    return peaks


def with_sum(
    fn: Callable[..., Tensor | None], tensors: tuple[Tensor, ...], summed: Tensor, *figures: Tensor
) -> tuple[Tensor | None, Tensor]:
    """:func:`in_chunks`, and :func:`sum_of` the words that ``fn`` adds to or finds, ``summed``."""
    on_gpu = summed.device.type in _with_triton
    found = _by_triton(fn, tensors, figures, sums=True) if on_gpu else None
    return found or (in_chunks(fn, tensors, *figures), sum_of(summed))


def _by_triton(
    fn: Callable[..., Any],
    tensors: tuple[Tensor, ...],
    figures: tuple[Tensor, ...],
    *,
    sums: bool = False,
) -> tuple[Tensor | None, Any] | None:
    """What Triton's kernel returns, and the sum of words; None if it does not take the tensors."""
    words = next(t for t in tensors if not t.is_floating_point())
    kernel = getattr(triton_for(words), fn.__name__, None) if words.dtype == torch.int32 else None
    flat = None if kernel is None else _as_rows(tensors, figures[0].numel())
    if kernel is None or flat is None or any(t.dtype not in _TAKEN for t in flat):
        return None
    rows = *flat, *[f.flatten() for f in figures]
    with on_device(words):
        if not sums:
            return kernel(*rows), None
        checksum = words.new_zeros((), dtype=torch.int64)
        return kernel(*rows, checksum, _in_pairs(words)), checksum


def sum_of(words: Tensor) -> Tensor:
    """The sum of all ``words``, int64 ``()`` on the device; wraps around."""
    flat = in_memory_order(words) if _in_pairs(words) else None
    if flat is None:
        return words.sum()
    # torch cannot view words from an odd offset on as pairs
    flat = flat.clone() if flat.storage_offset() % 2 else flat
    return flat.view(torch.int64).sum()


def _in_pairs(words: Tensor) -> bool:
    """Whether the sum takes two words as one of 64 bits: on a CPU, 20 times as fast in torch."""
    return words.dtype == torch.int32 and words.numel() >= 2**12 and words.numel() % 2 == 0


def _as_rows(tensors: tuple[Tensor, ...], count: int) -> list[Tensor] | None:
    """The tensors as rows, if the same places in memory hold corresponding elements."""
    if any(t.stride() != tensors[0].stride() for t in tensors):
        return None
    rows = [r for t in tensors if (r := as_rows(t, count)) is not None]
    return rows if len(rows) == len(tensors) else None


def round_to_grid(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded, half to even, to multiples of ``2**-bits``; same shape and dtype.

    The gradient passes through unchanged (straight-through). A narrow type keeps its own precision.
    """
    plain = x.detach()
    rounded = (plain * 2.0**bits).round_().mul_(2.0**-bits)
    # exact: x and its rounded value are within a factor of two, or one of them is zero
    return x + (rounded - plain)
