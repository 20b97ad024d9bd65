"""Base classes for layers that act on each stream alone, or on all streams together.

A map of one tensor can act on a state in two ways: on each stream (a squeeze, an activation), or on
the concatenated streams (a mixing of channels). A layer defines three methods for one tensor; the
base class applies them to the state.

Legend: B batch, C channels of all streams together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from revzoo._checks import check_choice, check_count
from revzoo.core.invertible import Invertible, State, bare, name_of


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
