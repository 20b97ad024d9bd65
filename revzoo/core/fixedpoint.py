"""Fixed-point streams: sums of integers, hence reconstructions without error.

Floating-point addition rounds, so ``(x + v) - v`` is not ``x`` and a deep network reconstructs its
input with an error that grows on the way. Integer addition does not round. So a stream in mode
``exact`` is a tensor of *words*, integers on a grid of multiples of ``2**-bits``; the float tensor
that branches read, and through which gradients flow, is made from them. Each branch value is
rounded to the grid before it is added, hence ``(x + v) - v == x`` bit for bit at any depth.

Gomez et al. 2017 (arXiv 1707.04585, section 3.2) suggest fixed point; the argument comes from
exactly reversible learning in Maclaurin et al. 2015 (arXiv 1502.03492), without its information
buffer, which additions do not need. torch's own quantisation (``fake_quantize``) clamps silently
and saves a mask for the backward pass; here leaving the range is an error, and nothing is saved.

NOTE [ Words and floats ]
    1. Streams of up to 32 bits have 32-bit words, 23 fractional bits and a range of +-128 by
       default: as precise as float32 itself at 1. Where one is float64, all have 64-bit words and
       29 fractional bits more.
    2. The words belong to the storage of the float tensor, so that an alias has them too
       (``detach()``). They are forgotten with the storage, and ignored where the tensor was changed
       in place or is another view. A tensor without words is rounded to the grid. Tensors of
       inference mode count no changes, so those with words are made outside of it.
    3. The float tensor holds 24 bits of the word. Whoever stores the output of a network elsewhere
       keeps these only, and inverts it with the error of one rounding; with 14 bits or fewer a
       float32 holds the whole word.
    4. A step that only moves values runs on the words as well. Sums are computed here.
    5. Where no ``grid`` is given, the range follows the largest value that enters a chain of steps,
       at least 16 times of it: computed on the device, of this input alone.
    6. A word wraps around beyond 31 bits. So a value or stream beyond 30 bits turns the stream
       into NaN, also in a replay, at no synchronisation, and the backward pass raises a RangeError.
       Where values were infinite or NaN themselves, as in an overflow of float16, NaN is what
       remains of them.
    7. Inside torch.func transforms, forward-mode AD and graphs that torch captures, there is
       nothing to invert: streams are floats there, with values rounded to a given ``grid``.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from revzoo.core.layout import dense, has_values
from revzoo.core.replay import version_of

AUTO = "auto"
DEFAULT_BITS = 23
_MOST_BITS = 29
EXTRA_BITS = 29  # of float64 streams
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_EXPECTED_RANGE = 4.0  # inputs below this have DEFAULT_BITS
_CHUNK = 2**16  # values; the operations of one sum stay in a CPU core's cache
_CHUNK_OF_DEVICES = 2**22  # values; 16 MB of scratch instead of a stream

Grid = int | str
Scale = float | Tensor


class Fixed:
    """A stream as integers, ``(B, C, ...)``: ``words * down`` is its value.

    Attributes:
        words: int32, or int64 for float64 streams.
        down: the value of one unit, a power of two; a tensor where it depends on the input.
        dtype: of the float tensor.
        peak: on the device, the largest magnitude that went into the words, or into those that
            they were reconstructed from, in units; None for a stream without values.
    """

    __slots__ = ("down", "dtype", "peak", "words")

    def __init__(
        self, words: Tensor, down: Scale, dtype: torch.dtype, peak: Tensor | None = None
    ) -> None:
        self.words = words
        self.down = down
        self.dtype = dtype
        self.peak = peak

    @property
    def shape(self) -> torch.Size:
        return self.words.shape

    @property
    def limit(self) -> float:
        """In units: words and values below it add up without wrapping around."""
        return _limit(self.words.dtype)

    def read(self) -> Tensor:
        """The float tensor, without its words."""
        with counting_changes():
            floats = torch.empty_like(self.words, dtype=self.dtype)
        _in_chunks(_read, (self.words, floats), _down(self.down, self.peak, self.limit))
        return floats

    def moved(self, words: Tensor, dtype: torch.dtype | None = None) -> Fixed:
        """The same values in other places."""
        return Fixed(words, self.down, dtype or self.dtype, self.peak)

    def minus(self, value: Tensor, *, overwrite: bool = False) -> Fixed:
        """The words from before ``value`` was added, into the memory of ``value`` if allowed."""
        words = self.words
        dense = value.dtype.itemsize == words.dtype.itemsize and value.stride() == words.stride()
        out = value.view(words.dtype) if overwrite and dense else torch.empty_like(words)
        _in_chunks(_subtract, (words, value, out), 1 / self.down)
        return Fixed(out, self.down, self.dtype, self.peak)


Streams = tuple[Tensor | Fixed, ...]


def _limit(words: torch.dtype) -> float:
    return 2.0 ** (torch.iinfo(words).bits - 2)


def _down(down: Scale, peak: Tensor | None, limit: float) -> Scale:
    """``down``; NaN where the ``peak`` went beyond the limit (rule 6)."""
    return down if peak is None else torch.where(peak < limit, down, math.nan)


def counting_changes() -> AbstractContextManager[Any]:
    """Where tensors count their changes in place, as those made in inference mode do not."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def check_bits(grid: Grid) -> Grid:
    """Return ``grid``, or raise a ValueError that says what a grid may be."""
    whole = isinstance(grid, int) and not isinstance(grid, bool)
    if grid != AUTO and not (whole and 0 <= int(grid) <= _MOST_BITS):
        raise ValueError(
            f"grid={grid!r}: expected the number of fractional bits, 0 to {_MOST_BITS} "
            f"({DEFAULT_BITS}: resolution 2**-{DEFAULT_BITS}, range +-{2 ** (30 - DEFAULT_BITS)}), "
            f"or {AUTO!r}: {DEFAULT_BITS}, fewer where the input is large"
        )
    return grid


def can_have_words(state: Iterable[Tensor]) -> bool:
    """Whether the streams are dense and of a real floating type of 16, 32 or 64 bits."""
    return all(t.dtype in _TYPES and t.layout is torch.strided for t in state)


def keeps_words() -> bool:
    """Rule 7 of NOTE [ Words and floats ]."""
    return (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


_KEY = "_revzoo_fixed"  # attribute of a storage: Fixed, by where in it the float tensor lies


def fixed_of(t: Tensor) -> Fixed | None:
    """The words of ``t``, if it has any (rule 2 of NOTE [ Words and floats ])."""
    try:
        found: dict[Any, Fixed] | None = vars(t.untyped_storage()).get(_KEY)
    except (NotImplementedError, RuntimeError):  # a tensor without storage
        return None
    return None if found is None else found.get(_place(t))


def _set_words(t: Tensor, fixed: Fixed) -> None:
    # An attribute: a dictionary with weak keys takes 16 times as long to find them (1.7 us).
    attributes = vars(t.untyped_storage())
    attributes[_KEY] = {**attributes.get(_KEY, {}), _place(t): fixed}


def _place(t: Tensor) -> tuple[Any, ...]:
    return version_of(t), t.shape, t.stride(), t.storage_offset()


def fixed_or_not(state: Iterable[Tensor | Fixed]) -> Streams:
    """The state with the words of each stream in its place, if it has any."""
    return tuple(t if isinstance(t, Fixed) else fixed_of(t) or t for t in state)


def floats(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The state as float tensors that have their words."""
    return tuple(_with_words(t) if isinstance(t, Fixed) else t for t in state)


def _with_words(fixed: Fixed) -> Tensor:
    t = fixed.read()
    _set_words(t, fixed)
    return t


def held_in(state: Iterable[Tensor | Fixed]) -> tuple[Tensor, ...]:
    """The tensors that hold the state in memory."""
    return tuple(t.words if isinstance(t, Fixed) else t for t in state)


def put_on_grid(state: tuple[Tensor, ...], grid: Grid) -> tuple[Tensor, ...]:
    """The state rounded to one grid, with words; as it is where it has words of that grid.

    The gradient of the rounding is the identity.
    """
    wide = any(t.dtype == torch.float64 for t in state)
    words = torch.int64 if wide else torch.int32
    fixed = [f for t in state if (f := fixed_of(t)) is not None and f.words.dtype == words]
    if len(fixed) == len(state) and _have_scale(fixed, grid):
        return state
    unit: Scale = 2.0**-grid if isinstance(grid, int) else _unit_for(state)
    # One tensor for all streams: it tells that they are on the same grid.
    unit = unit * 2.0**-EXTRA_BITS if wide else unit
    return tuple(_entered(t, unit, words) for t in state)


def _have_scale(fixed: Sequence[Fixed], grid: Grid) -> bool:
    first = fixed[0]
    if isinstance(grid, int):
        extra = EXTRA_BITS if first.words.dtype == torch.int64 else 0
        return all(isinstance(f.down, float) and f.down == 2.0 ** -(grid + extra) for f in fixed)
    return isinstance(first.down, Tensor) and all(f.down is first.down for f in fixed)


def _unit_for(state: tuple[Tensor, ...]) -> Tensor:
    """2**-DEFAULT_BITS or more, by the largest value (rule 5 of NOTE [ Words and floats ])."""
    sizes = [largest(t).float() for t in state if t.numel()]
    size = functools.reduce(torch.maximum, sizes) if sizes else state[0].new_zeros(()).float()
    size = size.clamp_min(_EXPECTED_RANGE)
    mantissa, _ = torch.frexp(size)  # in [0.5, 1), so that the quotient is a power of two
    return size / mantissa * (2.0**-DEFAULT_BITS / (2 * _EXPECTED_RANGE))


def largest(t: Tensor) -> Tensor:
    """The largest magnitude in ``t``, which is not empty; NaN where there is one."""
    t = t.detach() if t.is_floating_point() else t.detach().float()
    low, high = torch.aminmax(t)  # ten times as fast as torch.linalg.vector_norm on a CPU
    return torch.maximum(-low, high)


class _Rounded(torch.autograd.Function):
    """The float tensor of words that stand for ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fixed: Fixed) -> Tensor:
        return _with_words(fixed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _entered(x: Tensor, unit: Scale, kind: torch.dtype) -> Tensor:
    words = torch.empty_like(x, dtype=kind)
    up = 1 / unit
    _in_chunks(_quantise, (x.detach(), words), up)
    peak = largest(x).to(_computed_in(words)) * up if x.numel() else None
    entered: Tensor = _Rounded.apply(x, Fixed(words, unit, x.dtype, peak))
    return entered


def _summed(
    fill: Callable[..., None],
    fixed: Fixed,
    parts: tuple[Tensor, ...],
    dtype: torch.dtype,
    *options: Any,
    largest_part: int,
) -> Tensor:
    """The float tensor, with words, of a sum that ``fill`` computes of ``parts``, the value last.

    Args:
        fill: see :func:`_in_chunks`; it gets the parts, the words and the floats to fill.
        fixed: the stream that is added to.
        parts: see there.
        dtype: of the float tensor.
        *options: passed to ``fill`` behind the scales.
        largest_part: how many times the value the sum may add.
    """
    value, words = parts[-1], torch.empty_like(fixed.words)
    with counting_changes():
        total = torch.empty_like(words, dtype=dtype)
    up, down, peak = 1 / fixed.down, fixed.down, None
    if value.numel():
        peak = largest(value).to(_computed_in(words)) * (largest_part * up)
        if fixed.peak is not None:
            peak = torch.maximum(peak, fixed.peak)
        down = _down(down, peak, fixed.limit)
    _in_chunks(fill, (*parts, words, total), up, down, *options)
    if peak is not None:  # NaN, if it was made here, hides the value that it was made for
        peak = torch.fmax(peak, largest(total).to(peak.dtype) * up)
    _set_words(total, Fixed(words, fixed.down, dtype, peak))
    return total


class _Sum(torch.autograd.Function):
    """``x + sign * value`` on the words of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, fixed: Fixed, sign: int) -> Tensor:
        ctx.sign, ctx.dtype = sign, value.dtype
        fill = _add if sign > 0 else _take_away
        return _summed(fill, fixed, (fixed.words, value), x.dtype, largest_part=1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return gradient, (gradient if ctx.sign > 0 else -gradient).to(ctx.dtype), None, None


def add(x: Tensor, value: Tensor, fixed: Fixed, *, sign: int = 1) -> Tensor:
    """``x + sign * value``, rounded to the grid of ``x``; it has words, too.

    Args:
        x: a stream whose words are ``fixed``.
        value: of the same shape.
        fixed: see there.
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
        ctx.b, ctx.dtype = 2.0**-bits, value.dtype
        # With 2 b x, which is at most as large as the stream, a value counts twice.
        parts = (fixed.words, x, value)
        return _summed(_shift_in, fixed, parts, x.dtype, bits, largest_part=2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        b = ctx.b
        return gradient * b, gradient * (-2 * b), (gradient * (1 + b)).to(ctx.dtype), None, None


def second_difference(before: Tensor, x: Tensor, value: Tensor, fixed: Fixed, bits: int) -> Tensor:
    """``(1 + b) value - 2 b x + b before`` with ``b = 2**-bits``, and its words.

    Args:
        before: a stream whose words are ``fixed``; the product with b drops their low ``bits``.
        x: the stream that ``value`` was computed from.
        value: of the same shape.
        fixed: see there.
        bits: at least 1.
    """
    total: Tensor = _SecondDifference.apply(before, x, value, fixed, bits)
    return total


def undo_second_difference(
    total: Fixed, x: Tensor, value: Tensor, side: Tensor, bits: int
) -> Fixed:
    """The words of ``before``; ``side`` are the bits that :func:`pack_bits` kept of them."""
    words = torch.empty_like(total.words)
    _in_chunks(_shift_out, (total.words, x, value, words), 1 / total.down, bits)
    words |= _unpack_bits(side, words, bits)
    return Fixed(words, total.down, total.dtype, total.peak)


def _difference(
    x: Tensor, value: Tensor, words: Tensor, scratch: Tensor, up: Scale, n: int
) -> None:
    b = 2.0**-n
    scratch.copy_(value).mul_(1 + b).sub_(x, alpha=2 * b).mul_(up)
    words.copy_(scratch.round_())


def _shift_in(
    before: Tensor,
    x: Tensor,
    value: Tensor,
    words: Tensor,
    total: Tensor,
    scratch: Tensor,
    up: Scale,
    down: Scale,
    n: int,
) -> None:
    _difference(x, value, words, scratch, up, n)
    words += before >> n
    _read(words, total, scratch, down)


def _shift_out(
    total: Tensor, x: Tensor, value: Tensor, before: Tensor, scratch: Tensor, up: Scale, n: int
) -> None:
    _difference(x, value, before, scratch, up, n)
    torch.sub(total, before, out=before)
    before <<= n


def pack_bits(words: Tensor, bits: int) -> Tensor:
    """The low bits of each word, several words a byte where they fit."""
    low = (words & (2**bits - 1)).to(torch.uint8).flatten()
    slot = _slot(bits)
    parts = nn.functional.pad(low, (0, -len(low) % (8 // slot))).view(8 // slot, -1)
    packed = parts[0].clone()
    for k, part in enumerate(parts[1:], 1):
        packed |= part << (slot * k)
    return packed


def _unpack_bits(packed: Tensor, words: Tensor, bits: int) -> Tensor:
    slot = _slot(bits)
    parts = [(packed >> (slot * k)) & (2**bits - 1) for k in range(8 // slot)]
    return torch.cat(parts)[: words.numel()].view(words.shape).to(words.dtype)


def _slot(bits: int) -> int:
    return next(slot for slot in (1, 2, 4, 8) if slot >= bits)


def put_on_grid_of(fixed: Fixed, x: Tensor) -> Tensor:
    """``x`` rounded to the grid of ``fixed``, with words, in its type; the gradient passes."""
    return _entered(x.to(fixed.dtype), fixed.down, fixed.words.dtype)


def moved(fn: Callable[..., Any], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``fn(*state)``, of which the words go where the values go.

    Args:
        fn: moves values only, of tensors of any type; returns a tuple.
        state: each stream with words, or all without.
    """
    with counting_changes():
        outputs: tuple[Tensor, ...] = tuple(fn(*state))
    if keeps_words():
        move_words(fn, state, outputs)
    return outputs


def move_words(
    fn: Callable[..., Any], state: tuple[Tensor, ...], outputs: tuple[Tensor, ...]
) -> None:
    """Give the ``outputs`` that ``fn`` made of ``state`` by moving its values their words."""
    fixed = [fixed_of(t) for t in state]
    if not all(fixed) or all(fixed_of(t) is not None for t in outputs):
        return
    kinds = [t.dtype for t in outputs]
    found = words_through(fn, [f for f in fixed if f is not None], kinds)
    for t, f in zip(outputs, found, strict=True):
        if fixed_of(t) is None:
            _set_words(t, f)


def words_through(
    fn: Callable[..., Any], state: Sequence[Fixed], dtypes: Sequence[torch.dtype]
) -> tuple[Fixed, ...]:
    """The state whose values ``fn`` has moved; ``dtypes`` are those of the float tensors.

    Raises:
        ValueError: ``fn`` does not work on integers.
    """
    try:
        with torch.no_grad():
            outputs = fn(*[f.words for f in state])
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        kinds = {t.dtype for t in outputs}
    except RuntimeError as error:
        raise ValueError(f"{_NOT_MOVED}: {error}") from error
    if kinds != {state[0].words.dtype}:
        raise ValueError(f"{_NOT_MOVED}: it returned {', '.join(map(str, kinds))}")
    peaks = [f.peak for f in state if f.peak is not None]
    peak = functools.reduce(torch.maximum, peaks) if peaks else None
    first = Fixed(state[0].words, state[0].down, state[0].dtype, peak)
    pairs = itertools.zip_longest(outputs, dtypes[: len(outputs)])
    return tuple(first.moved(dense(t, first.words), dtype) for t, dtype in pairs)


_NOT_MOVED = (
    "a step with exact = True must give integers the places that it gives floats, and got "
    "integers; expected forward and inverse to move values only. Use AdditiveCoupling for sums, or "
    "leave exact = False"
)


def _computed_in(words: Tensor) -> torch.dtype:
    return torch.float64 if words.dtype == torch.int64 else torch.float32


def _quantise(x: Tensor, words: Tensor, scratch: Tensor, up: Scale) -> None:
    if x.dtype == scratch.dtype:
        torch.mul(x, up, out=scratch)
    else:
        scratch.copy_(x).mul_(up)
    words.copy_(scratch.round_())


def _read(words: Tensor, floats: Tensor, scratch: Tensor, down: Scale) -> None:
    if floats.dtype == scratch.dtype:
        floats.copy_(words).mul_(down)
    else:
        floats.copy_(scratch.copy_(words).mul_(down))


def _subtract(words: Tensor, value: Tensor, out: Tensor, scratch: Tensor, up: Scale) -> None:
    _quantise(value, out, scratch, up)
    torch.sub(words, out, out=out)


def _add(
    x: Tensor, value: Tensor, words: Tensor, total: Tensor, scratch: Tensor, up: Scale, down: Scale
) -> None:
    _quantise(value, words, scratch, up)
    torch.add(x, words, out=words)
    _read(words, total, scratch, down)


def _take_away(
    x: Tensor, value: Tensor, words: Tensor, total: Tensor, scratch: Tensor, up: Scale, down: Scale
) -> None:
    _subtract(x, value, words, scratch, up)
    _read(words, total, scratch, down)


def _in_chunks(fn: Callable[..., None], tensors: tuple[Tensor, ...], *scales: Scale) -> None:
    """``fn(*tensors, scratch, *scales)``, in pieces, for which a small scratch does."""
    words = next(t for t in tensors if not t.is_floating_point())
    kind, count = _computed_in(words), words.numel()
    chunk = _CHUNK if words.device.type == "cpu" else _CHUNK_OF_DEVICES
    if count <= chunk or not _lie_alike(tensors):
        fn(*tensors, torch.empty_like(words, dtype=kind), *scales)
        return
    flat = [t.as_strided((count,), (1,)) for t in tensors]
    scratch = torch.empty(chunk, dtype=kind, device=words.device)
    # Of tensors without values the first piece tells what memory it takes.
    for start in range(0, count if has_values(words) else 1, chunk):
        pieces = [t[start : start + chunk] for t in flat]
        fn(*pieces, scratch[: len(pieces[0])], *scales)


def _lie_alike(tensors: tuple[Tensor, ...]) -> bool:
    first = tensors[0]
    if any(type(t) not in (Tensor, FakeTensor) for t in tensors):
        return False
    dense = first.is_contiguous() or (
        first.dim() in (4, 5)
        and first.is_contiguous(
            memory_format=torch.channels_last if first.dim() == 4 else torch.channels_last_3d
        )
    )
    return dense and first.numel() > 0 and all(t.stride() == first.stride() for t in tensors)


class _Round(torch.autograd.Function):
    """Round to multiples of ``1 / scale``; the gradient is the identity (straight-through)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return (x * scale).round_().mul_(1 / scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return tangent


def round_to_grid(x: Tensor, bits: int) -> Tensor:
    """``x`` rounded, half to even, to multiples of ``2**-bits``; same shape and dtype.

    The gradient passes through unchanged. A narrow type keeps its own precision.
    """
    rounded: Tensor = _Round.apply(x, 2.0**bits)
    return rounded
