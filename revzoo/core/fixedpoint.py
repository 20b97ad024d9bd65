"""Fixed-point streams: sums of integers, which can be undone without error.

Floating-point addition rounds, so ``(x + v) - v`` differs from ``x``, and the error of a
reconstruction grows with depth. Integer addition does not round. So in mode ``exact`` a stream is a
tensor of *words*: integers that count units of ``2**-bits``. Branches read a float tensor that is
made from the words, and gradients flow through it. Each branch value is rounded to the grid before
it is added, so ``(x + v) - v == x`` bit for bit at any depth.

Gomez et al. 2017 (arXiv 1707.04585, section 3.2) suggest fixed point. Maclaurin et al. 2015 (arXiv
1502.03492) use it for exactly reversible learning, with an information buffer that additions do
not need. torch's quantisation (``fake_quantize``) clamps silently and saves a mask for the backward
pass; here leaving the range raises, and nothing is saved.

NOTE [ Words and floats ]
    1. Streams of up to 32 bits have 32-bit words. By default they have 23 fractional bits and a
       range of +-128, and are as precise as float32 is near 1. If one stream is float64, all have
       64-bit words with 29 more fractional bits.
    2. The words are an attribute of the float tensor's storage, so an alias (``detach()``) also has
       them. They are freed with the storage, and ignored if the tensor was changed in place or is
       another view. Changes that bypass the version counters (``y.data``, ``y.numpy()``) are found
       where the tensor enters a sequence or a step, or the inverse of a sequence. A tensor without
       words is rounded to the grid. Inference tensors do not count in-place changes, so tensors
       with words are made outside inference mode.
    3. A float32 tensor holds 24 bits of a word. An output that was saved to a file has only these,
       so inverting it has the error of one rounding. With 14 fractional bits or fewer, float32
       holds the whole word.
    4. A step that only moves values runs on the words, too. The other exact steps compute sums,
       with the functions of this module.
    5. With ``grid="auto"`` the range of a chain of steps is at least 16 times the largest value
       that enters it. It is computed on the device, for each input.
    6. Sums overflow beyond 31 bits. So a value or stream beyond 30 bits turns the whole stream into
       NaN, in replays too and without a host sync. The backward pass then raises a RangeError; if
       the output needs no gradient, the forward pass of the sequence, or of the step called alone,
       raises it. Infinite values and NaN, as after an overflow of float16, become NaN.
    7. Inside torch.func transforms, forward-mode AD and captured graphs nothing is inverted.
       Streams there are floats, and branch values are rounded if ``grid`` is a number.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from revzoo.core import integer_kernels
from revzoo.core.bits import unpack_bits
from revzoo.core.global_state import autocast_dtypes, runs_eagerly
from revzoo.core.integer_kernels import (
    add_and_read,
    in_chunks,
    quantise,
    read,
    renew,
    shift_in,
    shift_out,
    subtract,
    subtract_and_read,
)
from revzoo.core.invertible import Step
from revzoo.core.tensors import as_dense, has_values, in_memory_order, version_of

AUTO = "auto"
DEFAULT_BITS = 23
MOST_BITS = 29
# 23 + 29 fractional bits: as precise as float64 near 1
EXTRA_BITS = 29  # of float64 streams
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPECTED_RANGE = 8.0  # inputs below this have DEFAULT_BITS
_LARGEST_RANGE = 2.0**116  # also for an infinite input: the end of the range must be a float32
# the fewest bits that grid="auto" chooses: each doubling of the input above 4 costs one
COARSEST_BITS = DEFAULT_BITS - int(math.log2(_LARGEST_RANGE / (_EXPECTED_RANGE / 2)))

Grid = int | str


class Scale:
    """A grid: the value of one unit, and the range. All streams of a chain share the object.

    Attributes:
        bits: the fractional bits; None if the input decides them.
        down: the value of one unit, a power of two, as a scalar tensor on the streams' device.
        up: its inverse.
        end: sums are exact below it.
    """

    __slots__ = ("_nan", "bits", "down", "end", "up")

    def __init__(self, down: Tensor, word_type: torch.dtype, bits: int | None = None) -> None:
        self.bits = bits
        self.down = down
        self.up = down.reciprocal()
        # two bits less than the word: the sum of two such values still fits, with the sign
        self.end = down * 2.0 ** (torch.iinfo(word_type).bits - 2)
        self._nan = torch.full_like(down, math.nan)

    def down_within(self, peak: Tensor) -> Tensor:
        """``down``; NaN where the ``peak`` is beyond the range (rule 6)."""
        # a comparison on the device, since reading the peak would stall it
        return torch.where(peak < self.end, self.down, self._nan)


def fraction_bits(scale: Scale) -> int:
    """The fractional bits of a grid as users give them, without ``EXTRA_BITS`` (host sync)."""
    down, end = float(scale.down), float(scale.end)
    return round(-math.log2(down)) - (EXTRA_BITS if end / down > 2.0**32 else 0)


class _Running(threading.local):
    """The step that runs, and its streams."""

    step: Step | None = None
    state: tuple[Tensor, ...] = ()


_running = _Running()


class within:
    """A context in which sums belong to ``step``, called with the streams ``state``."""

    __slots__ = ("_inner", "_outer")

    def __init__(self, step: Step, state: tuple[Tensor, ...] = ()) -> None:
        self._inner = step, state

    def __enter__(self) -> None:
        self._outer = _running.step, _running.state
        _running.step, _running.state = self._inner

    def __exit__(self, *_: object) -> None:
        _running.step, _running.state = self._outer


_numbers = itertools.count()


class Peak:
    """The largest magnitude of a stream and of all values added to it so far.

    The first value beyond the range stays.

    Attributes:
        value: a scalar, on the device.
        scale: the stream's grid.
        half: whether float16 was involved, which overflows in a plain network, too.
        parts: the peaks of the streams that its values come from, if there are several.
        step: the step that computed the stream; None outside of steps.
        number: later peaks have larger numbers.
    """

    __slots__ = ("half", "number", "parts", "scale", "step", "value")

    def __init__(
        self, value: Tensor, scale: Scale, *, half: bool, parts: tuple[Peak, ...] = ()
    ) -> None:
        self.value = value
        self.scale = scale
        self.half = half
        self.parts = parts
        self.step = _running.step
        self.number = next(_numbers)


def _peak(value: Tensor, scale: Scale, *parts: Tensor) -> Peak:
    """The peak of a stream that is computed here from ``parts``."""
    half = torch.float16 in (*(t.dtype for t in parts), *autocast_dtypes(value.device))
    return Peak(value, scale, half=half)


def _joined(peaks: Iterable[Peak | None]) -> Peak | None:
    """The peak of streams that have exchanged values."""
    known = [peak for peak in peaks if peak is not None]
    if len({*known}) < 2:
        return known[0] if known else None
    parts = tuple({part: None for peak in known for part in peak.parts or (peak,)})
    value, scale = parts[0].value, parts[0].scale
    for part in parts[1:]:
        # a NaN counts, unless the other value is beyond the range, which explains the NaN
        finite = torch.fmax(value, part.value)
        value = torch.where(finite < scale.end, value.maximum(part.value), finite)
    joined = Peak(value, scale, half=any(part.half for part in parts), parts=parts)
    joined.step = parts[0].step  # a step that moves values is not the cause
    return joined


def peaks_of(state: Iterable[Tensor | Fixed]) -> list[Peak]:
    """The peaks of the streams that have words and values."""
    known = [t.peak for t in as_fixed(state) if isinstance(t, Fixed) and t.peak is not None]
    peaks = (part for peak in known for part in peak.parts or (peak,))
    return [peak for peak in peaks if has_values(peak.value)]


class Fixed:
    """A stream as integers, ``(B, C, ...)``: ``words * scale.down`` is its value.

    Attributes:
        words: int32, or int64 for float64 streams.
        scale: its grid.
        dtype: of the float tensor.
        peak: None for an empty stream.
    """

    __slots__ = ("dtype", "peak", "scale", "words")

    def __init__(
        self, words: Tensor, scale: Scale, dtype: torch.dtype, peak: Peak | None = None
    ) -> None:
        self.words = words
        self.scale = scale
        self.dtype = dtype
        self.peak = peak

    @property
    def shape(self) -> torch.Size:
        return self.words.shape

    def read(self) -> Tensor:
        """The float tensor, without its words."""
        with counting_changes():
            floats = torch.empty_like(self.words, dtype=self.dtype)
        if self.peak is not None:  # an empty stream has nothing to read
            in_chunks(read, (self.words, floats), self.scale.down_within(self.peak.value))
        return floats

    def with_words(self, words: Tensor, dtype: torch.dtype | None = None) -> Fixed:
        """A stream with the same values in other places."""
        return Fixed(words, self.scale, dtype or self.dtype, self.peak)

    def minus(self, value: Tensor, *, overwrite: bool = False) -> Fixed:
        """Subtract ``value``; ``overwrite`` allows reusing its memory."""
        words = self.words
        fits = value.dtype.itemsize == words.dtype.itemsize and value.stride() == words.stride()
        # a compiled graph may not write over its input in another type
        reuses = overwrite and fits and integer_kernels.backend is None
        out = value.view(words.dtype) if reuses else torch.empty_like(words)
        in_chunks(subtract, (words, value, out), self.scale.up)
        return self.with_words(out)


Streams = tuple[Tensor | Fixed, ...]


def counting_changes() -> AbstractContextManager[Any]:
    """A context in which new tensors count in-place changes, even inside inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def check_bits(grid: Grid) -> None:
    """Raise a ValueError unless ``grid`` is valid."""
    whole = isinstance(grid, int) and not isinstance(grid, bool)
    if grid != AUTO and not (whole and 0 <= int(grid) <= MOST_BITS):
        raise ValueError(
            f"grid={grid!r}: expected the number of fractional bits, 0 to {MOST_BITS} "
            f"({DEFAULT_BITS}: resolution 2**-{DEFAULT_BITS}, range +-{2 ** (30 - DEFAULT_BITS)}), "
            f"or {AUTO!r}: {DEFAULT_BITS}, fewer where the input is large"
        )


def can_have_words(state: Iterable[Tensor]) -> bool:
    """Whether the streams are plain dense tensors of a real floating type of 16 to 64 bits."""
    return all(
        t.dtype in _TYPES
        and t.layout is torch.strided
        and not t.is_nested
        and not is_traceable_wrapper_subclass(t)  # a DTensor, say
        for t in state
    )


def keeps_words() -> bool:
    """Whether streams keep words here (rule 7 of NOTE [ Words and floats ])."""
    return runs_eagerly() and forward_ad._current_level < 0


_KEY = "_revzoo_fixed"  # attribute of a storage: place of the float tensor in it -> Fixed


def fixed_of(t: Tensor) -> Fixed | None:
    """The words of ``t``, if it has any (rule 2 of NOTE [ Words and floats ])."""
    try:
        words_by_view: dict[Any, Fixed] | None = t.untyped_storage().__dict__.get(_KEY)
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return None
    return None if words_by_view is None else words_by_view.get(_view_key(t))


def _set_words(t: Tensor, fixed: Fixed) -> None:
    # on the storage, which aliases share; torch keeps one Python object for it as long as it lives
    # an attribute: a WeakKeyDictionary is 16 times as slow (1.7 us)
    attributes = vars(t.untyped_storage())
    attributes[_KEY] = {**attributes.get(_KEY, {}), _view_key(t): fixed}


def forget_stale_words(state: Iterable[Tensor]) -> None:
    """Drop words if the floats changed without a new version (needs a host sync)."""
    for t in state:
        if has_values(t) and (fixed := fixed_of(t)) is not None:
            known = fixed.read()
            if torch.equal(known, t):
                continue
            # words beyond their range read as NaN: their floats may differ
            if not bool(((known == t) | known.isnan()).all()):
                del vars(t.untyped_storage())[_KEY][_view_key(t)]


def renew_words(state: Iterable[Tensor]) -> None:
    """Set the words of floats that changed without a new version (without a host sync).

    The tape of the steps before holds the same words, so its guard then finds a drift.
    """
    if not keeps_words():
        return
    for t in state:
        if t.layout is not torch.strided or not t.numel() or (fixed := fixed_of(t)) is None:
            continue
        # .data: the words of an unchanged stream do not count as changed
        scale = fixed.scale
        in_chunks(renew, (t.detach(), fixed.words.data), scale.up, scale.down)
        if (known := fixed.peak) is not None:
            size = largest(t)
            # the cause of a NaN stays, until all values are finite again
            stays = (known.value >= scale.end) & ~(size < math.inf)
            fixed.peak = Peak(torch.where(stays, known.value, size), scale, half=known.half)
            fixed.peak.step = known.step


def _view_key(t: Tensor) -> tuple[Any, ...]:
    return version_of(t), t.shape, t.stride(), t.storage_offset()


def as_fixed(state: Iterable[Tensor | Fixed]) -> Streams:
    """The state; streams that have words become :class:`Fixed`."""
    return tuple([t if type(t) is Fixed else fixed_of(t) or t for t in state])  # type: ignore[arg-type]


def as_floats(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The state as float tensors; each :class:`Fixed` becomes a tensor with words."""
    return tuple([_read_with_words(t) if isinstance(t, Fixed) else t for t in state])


def _read_with_words(fixed: Fixed) -> Tensor:
    t = fixed.read()
    _set_words(t, fixed)
    return t


def backing_tensors(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The tensors that hold the state in memory."""
    return tuple([t.words if isinstance(t, Fixed) else t for t in state])


def put_on_grid(state: tuple[Tensor, ...], grid: Grid) -> tuple[Tensor, ...]:
    """Round the state to one grid and give it words, unless it has words of that grid.

    The gradient of the rounding is the identity.
    """
    wide = any(t.dtype == torch.float64 for t in state)
    word_type = torch.int64 if wide else torch.int32
    fixed = [f for t in state if (f := fixed_of(t)) is not None and f.words.dtype == word_type]
    if len(fixed) == len(state) and _are_on(grid, fixed):
        return state
    bits = grid if isinstance(grid, int) else None
    down = _down_for(state) if bits is None else _scalar(state, 2.0**-bits)
    scale = Scale(down * 2.0**-EXTRA_BITS if wide else down, word_type, bits)
    return tuple(_rounded_to(t, scale, word_type) for t in state)


def _are_on(grid: Grid, fixed: Sequence[Fixed]) -> bool:
    if isinstance(grid, int):
        return all(f.scale.bits == grid for f in fixed)
    scale = fixed[0].scale
    return scale.bits is None and all(f.scale is scale for f in fixed)


def _down_for(state: tuple[Tensor, ...]) -> Tensor:
    """2**-DEFAULT_BITS or more, by the largest value (rule 5 of NOTE [ Words and floats ]).

    A power of two, so that products with it do not round.
    """
    sizes = [largest(t).float() for t in state if t.numel()]
    size = functools.reduce(torch.maximum, sizes) if sizes else _scalar(state, 0.0)
    size = size.clamp(_EXPECTED_RANGE / 2, _LARGEST_RANGE)
    # frexp instead of log2, which may round to the wrong power of two
    mantissa, _ = torch.frexp(size)  # in [0.5, 1), so that the quotient is a power of two
    return size / mantissa * (2.0**-DEFAULT_BITS / _EXPECTED_RANGE)


def _scalar(state: tuple[Tensor, ...], value: float) -> Tensor:
    # float32 for any default dtype; filled on the device, without a transfer
    return state[0].new_full((), value, dtype=torch.float32)


def largest(t: Tensor) -> Tensor:
    """The largest magnitude in ``t``, which is not empty; NaN if ``t`` holds NaN."""
    t = t.detach() if t.requires_grad else t
    # negating the smallest integer would overflow
    t = t if t.is_floating_point() else t.float()
    # ten times as fast as torch.linalg.vector_norm on a CPU
    flat = in_memory_order(t)
    low, high = torch.aminmax(t if flat is None else flat)
    return torch.maximum(-low, high)


def _note(peaks: list[Peak]) -> None:
    """Report the peaks to the guard, which checks them at the end of the backward pass."""
    # every gradient that flows through the stream passes the node that computed it
    if peaks:
        from revzoo.core.guard import note_peaks  # imports this module

        note_peaks(peaks)


def _used_by(fixed: Fixed) -> list[Peak]:
    """The peaks that decide whether gradients through this stream are right.

    Includes the peaks of the running step's streams: the sums that computed them may lie outside
    the graph that runs backward.
    """
    return peaks_of((*_running.state, fixed))


class _Rounded(torch.autograd.Function):
    """``x`` -> the float tensor of its words; the gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fixed: Fixed) -> Tensor:
        ctx.peaks = _used_by(fixed)
        return _read_with_words(fixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        _note(ctx.peaks)
        return gradient, None


def _rounded_to(x: Tensor, scale: Scale, kind: torch.dtype) -> Tensor:
    words = torch.empty_like(x, dtype=kind)
    in_chunks(quantise, (x.detach(), words), scale.up)
    peak = _peak(largest(x), scale, x) if x.numel() else None
    rounded: Tensor = _Rounded.apply(x, Fixed(words, scale, x.dtype, peak))
    return rounded


def _summed(
    fill: Callable[..., None],
    fixed: Fixed,
    parts: tuple[Tensor, ...],
    dtype: torch.dtype,
    *options: Any,
    weight: int,
) -> tuple[Tensor, Fixed]:
    """Compute a sum; returns its float tensor, with words, and the words.

    Args:
        fill: computes the sum from ``parts`` into words and floats.
        fixed: the stream that is added to.
        parts: the summands; the value is the last one.
        dtype: of the float tensor.
        *options: passed to ``fill`` after the scales.
        weight: how many times the value counts in the peak.
    """
    value, words, scale = parts[-1], torch.empty_like(fixed.words), fixed.scale
    with counting_changes():
        total = torch.empty_like(words, dtype=dtype)
    summed = Fixed(words, scale, dtype)
    if value.numel():
        peak = largest(value) if weight == 1 else weight * largest(value).float()
        if fixed.peak is not None:
            # the first value beyond the range stays: it causes every later NaN
            before = fixed.peak.value
            peak = torch.where(before < scale.end, peak.maximum(before), before)
        in_chunks(fill, (*parts, words, total), scale.up, scale.down_within(peak), *options)
        # fmax: a NaN of rule 6 must not hide the value that caused it
        summed.peak = _peak(torch.fmax(peak, largest(total)), scale, value, total)
    _set_words(total, summed)
    return total, summed


class _Sum(torch.autograd.Function):
    """``x + sign * value`` on the words of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, fixed: Fixed, sign: int) -> Tensor:
        ctx.sign, ctx.dtype = sign, value.dtype
        fill = add_and_read if sign > 0 else subtract_and_read
        total, summed = _summed(fill, fixed, (fixed.words, value), x.dtype, weight=1)
        ctx.peaks = _used_by(summed)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        _note(ctx.peaks)
        return gradient, (gradient if ctx.sign > 0 else -gradient).to(ctx.dtype), None, None


def add(x: Tensor, value: Tensor, fixed: Fixed, *, sign: int = 1) -> Tensor:
    """``x + sign * value``, rounded to the grid of ``x``, with words.

    Args:
        x: a stream.
        value: of the same shape.
        fixed: the words of ``x``.
        sign: 1 or -1.
    """
    total: Tensor = _Sum.apply(x, value, fixed, sign)
    return total


class _SecondDifference(torch.autograd.Function):
    """``(1 + b) value - 2 b x + b before`` on the words of ``before``."""

    @staticmethod
    def forward(
        ctx: Any, before: Tensor, x: Tensor, value: Tensor, fixed: Fixed, bits: int
    ) -> Tensor:
        # the gradient ignores the rounding and the dropped bits
        ctx.b, ctx.dtype = 2.0**-bits, value.dtype
        # 2 b x is at most as large as the stream, so value and 2 b x count as two values
        parts = (fixed.words, x, value)
        total, summed = _summed(shift_in, fixed, parts, x.dtype, bits, weight=2)
        ctx.peaks = _used_by(summed)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        _note(ctx.peaks)
        b = ctx.b
        of_value = (gradient * (1 + b)).to(ctx.dtype)
        return gradient * b, gradient * (-2 * b), of_value, None, None


def second_difference(before: Tensor, x: Tensor, value: Tensor, fixed: Fixed, bits: int) -> Tensor:
    """``(1 + b) value - 2 b x + b before`` with ``b = 2**-bits``, with words.

    Args:
        before: a stream; the product with b drops the low ``bits`` of its words.
        x: the stream that ``value`` was computed from.
        value: of the same shape.
        fixed: the words of ``before``.
        bits: at least 1.
    """
    total: Tensor = _SecondDifference.apply(before, x, value, fixed, bits)
    return total


def undo_second_difference(
    total: Fixed, x: Tensor, value: Tensor, side: Tensor, bits: int
) -> Fixed:
    """Recover ``before``; ``side`` are the low bits of its words, from ``pack_bits``."""
    words = torch.empty_like(total.words)
    in_chunks(shift_out, (total.words, x, value, words), total.scale.up, bits)
    # the shift has left zeros in the low bits, where the dropped bits go
    words |= unpack_bits(side, words, bits)
    return total.with_words(words)


def put_on_grid_of(fixed: Fixed, x: Tensor) -> Tensor:
    """``x`` on the grid and in the dtype of ``fixed``, with words; the gradient passes."""
    return _rounded_to(x.to(fixed.dtype), fixed.scale, fixed.words.dtype)


def apply_with_words(fn: Callable[..., Any], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``fn(*state)``; the words move with the values.

    Args:
        fn: only moves values, in tensors of any dtype.
        state: all streams have words, or none has.
    """
    # words are ignored after a change, so the new tensors must count changes (rule 2)
    with counting_changes():
        returned = fn(*state)
    outputs = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if keeps_words():
        move_words(fn, state, outputs)
    return outputs


def move_words(
    fn: Callable[..., Any], state: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> None:
    """Give ``outputs = fn(*state)`` words: ``fn`` moves the words of ``state``, too."""
    fixed = [fixed_of(t) for t in state]
    if not all(fixed) or all(fixed_of(t) is not None for t in outputs):
        return
    kinds = [t.dtype for t in outputs]
    moved = apply_to_words(fn, [f for f in fixed if f is not None], kinds)
    for t, f in zip(outputs, moved, strict=True):
        if fixed_of(t) is None:
            _set_words(t, f)


def apply_to_words(
    fn: Callable[..., Any], state: Sequence[Fixed], dtypes: Sequence[torch.dtype]
) -> tuple[Fixed, ...]:
    """Apply ``fn``, which only moves values, to words; ``dtypes`` are of the float tensors.

    Raises:
        ValueError: ``fn`` does not work on integers.
    """
    try:
        with torch.no_grad():
            outputs = fn(*[f.words for f in state])
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        kinds = {t.dtype for t in outputs}
    except RuntimeError as error:  # torch has no integer kernels for products of matrices, norms
        raise ValueError(f"{_NOT_MOVED}: {error}") from error
    if kinds != {state[0].words.dtype}:
        raise ValueError(f"{_NOT_MOVED}: it returned {', '.join(map(str, kinds))}")
    peak = _joined(f.peak for f in state)
    first = Fixed(state[0].words, state[0].scale, state[0].dtype, peak)
    pairs = itertools.zip_longest(outputs, dtypes[: len(outputs)])
    return tuple(first.with_words(as_dense(t, first.words), dtype) for t, dtype in pairs)


_NOT_MOVED = (
    "a step with exact = True got integers; expected forward and inverse to move them as they move "
    "floats. Use AdditiveCoupling for sums, or leave exact = False"
)
