"""Base classes for layers that act on each stream alone, or on all streams together.

A map of one tensor can act on a state in two ways: on each stream (a squeeze, an activation), or on
the concatenated streams (a mixing of channels). A layer defines three methods for one tensor; the
base class applies them to the state.

:class:`Split` and :class:`Merge` are steps, so a chain of sequences that exchange one tensor still
keeps only one state. The halves are dense copies, like reconstructed streams. torch sums a view
with gaps in a different order than a dense tensor. So a branch that begins with a normalisation
would not repeat its value bit for bit, as mode ``exact`` needs.

NOTE [ Streams and autocast ]
    Under autocast the output of a stem is bfloat16 or float16, and so would be every stream after
    it. A stream is a sum of many branches, and its inversion subtracts them again: with 8 or 11
    bits of mantissa the reconstruction has an error of percents after a few dozen blocks. So
    streams are widened before invertible steps, in every memory mode, while branches compute in
    autocast's dtype.

Legend: B batch, C channels of all streams together.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from revzoo._checks import check_choice, check_count, counts_of, is_count
from revzoo.core.invertible import Invertible, State, bare, name_of
from revzoo.core.tensors import autocast_dtype


def zero_log_det(x: Tensor) -> Tensor:
    """Log-determinants of a map that only moves values: zeros ``(B,)``."""
    return x.new_zeros(len(x))


class _OfOneTensor(Invertible):
    def __init__(self, *, streams: int = 2) -> None:
        super().__init__()
        check_count("streams", streams)
        self.streams = streams

    def transform(self, x: Tensor) -> Tensor:
        """The map of one tensor."""
        raise NotImplementedError(f"{type(self).__name__} must define transform(x) -> y")

    def restore(self, y: Tensor) -> Tensor:
        """The inverse of :meth:`transform`."""
        raise NotImplementedError(f"{type(self).__name__} must define restore(y) -> x")

    def log_det_of(self, x: Tensor) -> Tensor:
        """Log-determinants ``(B,)`` of :meth:`transform` at ``x``; zeros by default."""
        return zero_log_det(x)


class Streamwise(_OfOneTensor):
    """``(x1, ..., xn) -> (transform(x1), ..., transform(xn))``."""

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        return bare(tuple(self.transform(x) for x in state))

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return bare(tuple(self.restore(y) for y in state))

    def log_det(self, *state: Tensor, **context: Any) -> Tensor:
        return torch.stack([self.log_det_of(x) for x in state]).sum(0)


def log_det_dtype(x: Tensor) -> torch.dtype:
    """The type of ``x``'s log-determinants: at least float32, since they are sums over an image."""
    return torch.promote_types(x.dtype, torch.float32)


class Joint(_OfOneTensor):
    """Applies ``transform`` to the streams concatenated along ``dim``, and splits the result.

    Args:
        size: of all streams together along ``dim``; ``transform`` must keep it.
        dim: of the concatenation: 1 for channels, -1 for the last dimension.
        streams: number of streams of the state; they may differ in size.

    Raises:
        ValueError: an argument is out of range; at the call, the streams do not add up to ``size``.
    """

    def __init__(self, size: int, *, dim: int = 1, streams: int = 2) -> None:
        super().__init__(streams=streams)
        check_count(f"{type(self).__name__} size", size)
        check_choice("dim", dim, (1, -1))
        self.size = size
        self.dim = dim

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._cut(self.transform(self._joined(state)), state)

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._cut(self.restore(self._joined(state)), state)

    def log_det(self, *state: Tensor, **context: Any) -> Tensor:
        return self.log_det_of(self._joined(state))

    def _joined(self, state: State) -> Tensor:
        sizes = [x.shape[self.dim] if x.dim() > 1 else 0 for x in state]
        if sum(sizes) != self.size:
            shapes = ", ".join(str(tuple(x.shape)) for x in state)
            raise ValueError(
                f"{name_of(self)} got streams of shape {shapes}: expected {self.size} in all along "
                f"dim {self.dim}; build it for the size that reaches it, all streams together"
            )
        return state[0] if len(state) == 1 else torch.cat(state, dim=self.dim)

    def _cut(self, x: Tensor, like: State) -> Tensor | State:
        if len(like) == 1:
            return x
        # the sizes of the input streams, which may differ
        return torch.split(x, [t.shape[self.dim] for t in like], dim=self.dim)

    def per_channel(self, vector: Tensor, x: Tensor) -> Tensor:
        """``vector (C,)`` in the type of ``x``, shaped to combine with it along ``dim``."""
        after = x.dim() - 2 if self.dim == 1 else 0
        return vector.to(x.dtype).reshape(-1, *[1] * after)

    def over_channels(self, x: Tensor) -> tuple[int, ...]:
        """The dimensions of ``x`` other than ``dim``."""
        return tuple(i for i in range(x.dim()) if i != self.dim % x.dim())

    def at_each_position(self, log_det: Tensor, x: Tensor) -> Tensor:
        """``(B,)``: the log-determinant of one position times their number, e.g. ``H * W``."""
        positions = x[0].numel() // self.size if len(x) else 0
        return (log_det.to(log_det_dtype(x)) * positions).expand(len(x))

    def extra_repr(self) -> str:
        return f"{self.size}, dim={self.dim}, streams={self.streams}"


def widened(state: State) -> State:
    """The state, with streams of autocast's dtype in float32; unchanged without autocast."""
    narrow = autocast_dtype(state[0])
    return tuple(t.float() if t.dtype == narrow else t for t in state) if narrow else state


def narrowed(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype if autocast is on, like the output of a convolution.

    For branches that begin with a normalisation: autocast runs it in the dtype of its input, and
    float32 streams would take twice the memory and time.
    """
    narrow = autocast_dtype(x)
    return x.to(narrow) if narrow and x.dtype == torch.float32 else x


def at_least_float32(t: Tensor) -> Tensor:
    """``t``, but not in a narrower type, in which torch cannot solve linear systems."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast for ``x``, for maps of whole streams."""
    return (
        contextlib.nullcontext()
        if autocast_dtype(x) is None
        else torch.autocast(x.device.type, enabled=False)
    )


Parts = tuple[int, int]
HALVES: Parts = (1, 1)


def halves(x: Tensor, dim: int = 1, parts: Parts = HALVES) -> State:
    """Two pieces of ``x`` along ``dim`` with relative sizes ``parts``, as dense copies.

    Raises:
        ValueError: the tensor has no such dimension, its size is not divisible, or it is nested.
    """
    _check_has(x, dim)
    if x.is_nested:  # the backward pass of torch.split would end in a segmentation fault
        raise ValueError("got a nested tensor to split in two streams: pass two streams instead")
    unit = x.shape[dim] // sum(parts)  # not divmod(), which torch.jit.trace does not take
    if x.shape[dim] % sum(parts):
        number = "an even number" if parts == HALVES else f"a multiple of {sum(parts)}"
        raise ValueError(
            f"got one tensor of shape {tuple(x.shape)} to split in two streams along dim={dim}: "
            f"expected {number} of channels there; choose another dim, other relative sizes "
            "(split= of a sequence, parts= of Split), pad the channels or pass two streams"
        )
    # not torch.split alone, whose pieces are views with gaps: see the module
    pieces = torch.split(x, [unit * n for n in parts], dim)
    return tuple(t.clone(memory_format=torch.preserve_format) for t in pieces)


def check_cut(dim: int, parts: Sequence[int], *, name: str = "parts") -> tuple[int, Parts]:
    """``dim`` and ``parts`` as Split and Merge keep them; ``name`` is the argument for ``parts``.

    Raises:
        ValueError: ``dim`` is not a whole number, ``parts`` are not two positive ones.
    """
    if not is_count(dim, least=-sys.maxsize):
        raise ValueError(f"dim={dim!r}: expected a dimension of the tensor, such as 1 or -1")
    counts = counts_of(parts, repeat=0)
    if len(counts) != 2:
        raise ValueError(
            f"{name}={parts!r}: expected the relative sizes of two streams, two whole numbers of "
            "at least 1, such as (1, 2)"
        )
    return int(dim), (counts[0], counts[1])


def _check_has(x: Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        fits = f"a dim from {-x.dim()} to {x.dim() - 1}" if x.dim() else "a tensor with dimensions"
        raise ValueError(f"dim={dim}: got a tensor of shape {tuple(x.shape)}, expected {fits}")


class _Cut(Invertible):
    exact = True

    def __init__(self, dim: int = 1, parts: Parts = HALVES) -> None:
        super().__init__()
        self.dim, self.parts = check_cut(dim, parts)

    def log_det(self, x: Tensor, *others: Tensor, **context: Any) -> Tensor:
        return zero_log_det(x)


class Split(_Cut):
    """``(B, 2C, ...) -> (B, C, ...), (B, C, ...)``: the two halves along ``dim``.

    Args:
        dim: where the tensor is split.
        parts: relative sizes of the pieces: ``(1, 2)`` splits 3 channels into 1 and 2.

    Raises:
        ValueError: the tensor has no such dimension, or its size is not divisible.

    Example:
        >>> revzoo.Split()(torch.arange(4.0)[None])
        (tensor([[0., 1.]]), tensor([[2., 3.]]))
    """

    streams = 1
    outputs = 2

    def forward(self, x: Tensor, **context: Any) -> State:
        return halves(x, self.dim, self.parts)

    def inverse(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        return torch.cat((x1, x2), dim=self.dim)


class Merge(_Cut):
    """``(B, C, ...), (B, C, ...) -> (B, 2C, ...)``: the inverse of :class:`Split`.

    Raises:
        ValueError: the sizes of the streams do not match ``parts``.

    Example:
        >>> revzoo.Merge()(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[0., 0., 1., 1.]])
    """

    outputs = 1

    def forward(self, x1: Tensor, x2: Tensor, **context: Any) -> Tensor:
        _check_has(x1, self.dim)
        first, second = self.parts
        if x1.shape[self.dim] * second != x2.shape[self.dim] * first:
            raise ValueError(
                f"got streams of shape {tuple(x1.shape)} and {tuple(x2.shape)} to merge along "
                f"dim={self.dim}: expected sizes of {first} to {second} there, or the inverse "
                "would cut elsewhere. A coupling swaps the streams, a ReversibleBlock swaps them "
                "back; or pass the streams one by one"
            )
        # the gradients of cat() are views of one tensor, which would live as long as either of
        # them; the gradient of a product is dense and separate. Words have no gradient
        words = x1.dtype in (torch.int32, torch.int64)
        pieces = (x1, x2) if words else (x1 * 1, x2 * 1)
        return torch.cat(pieces, dim=self.dim)

    def inverse(self, y: Tensor, **context: Any) -> State:
        return halves(y, self.dim, self.parts)
