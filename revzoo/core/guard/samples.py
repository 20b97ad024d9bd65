"""Samples of streams for the guard: single values, spread evenly over the stream."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from revzoo.core.fixedpoint.words import Streams
from revzoo.core.tensors import has_values, values_of

# A random mask may change one image of a batch, so each image needs some values. More of them would
# cost memory: the tape keeps a sample of each stream.
SAMPLED = 128  # values of a stream
_SMALLEST_CHANNEL = 4  # values; the spread of fewer means little


def sample(computed: Streams, known: Streams) -> dict[int, Tensor]:
    """Sample the streams that a replay computes, except those that it knows; by their index.

    Leaves out fixed-point streams, whose words are summed, and tensors without values to compare.
    """
    others = set(map(id, known))
    changed = {
        i: sample_of(t)
        for i, t in enumerate(computed)
        if isinstance(t, Tensor) and id(t) not in others
    }
    return {i: values for i, values in changed.items() if values is not None}


def sample_of(t: Tensor) -> Tensor | None:
    """Sampled values of one stream; None if it has no values to compare."""
    t = _plain(t)
    # of integers masks and indices; not bytes, in which kernels keep uninitialised workspaces
    choices = (torch.bool, torch.int32, torch.int64)
    numbers = t.is_floating_point() or t.is_complex() or t.dtype in choices
    return values_in(t) if numbers and t.layout is torch.strided and has_values(t) else None


def _plain(t: Tensor) -> Tensor:
    return t if type(t) is Tensor else values_of(t)


def values_in(t: Tensor) -> Tensor:
    """The sampled values of a stream, in the same places for every layout."""
    t = _plain(t).detach()
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    return torch.take(t, _places(t.numel(), t.device))


@functools.lru_cache(maxsize=256)
def _places(count: int, device: torch.device) -> Tensor:
    # One in each of equal parts, at random: a stride would visit the same rows, columns or channels
    # of every image. The guard must not draw from the caller's random numbers.
    size = min(count, SAMPLED)
    parts = torch.arange(size, dtype=torch.float64, device="cpu")
    generator = torch.Generator("cpu").manual_seed(0)
    within = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
    return ((parts + within) * (count / size)).long().clamp_max(count - 1).to(device)


def spread_of_channels(t: Tensor) -> Tensor | None:
    """For each sampled value, the range of values of its channel; None if there are no channels.

    Infinity for a channel of equal values: only a constant can be added to it, which no norm
    amplifies.
    """
    t = _plain(t).detach()
    if not t.is_floating_point():
        return None
    # tokens (B, N, C) and signals (B, C, L) look alike, so we take both dims; images: dim 1
    dims = [d for d in ((1, 2) if t.dim() == 3 else (1,)) if d < t.dim()]
    spreads = []
    for d in dims:
        if t.numel() // t.shape[d] >= _SMALLEST_CHANNEL:
            others = [other for other in range(t.dim()) if other != d]
            spread = t.amax(others).float() - t.amin(others).float()
            spread = torch.where(spread > 0, spread, math.inf)
            channel = _places(t.numel(), t.device) // t.shape[d + 1 :].numel() % t.shape[d]
            spreads.append(spread[channel])
    return functools.reduce(torch.minimum, spreads) if spreads else None


def operand_of(t: Tensor, computed: Streams, known: Streams) -> Tensor:
    """The stream in ``known`` from which a replay computed ``t``; ``t`` if it cannot be told.

    Its size is that of the rounding errors, if ``t`` is smaller: in ``x = y - F(z)``, it is y.
    """
    passed_on = set(map(id, computed))

    def fits(other: object) -> bool:
        return (
            isinstance(other, Tensor)
            and id(other) not in passed_on
            and other.shape == t.shape
            and other.dtype.is_floating_point == t.dtype.is_floating_point
            and other.is_complex() == t.is_complex()
        )

    found: Sequence[Tensor] = [other for other in known if fits(other)]  # type: ignore[misc]
    return found[-1] if found else t
