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
    4. A step that only moves values runs on the words, too. The other exact steps compute sums
       (:mod:`revzoo.core.sums`).
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

from revzoo.core.ambient import autocast_dtypes, runs_eagerly
from revzoo.core.fixedpoint import integer_kernels
from revzoo.core.fixedpoint.integer_kernels import (
    in_chunks,
    read,
    renew,
    subtract,
)
from revzoo.core.invertible import Step
from revzoo.core.tensors import as_dense, has_values, in_memory_order, version_of

AUTO = "auto"
DEFAULT_BITS = 23
MAX_BITS = 29
# 23 + 29 fractional bits: as precise as float64 near 1
EXTRA_BITS = 29  # of float64 streams
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Grid = int | str


class Scale:
    """A grid: the value of one unit, and the range. All streams of a chain share the object.

    Attributes:
        bits: the fractional bits; None if the input decides them.
        down: the value of one unit, a power of two, as a scalar tensor on the streams' device.
        up: ``1 / down``.
        end: sums are exact below it.
        nan: a NaN on the device.
        word_type: the dtype of the words.
    """

    __slots__ = ("bits", "down", "end", "nan", "up", "word_type")

    def __init__(self, down: Tensor, word_type: torch.dtype, bits: int | None = None) -> None:
        self.bits = bits
        self.word_type = word_type
        self.down = down
        self.up = down.reciprocal()
        # two bits less than the word: the sum of two such values still fits, with the sign
        self.nan = torch.full_like(down, math.nan)
        self.end = down * 2.0 ** (torch.iinfo(word_type).bits - 2)


def fraction_bits(scale: Scale) -> int:
    """The fractional bits of a grid as users give them, without ``EXTRA_BITS`` (host sync)."""
    extra = EXTRA_BITS if scale.word_type == torch.int64 else 0
    return round(-math.log2(float(scale.down))) - extra


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


class Amax:
    """The magnitudes of a sum, as scalars on the device.

    Attributes:
        value: the largest of the value that was added and of the stream before; NaN if there is a
            NaN. The stream reads as NaN if it is beyond the range.
        after: the smallest and the largest value of the stream after the sum.
        scale: the stream's grid.
        half: whether float16 was involved, which overflows in a plain network, too.
        before: of the streams that the sum started from; of joined streams, their own.
        step: the step that computed the stream; None outside of steps.
        number: later amaxes have larger numbers.
    """

    __slots__ = ("_down", "after", "before", "half", "number", "scale", "step", "value")

    def __init__(
        self,
        value: Tensor,
        after: tuple[Tensor, ...],
        scale: Scale,
        *,
        half: bool = False,
        before: tuple[Amax, ...] = (),
    ) -> None:
        self.value = value
        self.after = after
        self.scale = scale
        self.half = half
        self.before = before
        self.step = _running.step
        self.number = next(_numbers)
        self._down: Tensor | None = None

    @property
    def down(self) -> Tensor:
        """The value of one unit; NaN if the value is beyond the range (rule 6)."""
        if self._down is None:
            # a comparison on the device, since reading it would stall
            self._down = torch.where(self.value < self.scale.end, self.scale.down, self.scale.nan)
        return self._down

    def largest(self) -> Tensor:
        """The largest magnitude so far, with the stream after the sum."""
        return magnitude([self.value, *self.after])

    def with_before(self) -> Iterable[Amax]:
        """This amax, and every amax before it."""
        seen: dict[Amax, None] = {}
        waiting = [self]
        while waiting:
            amax = waiting.pop()
            if amax not in seen:
                seen[amax] = None
                waiting += amax.before
        return seen


def magnitude(scalars: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of scalars; NaN if there is a NaN."""
    return torch.stack(tuple(scalars)).abs().amax()


def span_of(t: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of ``t``, which is not empty; NaN if it holds NaN."""
    t = t.detach() if t.requires_grad else t
    # ten times as fast as torch.linalg.vector_norm on a CPU
    flat = t if t.is_contiguous() else in_memory_order(t)
    low, high = torch.aminmax(t if flat is None else flat)
    return low, high


def involves_half(*tensors: Tensor) -> bool:
    """Whether float16 was involved in a sum of ``tensors``."""
    kinds = (*(t.dtype for t in tensors), *autocast_dtypes(tensors[0].device))
    return torch.float16 in kinds


def _joined(amaxes: Iterable[Amax | None]) -> Amax | None:
    """The amax of streams that have exchanged values."""
    known = list(dict.fromkeys(amax for amax in amaxes if amax is not None))
    if len(known) < 2:
        return known[0] if known else None
    first = known[0]
    ends = tuple(end for amax in known for end in amax.after)
    joined = Amax(first.value, ends, first.scale, half=first.half, before=tuple(known))
    joined.step = first.step  # a step that moves values is not the cause
    return joined


def amaxes_of(state: Iterable[Tensor | Fixed]) -> list[Amax]:
    """The amaxes of the streams that have words and values."""
    known = [t.amax for t in as_fixed(state) if isinstance(t, Fixed) and t.amax is not None]
    return [amax for amax in known if has_values(amax.value)]


class Fixed:
    """A stream as integers, ``(B, C, ...)``: ``words * scale.down`` is its value.

    Attributes:
        words: int32, or int64 for float64 streams.
        scale: its grid.
        dtype: of the float tensor.
        amax: None for an empty stream.
    """

    __slots__ = ("amax", "dtype", "scale", "words")

    def __init__(
        self, words: Tensor, scale: Scale, dtype: torch.dtype, amax: Amax | None = None
    ) -> None:
        self.words = words
        self.scale = scale
        self.dtype = dtype
        self.amax = amax

    @property
    def shape(self) -> torch.Size:
        return self.words.shape

    def read(self) -> Tensor:
        """The float tensor, without its words."""
        with counting_changes():
            floats = torch.empty_like(self.words, dtype=self.dtype)
        if self.amax is not None:  # an empty stream has nothing to read
            in_chunks(read, (self.words, floats), self.amax.down)
        return floats

    def with_words(self, words: Tensor, dtype: torch.dtype | None = None) -> Fixed:
        """A stream with the same values in other places."""
        return Fixed(words, self.scale, dtype or self.dtype, self.amax)

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


def check_grid(grid: Grid) -> None:
    """Raise a ValueError unless ``grid`` is valid."""
    whole = isinstance(grid, int) and not isinstance(grid, bool)
    if grid != AUTO and not (whole and 0 <= int(grid) <= MAX_BITS):
        raise ValueError(
            f"grid={grid!r}: expected the number of fractional bits, 0 to {MAX_BITS} "
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


def set_words(t: Tensor, fixed: Fixed) -> None:
    """Make ``fixed`` the words of ``t``."""
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

    The tape of the earlier steps shares these words, so its guard reports a drift.
    """
    if not keeps_words():
        return
    for t in state:
        if t.layout is not torch.strided or not t.numel() or (fixed := fixed_of(t)) is None:
            continue
        # .data: the words of an unchanged stream do not count as changed
        scale = fixed.scale
        in_chunks(renew, (t.detach(), fixed.words.data), scale.up, scale.down)
        if (known := fixed.amax) is not None:
            span = span_of(t)
            before = known.before
            fixed.amax = Amax(magnitude(span), span, scale, half=known.half, before=before)
            fixed.amax.step = known.step


def _view_key(t: Tensor) -> tuple[Any, ...]:
    return version_of(t), t.shape, t.stride(), t.storage_offset()


def as_fixed(state: Iterable[Tensor | Fixed]) -> Streams:
    """The state; streams that have words become :class:`Fixed`."""
    return tuple([t if type(t) is Fixed else fixed_of(t) or t for t in state])  # type: ignore[arg-type]


def as_floats(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The state as float tensors; each :class:`Fixed` becomes a tensor with words."""
    return tuple([read_with_words(t) if isinstance(t, Fixed) else t for t in state])


def read_with_words(fixed: Fixed) -> Tensor:
    """The float tensor, with its words."""
    t = fixed.read()
    set_words(t, fixed)
    return t


def backing_tensors(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The tensors that hold the state in memory."""
    return tuple([t.words if isinstance(t, Fixed) else t for t in state])


def largest(t: Tensor) -> Tensor:
    """The largest magnitude in ``t``, which is not empty; NaN if ``t`` holds NaN."""
    return magnitude(span_of(t))


def amaxes_used_by(fixed: Fixed) -> list[Amax]:
    """The amaxes that decide whether gradients through this stream are right.

    Includes the amaxes of the running step's streams: the sums that computed them may lie outside
    the graph that runs backward.
    """
    return amaxes_of((*_running.state, fixed))


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
            set_words(t, f)


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
    amax = _joined(f.amax for f in state)
    first = Fixed(state[0].words, state[0].scale, state[0].dtype, amax)
    pairs = itertools.zip_longest(outputs, dtypes[: len(outputs)])
    return tuple(first.with_words(as_dense(t, first.words), dtype) for t, dtype in pairs)


_NOT_MOVED = (
    "a step with exact = True got integers; expected forward and inverse to move them as they move "
    "floats. Use AdditiveCoupling for sums, or leave exact = False"
)
