"""Streams and autocast: sums in float32, branches in the narrow type.

Under autocast a stem ends in bfloat16 or float16, and so would every stream after it. A stream is
a sum of many branches and is inverted by subtracting them again: with 8 or 11 bits of mantissa the
reconstruction is off by percents after a few dozen blocks. Streams are therefore widened where
they enter invertible steps, in every memory mode alike, while branches compute in autocast's type.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from revzoo.core.invertible import State


def widened(state: State) -> State:
    """The state with streams of autocast's type in float32; as it is where autocast is off."""
    narrow = _autocast_dtype(state[0])
    return tuple(t.float() if t.dtype == narrow else t for t in state) if narrow else state


def narrowed(x: Tensor) -> Tensor:
    """``x`` in autocast's type where autocast is on, as if it came out of a convolution.

    For branches that begin with a normalisation: autocast would run it in the type of its input,
    which on a stream is twice the memory and time.
    """
    narrow = _autocast_dtype(x)
    return x.to(narrow) if narrow and x.dtype == torch.float32 else x


def unnarrowed(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast leaves the type of ``x`` alone, for maps of whole streams."""
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
