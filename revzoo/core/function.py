"""Any function with an inverse as a checkpointed step."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from revzoo.core.checkpoint import run_step
from revzoo.core.invertible import Invertible, State


def invertible_checkpoint(
    fn: Callable[..., Any], inverse: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """``fn(*args, **kwargs)``, whose activations and tensor arguments are recomputed in backward.

    Args:
        fn: returns a tensor or a tuple of tensors. Modules that it is, is bound to, closes over or
            names as globals, also in lists and dictionaries, are replayed faithfully (statistics,
            flags). Pass other tensors by keyword: one from the same chain that ``fn`` holds in
            another way is never freed if its graph is not differentiated.
        inverse: called as ``inverse(*outputs, *others, **kwargs)``, where ``others`` are those of
            ``args`` that are no tensors, in order; returns the tensors of ``args``, in order.
        *args: the tensors among them (not inside containers) are what ``inverse`` reconstructs.
        **kwargs: passed on; tensors among them are kept and may require gradient.

    Returns:
        What ``fn`` returns. Consecutive calls form one chain, which keeps only its last output.

    Raises:
        ValueError: no positional argument is a tensor.

    Example::

        y = invertible_checkpoint(lambda x, k: x * k, lambda y, k: y / k, x, 3.0)
    """
    state = tuple(a for a in args if isinstance(a, Tensor))
    if not state:
        raise ValueError(
            "invertible_checkpoint got no tensor among its positional arguments: pass what the "
            "inverse reconstructs by position, the rest by keyword"
        )
    step = _Function(fn, inverse, args)
    outputs = run_step(step, state, **kwargs)
    return outputs[0] if step.bare else outputs


class _Function(Invertible):
    """``fn`` and ``inverse`` as a step of the tensors among ``args``; holds the other arguments."""

    def __init__(
        self, fn: Callable[..., Any], inverse: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self.streams = sum(isinstance(a, Tensor) for a in args)
        self.bare = False  # whether fn returns its tensor without a tuple
        self._fn, self._inverse = fn, inverse
        self._places = tuple(isinstance(a, Tensor) for a in args)
        self._others = tuple(a for a in args if not isinstance(a, Tensor))
        # As submodules, so that a replay finds their flags, buffers and parameters.
        self._modules_of_fn = nn.ModuleList(_modules_of((fn, inverse), set()))

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        tensors, others = iter(state), iter(self._others)
        outputs = self._fn(*(next(tensors if p else others) for p in self._places), **context)
        self.bare = isinstance(outputs, Tensor)
        return outputs

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._inverse(*state, *self._others, **context)


def _modules_of(thing: Any, seen: set[int]) -> Iterator[nn.Module]:
    """Modules that a callable is, is bound to, is a partial of, closes over or names."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, nn.Module):
        yield thing
        return
    for part in _parts_of(thing):
        yield from _modules_of(part, seen)


def _parts_of(thing: Any) -> Iterator[Any]:
    if isinstance(thing, (list, tuple)):
        yield from thing
    elif isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif inspect.ismethod(thing):
        yield thing.__self__
    elif inspect.isfunction(thing):
        named = thing.__globals__.keys() & set(thing.__code__.co_names)
        yield from (thing.__globals__[name] for name in named)
        yield from (c.cell_contents for c in thing.__closure__ or () if c != types.CellType())
        yield from thing.__defaults__ or ()
