"""Makes a checkpointed step of any function with an inverse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from revzoo._checks import check_callable
from revzoo.core.invertible import Invertible, State, as_state
from revzoo.core.modes import run_in_mode


def invertible_checkpoint(
    fn: Callable[..., Any], inverse: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """``fn(*args, **kwargs)``, whose activations and tensor arguments are recomputed in backward.

    Args:
        fn: returns a tensor or a tuple of tensors. A replay restores its modules as those of a step
            (:mod:`revzoo.core.conditions`). Pass tensors by keyword: a tensor of the same chain
            that ``fn`` holds in another way is never freed if its graph never runs backward.
        inverse: called as ``inverse(*outputs, *others, **kwargs)``, where ``others`` are the
            ``args`` that are not tensors, in order; returns the tensors of ``args``, in order.
        *args: ``inverse`` reconstructs the tensors among them (not inside containers).
        **kwargs: passed on; tensors among them are kept and may require gradient.

    Returns:
        The result of ``fn``. Consecutive calls form one chain, which keeps only its last output.

    Raises:
        TypeError: ``fn`` or ``inverse`` is not callable.
        ValueError: no positional argument is a tensor.

    Example:
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = revzoo.invertible_checkpoint(lambda x, k: x * k, lambda y, k: y / k, x, 3.0)
        >>> y.sum().backward()
        >>> x.grad
        tensor([3., 3.])
    """
    check_callable("fn", fn)
    check_callable("inverse", inverse)
    return run_checkpoint(InvertibleCheckpoint(fn, inverse, args), args, kwargs)


def run_checkpoint(
    step: InvertibleCheckpoint, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """The result of the step's function for ``args`` and ``kwargs``, in mode ``invert``."""
    # `args` are not in the step, which the graph holds: their tensors would never be freed
    outputs = run_in_mode(step, tuple(a for a in args if isinstance(a, Tensor)), kwargs)
    return outputs if isinstance(outputs, Tensor) else as_state(outputs, step)


class InvertibleCheckpoint(Invertible):
    """``fn`` and ``inverse`` as a step of the tensors among ``args``; holds the other arguments."""

    remedy = "call the function without invertible_checkpoint()"
    drift_remedy = "call the function by checkpoint(), which keeps its inputs, or directly"

    def __init__(
        self, fn: Callable[..., Any], inverse: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        super().__init__()
        self.label = getattr(fn, "__qualname__", type(fn).__qualname__)
        self.streams = sum(isinstance(a, Tensor) for a in args)
        if not self.streams:
            raise ValueError(
                "invertible_checkpoint got no tensor among its positional arguments: pass the "
                "tensors that the inverse reconstructs by position, the rest by keyword"
            )
        self._fn, self._inverse = fn, inverse
        self._places = tuple(isinstance(a, Tensor) for a in args)
        self._others = tuple(a for a in args if not isinstance(a, Tensor))

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        tensors, others = iter(state), iter(self._others)
        return self._fn(*(next(tensors if p else others) for p in self._places), **context)

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        return self._inverse(*state, *self._others, **context)
