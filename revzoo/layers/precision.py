"""Streams and autocast: sums in float32, branches in the narrow type.

Under autocast the output of a stem is bfloat16 or float16, and so would be every stream after it. A
stream is a sum of many branches, and its inversion subtracts them again: with 8 or 11 bits of
mantissa the reconstruction has an error of percents after a few dozen blocks. So streams are
widened before invertible steps, in every memory mode, while branches compute in autocast's dtype.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from revzoo.core.invertible import State


def widened(state: State) -> State:
    """The state, with streams of autocast's dtype in float32; unchanged without autocast."""
    narrow = _autocast_dtype(state[0])
    return tuple(t.float() if t.dtype == narrow else t for t in state) if narrow else state


def narrowed(x: Tensor) -> Tensor:
    """``x`` in autocast's dtype if autocast is on, like the output of a convolution.

    For branches that begin with a normalisation: autocast runs it in the dtype of its input, and
    float32 streams would take twice the memory and time.
    """
    narrow = _autocast_dtype(x)
    return x.to(narrow) if narrow and x.dtype == torch.float32 else x


def without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast for ``x``, for maps of whole streams."""
    return (
        contextlib.nullcontext()
        if _autocast_dtype(x) is None
        else torch.autocast(x.device.type, enabled=False)
    )


def _autocast_dtype(t: Tensor) -> torch.dtype | None:
    kind = t.device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)
