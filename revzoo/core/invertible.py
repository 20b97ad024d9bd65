"""The interface of a step, which the tape, the containers and the networks use.

A network is a sequence of *steps*. A step maps a *state*, a tuple of streams, to the next state.
An :class:`Invertible` step also has an inverse. So :mod:`revzoo.core.tape` can drop its
activations and recompute them from the outputs in the backward pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn

State = tuple[Tensor, ...]
_MODES = "revzoo.core.modes"  # imports this module


class NotInvertibleError(RuntimeError):
    """The inverse of a layer that loses information was requested; the message names the layer."""


class Step(nn.Module):
    """A part of a network: ``forward(*state)`` maps a state (a tuple of streams) to the next.

    A step of one stream takes and returns a tensor, like any module; several streams are a tuple. A
    sequence passes its keyword arguments to ``forward`` and ``inverse`` of each of its steps. The
    memory mode ``invert`` recomputes a step that is not :class:`Invertible`.

    Example:
        >>> class Halve(revzoo.Step):
        ...     streams = 1
        ...
        ...     def forward(self, x):
        ...         return nn.functional.avg_pool2d(x, 2)
        >>> Halve()(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 3, 4, 4])
    """

    streams: int = 2
    """Number of tensors that the step takes."""

    extras: int = 0
    """Number of extra outputs after the streams, such as a loss or attention weights. A sequence
    returns them after its streams, in the order of its steps. Inverses do not receive them."""

    memory: str = "invert"
    """The mode in which the step runs; :func:`revzoo.set_memory` changes it."""

    exact: bool = False
    """Whether mode ``exact`` supports the step: it only moves values, and so works on integers, or
    it adds to its streams (``sums``)."""

    sums: bool = False
    """Whether an exact step adds to its streams (:func:`revzoo.core.sums.add`)."""

    needs_words: bool = False
    """Whether the inverse works only in fixed point. Streams that cannot have words are recomputed,
    and mode ``invert`` without a grid refuses the step."""

    adds: bool = False
    """Whether the step is ``(x, z) -> (z, x + F(z))`` with the methods of
    :class:`~revzoo.AdditiveCoupling`."""

    pair: tuple[int, int] | None = None
    """For an additive coupling of two of several streams: ``(i, j)`` if the step adds ``F`` of
    stream ``j`` to stream ``i``, in place, and passes the others. Its function in the graph then
    gets these two streams alone."""

    delegates: bool = False
    """Whether another step runs this one in its memory mode (:func:`revzoo.make_reversible`)."""

    float_streams: int = 0
    """How many streams, counted from the last, stay in floating point in mode ``exact``."""

    inexact: str = ""
    """Why the step does not fit mode ``exact``; a clause: ``"products with its scales leave the
    grid"``."""

    grid: int | str | None = None
    """Fractional bits of the fixed-point streams; ``"auto"`` derives them from the input; None for
    floating-point streams."""

    growth: Any = None
    """:class:`~revzoo.core.fixedpoint.scale.Growth` of chains that begin here, after the first."""

    drift_limit: float | None = 1e-3
    """Largest relative error of a reconstruction; None compares nothing. See
    :mod:`revzoo.core.guard.drift`."""

    drift: float | None = None
    """Relative error of the last reconstruction."""

    close_checks: int = 2
    """In how many more passes the guard compares the step by itself, and in ``invert`` each of its
    channels. An error and :func:`revzoo.set_memory` start anew."""

    remedy: str = "use memory='store' for this step"
    """How to run the step without replays, for error messages."""

    drift_remedy: str = (
        "revzoo.set_memory(model, 'exact'), or set_memory(step, 'recompute') or 'store' for some "
        "steps; revzoo.set_drift_limit(model, LIMIT) changes the limit"
    )
    """What to do if a reconstruction of the step drifts, for error messages."""

    guarded: bool = True
    """False for a step that only moves values, if the guard compares the steps beside it."""

    label: str = ""
    """The step's place in its model, for error messages."""

    def __call__(self, *state: Any, **context: Any) -> Any:
        """``forward(*state, **context)``, hooks included, in the step's memory mode.

        A container replaces this by ``nn.Module.__call__``: its members run in their own modes.
        """
        if not all(isinstance(t, Tensor) for t in state):
            return plain_call(self, *state, **context)
        return sys.modules[_MODES].run_alone(self, state, context)

    def _get_name(self) -> str:
        """The class name in ``repr``, with the memory mode; a container has none."""
        if type(self).__call__ is not Step.__call__:
            return type(self).__name__
        return f"{type(self).__name__}[{sys.modules[_MODES].effective_mode(self)}]"

    @property
    def outputs(self) -> int:
        """Number of streams that the step returns; by default, as many as it takes."""
        return self.streams

    @property
    def moves_values(self) -> bool:
        """Whether an exact step runs on words just as on floats; the others compute sums."""
        return self.exact and not self.sums

    @property
    def invertible(self) -> bool:
        """Whether the step has an inverse."""
        return False

    @property
    def subject(self) -> nn.Module:
        """The module whose state a replay restores, with all it reaches; by default ``self``."""
        return self


def _no_inverse(self: Invertible, *state: Tensor, **context: Any) -> State:
    raise TypeError(
        f"{type(self).__name__} must define inverse(*state) -> state; or derive it from "
        "revzoo.Step, whose inputs are kept for the backward pass"
    )


def _no_log_det(self: Invertible, *state: Tensor, **context: Any) -> Tensor:
    raise NotImplementedError(
        f"{name_of(self)} defines no log_det(*state) -> tensor (B,): the log-determinant of its "
        "Jacobian is unknown. Define it, or use a step that does"
    )


class Invertible(Step):
    """A step with an inverse: ``inverse(*forward(*state)) == state`` up to rounding.

    ``forward`` may depend only on its inputs, the module's parameters and buffers, and torch's
    random state, so that a replay computes the same value.

    Raises:
        TypeError: the class defines no ``inverse``.

    Example:
        >>> class Swap(revzoo.Invertible):
        ...     def forward(self, x1, x2):
        ...         return x2, x1
        ...
        ...     def inverse(self, y1, y2):
        ...         return y2, y1
        >>> revzoo.ReversibleSequence([Swap()])(torch.arange(4.0)[None])
        tensor([[2., 3., 0., 1.]])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self).inverse is _no_inverse:
            _no_inverse(self)  # now, not in the first backward pass

    inverse: Callable[..., Any] = _no_inverse

    log_det: Callable[..., Tensor] = _no_log_det
    """``log_det(*state, **context)``: log of the absolute determinant of the Jacobian of
    ``forward`` at ``state``, one value per image ``(B,)``, natural logarithm, differentiable."""

    carried: tuple[str, ...] = ()
    """Buffers that ``forward`` updates before it uses them, and that ``inverse`` and ``log_det``
    read. A replay inverts with their values after the forward pass."""

    @property
    def invertible(self) -> bool:
        """True; a container answers for its members."""
        return True

    def replay(
        self, outputs: Any, record: Any, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        """Recover the inputs from ``outputs``, the streams, and evaluate the step once more.

        Override it only if inverting and recording share work, as in a coupling.

        Returns:
            The inputs; and the outputs, with extra outputs, computed from leaves of ``record``.
        """
        inputs = record.inverted(self.inverse, outputs, context)
        if not record.records:
            return inputs, ()
        check_stream_count(self, inputs, self.streams)
        leaves = [record.leaf(i, t) for i, t in enumerate(inputs)]
        return inputs, as_state(self.forward(*leaves, **context), self)

    def forward_with_log_det(self, *state: Tensor, **context: Any) -> tuple[Any, Tensor]:
        """``forward(*state)``, then ``log_det(*state)``; override it where they share work."""
        return plain_call(self, *state, **context), self.log_det(*state, **context)


class Settings(NamedTuple):
    """How a step runs. A step that runs in place of another, or joins its chain, copies them."""

    memory: str
    grid: int | str | None
    drift_limit: float | None
    guarded: bool

    @classmethod
    def of(cls, step: Step) -> Settings:
        """The settings of ``step``."""
        return cls(*(getattr(step, name) for name in cls._fields))

    def assign(self, step: Step) -> None:
        """Give ``step`` these settings."""
        for name, value in zip(self._fields, self, strict=True):
            setattr(step, name, value)


def is_container(module: nn.Module) -> TypeGuard[Step]:
    """Whether ``module`` is a step that only calls others, which run in their own memory modes."""
    if not isinstance(module, Step):
        return False
    return module.delegates or type(module).__call__ is nn.Module.__call__


def all_steps(module: nn.Module, prefix: str = "") -> dict[str, Step]:
    """The steps of ``module``, with containers, by path, which begins with ``prefix``."""
    return {path: m for path, m in module.named_modules(prefix=prefix) if isinstance(m, Step)}


def steps_in(module: nn.Module) -> dict[str, Step]:
    """The steps of ``module`` that run in a memory mode, by path; containers do not."""
    return {path: m for path, m in all_steps(module).items() if not is_container(m)}


def plain_call(step: Step, /, *state: Tensor, **context: Any) -> Any:
    """Call ``step`` as a plain module, without its memory mode."""
    # not step(...), which would run the memory mode again; hooks run as usual
    return nn.Module.__call__(step, *state, **context)


def label_steps(module: nn.Module, prefix: str = "") -> None:
    """Set the ``label`` of each step in ``module`` to its path, which begins with ``prefix``."""
    for path, step in all_steps(module, prefix).items():
        step.label = path


def kind_of(module: nn.Module) -> str:
    """The module's name in its ``repr``: its type, or the name of a library's network."""
    return str(module._get_name())  # type: ignore[no-untyped-call]


def name_of(step: Step) -> str:
    """The step's path, if known, and its type."""
    return f"{step.label} {type(step).__name__}".strip()


def as_state(outputs: Any, step: Step | None = None, *, inverse: bool = False) -> State:
    """The outputs of a step as a state; a step with one stream may return a bare tensor.

    Raises:
        TypeError: ``outputs`` is neither a tensor nor a tuple of tensors; names ``step``, or its
            inverse.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    # lists, too: a branch of the user may return one, and torch.fx does
    if isinstance(outputs, (tuple, list)) and all(isinstance(t, Tensor) for t in outputs):
        return tuple(outputs)
    name = "the inverse of " * inverse + (name_of(step) if step is not None else "a step")
    raise TypeError(
        f"{name} returned {_kind(outputs)}, expected a tensor or a tuple of tensors, one per stream"
    )


def bare(state: State) -> Tensor | State:
    """The opposite of :func:`as_state`: a single stream as a bare tensor, other states as is."""
    return state[0] if len(state) == 1 else state


def streams_of(outputs: Any, step: Step) -> State:
    """Like :func:`as_state`, without the step's extra outputs."""
    state = as_state(outputs, step)
    return state[: len(state) - step.extras] if step.extras else state


def check_stream_count(step: Step, inputs: Sequence[Any], count: int) -> None:
    """Raise a ValueError unless an inverse returned ``count`` streams; names ``step``."""
    if len(inputs) != count:
        raise ValueError(
            f"the inverse of {name_of(step)} returned {len(inputs)} streams, expected the {count} "
            "that its forward took, in their order"
        )


def _kind(outputs: Any) -> str:
    if isinstance(outputs, (tuple, list)):
        return f"({', '.join(type(t).__name__ for t in outputs)})"
    return f"a {type(outputs).__name__}"
