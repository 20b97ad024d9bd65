"""``x + F(x)`` as a module, so that branches become steps of a reversible run.

:func:`revzoo.make_reversible` turns a whole block, with its branches, into one step. It splits a
block whose branches are :class:`Residual` modules: attention and MLP of a transformer become two
steps. The backward pass replays one branch at a time, so its peak is lower; each branch keeps its
own side bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from revzoo._checks import check_callable


class Residual(nn.Module):
    """``x + fn(x)``; any shape, which ``fn`` must keep.

    Args:
        fn: a module, or a method of the block that holds the weights, which keeps their keys in the
            ``state_dict``. It returns a tensor, or a tuple that begins with one; further arguments
            pass through.

    Raises:
        TypeError: ``fn`` is not callable, or returns something else.
        ValueError: ``fn`` returns a tensor of a different shape than ``x``.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm = nn.LayerNorm(16)
        ...         self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        ...         self.first = revzoo.Residual(self.attend)
        ...         mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        ...         self.second = revzoo.Residual(mlp)
        ...
        ...     def attend(self, x):
        ...         x = self.norm(x)
        ...         return self.attention(x, x, x, need_weights=False)[0]
        ...
        ...     def forward(self, x):
        ...         return self.second(self.first(x))
        >>> net = revzoo.make_reversible(nn.Sequential(Block(), Block()), bits=4)
        >>> net(torch.randn(2, 5, 16)).sum().backward()
        >>> [row.path for row in revzoo.reversible_blocks(net)]
        ['0.first', '0.second', '1.first', '1.second']
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        check_callable("fn", fn)
        self.fn = fn

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``x + fn(x, *args, **kwargs)``; if ``fn`` returns a tuple, adds to its first tensor."""
        value = self.fn(x, *args, **kwargs)
        first, *rest = value if isinstance(value, tuple) and value else (value,)
        if not isinstance(first, Tensor):
            raise TypeError(
                f"the branch of Residual returned {type(value).__name__}: expected a tensor, or a "
                "tuple that begins with one"
            )
        if first.shape != x.shape:
            raise ValueError(
                f"the branch of Residual returned shape {tuple(first.shape)} for an input of "
                f"{tuple(x.shape)}: expected the same shape, since both are added"
            )
        return (x + first, *rest) if isinstance(value, tuple) else x + first
