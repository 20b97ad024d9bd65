"""The arithmetic on words: rounding to the grid, and sums.

A kernel fills tensors that its caller made. Floating-point values are rounded in float32, or in
float64 for words of 64 bits. Kernels that round a value return its *peak*: the largest magnitude,
in units, NaN if there is a NaN. On a CPU it is one number for all samples, where reading it costs
nothing; elsewhere a tensor with one for each sample, and what a sample beyond the range reads is
NaN. On a GPU, :mod:`revzoo.core.fixedpoint.triton_kernels` takes their place.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from revzoo.core.fixedpoint.scale import as_rows, for_samples_of, free_to_read
from revzoo.core.tensors import has_values

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


@functools.cache
def _triton_kernels(device: torch.device) -> Mapping[Callable[..., Any], Callable[..., Any]]:
    """Triton's kernels in place of those above; none if Triton does not work on the device."""
    try:
        from revzoo.core.fixedpoint import triton_kernels as ours

        one = torch.ones(1, 1, device=device)
        ours.read(one.int(), one, one.flatten())  # compiles
    except Exception as error:  # no Triton, or no C compiler for its launcher
        warnings.warn(
            f"Triton does not work here ({type(error).__name__}: {error}), so mode 'exact' runs "
            "ten kernels a sum, not one: install Triton and a C compiler",
            RuntimeWarning,
            stacklevel=2,
        )
        return {}
    return {
        quantise: ours.quantise,
        read: ours.read,
        subtract: ours.subtract,
        add_and_read: ours.add_and_read,
    }


def judge(peaks: Tensor, down: Tensor, unit: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """What each sample reached, and its ``down``, from what Triton's kernel returned."""
    from revzoo.core.fixedpoint import triton_kernels as ours

    with _on_device(peaks):
        return ours.judge(peaks, down, unit, limit)


def _on_device(t: Tensor) -> contextlib.AbstractContextManager[Any]:
    """A context in which Triton launches on the device of ``t``."""
    return torch.cuda.device_of(t)  # type: ignore[no-untyped-call]


def in_chunks(
    fn: Callable[..., Tensor | None], tensors: tuple[Tensor, ...], *figures: Tensor
) -> Tensor | None:
    """``fn(*tensors, *figures)``, piece by piece, so that its temporary tensors are small.

    Args:
        fn: a kernel.
        tensors: of one shape, ``(B, ...)``.
        *figures: figures of each sample, shaped to multiply the tensors.

    Returns:
        The largest of what the pieces return; of Triton's kernels, the largest magnitudes of
        summand and sum for each sample, ``(2, B)``.
    """
    on_gpu = tensors[0].device.type in _with_triton
    if backend is None and tensors[0].numel() <= _CHUNK and not on_gpu:
        return fn(*tensors, *figures)
    words = next(t for t in tensors if not t.is_floating_point())
    if on_gpu and words.dtype == torch.int32 and has_values(words):
        kernel = _triton_kernels(words.device).get(fn)
        flat = None if kernel is None else _as_rows(tensors, figures[0].numel())
        if kernel is not None and flat is not None and all(t.dtype in _TAKEN for t in flat):
            with _on_device(words):
                peaks: Tensor | None = kernel(*flat, *[f.flatten() for f in figures])
            return peaks
    compiles = backend is not None and fn in _COMPILABLE and has_values(words)
    chunk = _CHUNK if free_to_read(words) else _CHUNK_OF_DEVICES
    flat = _as_rows(tensors, figures[0].numel()) if compiles or words.numel() > chunk else None
    if flat is None:
        return fn(*tensors, *figures)
    of_rows = [for_samples_of(f.flatten(), 2) for f in figures]
    if compiles:
        assert backend is not None
        found: Tensor | None = _compiled(fn, backend)(*flat, *of_rows)
        return found
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


def _as_rows(tensors: tuple[Tensor, ...], count: int) -> list[Tensor] | None:
    """The tensors as rows, if the same places in memory hold corresponding elements."""
    if any(t.stride() != tensors[0].stride() for t in tensors):
        return None
    rows = [r for t in tensors if (r := as_rows(t, count)) is not None]
    return rows if len(rows) == len(tensors) else None
