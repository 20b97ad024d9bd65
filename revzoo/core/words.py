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
    1. Streams of up to 32 bits have 32-bit words. Each sample has its own unit: NOTE [ A scale for
       each sample ] in :mod:`revzoo.core.kernels`. If one stream is float64, all have
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
    5. Sums overflow beyond 31 bits. So a sample whose stream or summand is beyond 30 bits, infinite
       or NaN reads as NaN from there on, in replays too and without a host sync. If the values
       were finite, a RangeError follows (:mod:`revzoo.core.guard`).
    6. On a CPU we bound each stream by the sum of its summands' peaks, and measure it only if the
       bound comes near the range. Elsewhere reading a number would stall, so we measure each sum.
    7. Inside torch.func transforms, forward-mode AD and captured graphs nothing is inverted.
       Streams there are floats, and branch values are rounded if ``grid`` is a number.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from revzoo.core import kernels
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    runs_forward_alone,
)
from revzoo.core.kernels import (
    Measured,
    Scale,
    for_samples_of,
    free_to_read,
    in_chunks,
    magnitudes,
    read,
    renew,
    subtract,
    with_sum,
)
from revzoo.core.tensors import as_dense, has_values, runs_eagerly, version_of

AUTO = "auto"
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Grid = int | str


class Fixed:
    """A stream as integers, ``(B, C, ...)``: ``words * scale.down`` is its value.

    Attributes:
        words: int32, or int64 for float64 streams.
        scale: its grid.
        dtype: of the float tensor.
        down: ``scale.down``; NaN for samples that left their range.
        bound: no word is larger, in samples that did not leave their range; on a CPU.
        peaks: the largest values of the sum and its summand ``(B,)``, if samples may have left.
        checksum: the sum of the words, if the last sum or difference was asked for it.
    """

    __slots__ = ("bound", "checksum", "down", "dtype", "peaks", "scale", "words")

    def __init__(
        self,
        words: Tensor,
        scale: Scale,
        dtype: torch.dtype,
        *,
        down: Tensor | None = None,
        bound: float = math.inf,
    ) -> None:
        self.words = words
        self.scale = scale
        self.dtype = dtype
        self.down = scale.down if down is None else down
        self.bound = bound
        self.peaks: Tensor | None = None
        self.checksum: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.words.shape

    def shaped_down(self) -> Tensor:
        """``down``, to multiply the words."""
        dim = self.words.dim()
        if self.down is self.scale.down:
            return self.scale.shaped(dim)[1]
        return for_samples_of(self.down, dim)

    def read(self, dtype: torch.dtype | None = None) -> Tensor:
        """The float tensor, without its words; of ``dtype`` if given."""
        with counting_changes():
            floats = torch.empty_like(self.words, dtype=dtype or self.dtype)
        if floats.numel():
            in_chunks(read, (self.words, floats), self.shaped_down())
        return floats

    def with_words(self, words: Tensor, dtype: torch.dtype | None = None) -> Fixed:
        """A stream with the same values in other places of the same sample."""
        return Fixed(words, self.scale, dtype or self.dtype, down=self.down, bound=self.bound)

    def minus(
        self, value: Tensor, down: Tensor | None, *, overwrite: bool = False, sums: bool = False
    ) -> Fixed:
        """The stream before ``value`` was added, with its checksum if it ``sums``.

        ``overwrite`` allows reusing the memory of ``value``.
        """
        words = self.words
        fits = value.dtype.itemsize == words.dtype.itemsize and value.stride() == words.stride()
        # a compiled graph may not write over its input in another type
        reuses = overwrite and fits and kernels.backend is None
        out = value.view(words.dtype) if reuses else torch.empty_like(words)
        tensors, up = (words, value, out), self.scale.shaped(words.dim())[0]
        before = Fixed(out, self.scale, self.dtype, down=down)
        if sums:
            _, before.checksum = with_sum(subtract, tensors, out, up)
        else:
            in_chunks(subtract, tensors, up)
        return before

    def measure(
        self,
        peak: Tensor | None,
        before: float,
        total: Tensor,
        summand: Tensor,
        step: Step | None,
    ) -> Tensor | None:
        """Find the samples that left their range (rules 5 and 6 of NOTE [ Words and floats ]).

        ``peak`` is what the kernel returned; ``before`` bounds the stream before the ``summand``.

        Returns:
            Which samples did, ``(B,)``; None if none did, or if it is not known on the host.
        """
        scale, host = self.scale, free_to_read(total)
        if type(total) is not Tensor or total.is_meta:  # no values to measure
            return None
        if host:
            assert peak is not None
            self.bound = before + float(peak)
            if self.bound < scale.limit / 2 and scale.growth.seen == scale.grid:
                return None
        count = len(scale.down)
        if not host and peak is not None and peak.dim() == 2:  # Triton's kernel has judged
            self.peaks, self.down = peak
            scale.log.append(Measured(step, self.peaks, scale.sizes, scale.down))
            return None
        added, after = magnitudes(summand, count), magnitudes(total, count)
        left = ~((added < scale.end) & (after < scale.end))
        # after a summand beyond the range, the sum means nothing
        peaks = torch.where(added < scale.end, torch.maximum(added, after), added)
        scale.log.append(Measured(step, peaks, scale.sizes, scale.down))
        if host:
            inside = (after / scale.down)[~left]
            self.bound = float(inside.amax()) if len(inside) else 0.0
            if len(inside) == count:
                return None
        self.peaks = peaks
        self.down = torch.where(left, math.nan, self.down)
        return left if host else None


Streams = tuple[Tensor | Fixed, ...]


def counting_changes() -> AbstractContextManager[Any]:
    """A context in which new tensors count in-place changes, even inside inference mode."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


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


def words_in(step: Step, t: Tensor) -> Fixed | None:
    """The words of ``t`` if ``step`` computes on a grid here, and ``t`` has any."""
    return fixed_of(t) if step.grid is not None and keeps_words() else None


def set_words(t: Tensor, fixed: Fixed) -> None:
    """Make ``fixed`` the words of ``t``."""
    # on the storage, which aliases share; torch keeps one Python object for it as long as it lives
    # an attribute: a WeakKeyDictionary is 16 times as slow (1.7 us)
    attributes = vars(t.untyped_storage())
    attributes[_KEY] = {**attributes.get(_KEY, {}), _view_key(t): fixed}


def discard(t: Tensor) -> None:
    """Free the memory of ``t``, alone in its storage, and its words: its holder never reads it."""
    if type(t) is Tensor and has_values(t):
        storage = t.untyped_storage()
        vars(storage).pop(_KEY, None)
        storage.resize_(0)


def renew_words(state: Iterable[Tensor]) -> None:
    """Set the words of floats that changed without a new version (without a host sync).

    The tape of the earlier steps shares these words, so its guard reports a drift.
    """
    if not keeps_words():
        return
    for t in state:
        if t.layout is not torch.strided or not has_values(t) or (fixed := fixed_of(t)) is None:
            continue
        # .data: the words of an unchanged stream do not count as changed
        scale = fixed.scale
        up, down = scale.shaped(t.dim())[0], fixed.shaped_down()
        changed = in_chunks(renew, (t.detach(), fixed.words.data), up, down)
        if not free_to_read(t) or (changed is not None and bool(changed)):
            fixed.bound = math.inf


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


def apply_with_words(fn: Callable[..., Any], state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """``fn(*state)``, which only moves values; the words, of all streams or none, move, too."""
    # words are ignored after a change, so the new tensors must count changes (rule 2)
    with counting_changes():
        returned = fn(*state)
    outputs = (returned,) if isinstance(returned, Tensor) else tuple(returned)
    if keeps_words():
        move_words(fn, state, outputs)
    return outputs


def move_words(
    fn: Callable[..., Any],
    state: tuple[Tensor, ...],
    outputs: tuple[Tensor, ...],
    *,
    step: Step | None = None,
) -> None:
    """Give ``outputs = fn(*state)`` words: ``fn`` moves the words of ``state``, too.

    Raises:
        ValueError: ``step`` moves values between samples, but each has its own scale.
    """
    fixed = [f for t in state if (f := fixed_of(t)) is not None]
    if len(fixed) < len(state) or all(fixed_of(t) is not None for t in outputs):
        return
    moved = apply_to_words(fn, fixed, [t.dtype for t in outputs])
    if step is not None and not _keeps_samples(step, fn, fixed):
        if fixed[0].scale.bits is None:
            raise ValueError(
                "a step moves values from one sample (dimension 0) to another, but with "
                "grid='auto' each sample has its own scale: choose "
                "revzoo.set_memory(model, 'exact', grid=23), which has one unit for all"
            )
        for f in moved:  # where the samples that left their range are now is not known
            f.down = torch.where(f.down.isnan().any(), math.nan, f.down)
    for t, f in zip(outputs, moved, strict=True):
        if fixed_of(t) is None:
            set_words(t, f)


def _keeps_samples(step: Step, fn: Callable[..., Any], state: Sequence[Fixed]) -> bool:
    """Whether ``fn``, which moves values, moves none from sample to sample; asked once a step."""
    words, count = state[0].words, len(state[0].scale.down)
    known: bool | None = vars(step).get("_keeps_samples")
    if known is not None or count == 1 or not has_values(words):
        return known is not False
    # each element is the number of its sample; 0 is left for padding
    numbers = torch.arange(1, count + 1, dtype=words.dtype, device=words.device)
    marked = [for_samples_of(numbers, f.words.dim()).expand(f.shape) for f in state]
    known = all(
        t.shape[:1] == numbers.shape
        and bool(((t == 0) | (t == for_samples_of(numbers, t.dim()))).all())
        for t in _on_integers(fn, marked)
    )
    vars(step)["_keeps_samples"] = known
    return known


def apply_to_words(
    fn: Callable[..., Any], state: Sequence[Fixed], dtypes: Sequence[torch.dtype]
) -> tuple[Fixed, ...]:
    """Apply ``fn``, which only moves values in their sample, to words; ``dtypes`` are the floats'.

    Raises:
        ValueError: ``fn`` does not work on integers.
    """
    outputs = _on_integers(fn, [f.words for f in state])
    first = state[0]
    down, bound = first.down, max(f.bound for f in state)
    for other in state[1:]:
        if other.down is not down:
            down = torch.where(other.down.isnan(), math.nan, down)
    return tuple(
        Fixed(as_dense(t, first.words), first.scale, d or first.dtype, down=down, bound=bound)
        for t, d in itertools.zip_longest(outputs, dtypes[: len(outputs)])
    )


def _on_integers(fn: Callable[..., Any], state: Sequence[Tensor]) -> tuple[Tensor, ...]:
    try:
        with torch.no_grad():
            outputs = fn(*state)
        outputs = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        kinds = {t.dtype for t in outputs}
    except RuntimeError as error:  # torch has no integer kernels for products of matrices, norms
        raise ValueError(f"{_NOT_MOVED}: {error}") from error
    if kinds != {state[0].dtype}:
        raise ValueError(f"{_NOT_MOVED}: it returned {', '.join(map(str, kinds))}")
    return tuple(outputs)


_NOT_MOVED = (
    "a step with exact = True got integers; expected forward and inverse to move them as they move "
    "floats. Use AdditiveCoupling for sums, or leave exact = False"
)


def call_on_grid(
    call: Callable[..., Any],
    step: Step,
    state: State,
    context: Mapping[str, Any],
    *,
    inverts: bool = False,
) -> Any:
    """``call(step, *state, **context)``; the words move with the values.

    Not if a hook may change the outputs, unless the step ``inverts``: then no hook may.
    """
    if step.grid is None or not step.moves_values or not keeps_words():
        return call(step, *state, **context)
    # on a grid, the integer words of the streams move with the float values
    with counting_changes():
        returned = call(step, *state, **context)
    # extra outputs are not streams: they get no words and may have any layout
    outputs = as_state(returned, step)
    cut = len(outputs) - step.extras
    moves = functools.partial(step.forward, **context)
    trusted = inverts or runs_forward_alone(step)
    streams = _with_words(step, moves if trusted else None, state, outputs[:cut])
    return streams[0] if isinstance(returned, Tensor) else (*streams, *outputs[cut:])


def inverse_on_grid(step: Invertible, /, *state: Tensor, **context: Any) -> State:
    """``step.inverse(*state, **context)``; the words move with the values."""
    inverse = functools.partial(step.inverse, **context)
    if step.grid is None or not step.moves_values or not keeps_words():
        return as_state(inverse(*state), step, inverse=True)
    with counting_changes():
        inputs = as_state(inverse(*state), step, inverse=True)
    return _with_words(step, inverse, state, inputs)


def _with_words(step: Step, fn: Callable[..., Any] | None, state: State, outputs: State) -> State:
    """``outputs`` without gaps; ``fn``, which moves values, gives them the words of ``state``."""
    streams = tuple(as_dense(t, state[0]) for t in outputs)
    if fn is not None:
        ours = type(step).__module__.startswith("revzoo.layers.")
        move_words(fn, state, streams, step=None if ours else step)
    return streams
