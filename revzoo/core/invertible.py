"""The contract of a step: what the tape, the containers and the zoo agree on.

A network is a sequence of *steps*. A step maps a *state*, a tuple of streams, to the next state.
An :class:`Invertible` step can also be walked backwards, which is what lets
:mod:`revzoo.core.checkpoint` drop every activation and recompute it from the outputs during the
backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

from torch import Tensor, nn

State = tuple[Tensor, ...]


class NotInvertibleError(RuntimeError):
    """Raised when an inverse is asked of a layer that loses information; names the layer."""


class Recording(Protocol):
    """Runs parts of a step with recording on; handed to :meth:`Invertible.replay`."""

    needs: tuple[bool, ...]
    """Which streams of the step's input required gradient in the forward pass."""

    @property
    def complete(self) -> bool:
        """Whether every tensor that the forward pass saved has been recorded again."""

    aside: Sequence[Tensor]
    """What the forward pass kept with :func:`revzoo.core.recording.put_aside`, in its order."""

    def inverted(
        self, inverse: Callable[..., Any], outputs: State, context: Mapping[str, Any]
    ) -> State:
        """``inverse(*outputs, **context)`` without recording.

        It sees the random state and buffers of the forward pass (the ``carried`` ones as that left
        them) and leaves them as they were, so that what is recorded next repeats the forward pass.
        """

    def laid_out(self, inputs: State) -> State:
        """The step's inputs with the strides that they had in the forward pass.

        Kernels choose by strides what they save and which random number goes where.
        """

    def __call__(
        self,
        fn: Callable[..., Any],
        inputs: State,
        needs: tuple[bool, ...],
        context: Mapping[str, Any],
    ) -> State:
        """Run ``fn(*inputs, **context)``, the inputs requiring gradient as ``needs`` says.

        Returns:
            The outputs as leaves, each with the ``requires_grad`` that it came with.
        """


class Step(nn.Module):
    """One stage of computation: ``forward(*state)`` maps a state (a tuple of streams) to the next.

    Keyword arguments given to a sequence reach ``forward``, and ``inverse``, of each of its steps.
    A step that is not :class:`Invertible` is recomputed where the memory mode is ``invert``.

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
    """How many tensors the step takes."""

    extras: int = 0
    """How many tensors it returns behind its streams that are none: a loss, attention weights. A
    sequence hands them to the caller, behind its streams, in the order of its steps. No inverse
    gets them."""

    memory: str = "invert"
    """The mode in which the step runs, in a :class:`~revzoo.ReversibleSequence` or called by
    itself; change it with :func:`revzoo.set_memory`."""

    exact: bool = False
    """Whether the step only moves values, so that ``forward`` and ``inverse`` work on integers as
    on floats: it fits mode ``exact``."""

    sums: bool = False
    """Whether an exact step adds to its streams by :func:`revzoo.core.fixedpoint.add` instead."""

    needs_words: bool = False
    """Whether its inverse needs streams in fixed point; in floating point it is recomputed."""

    delegates: bool = False
    """Whether a step that stands beside it runs it (:func:`revzoo.make_reversible`)."""

    loose: int = 0
    """How many of an exact step's streams, the last ones, stay in floating point."""

    inexact: str = (
        "does not say that it is exact on fixed-point streams (if it only moves values, so that it "
        "works on integers as well, set exact = True on its class)"
    )
    """Why it does not, as the end of a sentence that begins with the step's name."""

    grid: int | str | None = None
    """Fractional bits of the fixed-point streams; ``"auto"`` for those that the input needs; None
    for floating-point streams."""

    drift_limit: float = 1e-3
    """Largest relative error of a reconstruction; see :mod:`revzoo.core.guard`."""

    drift: float | None = None
    """Relative error of the last reconstruction."""

    early_stop: bool = False
    """Whether a replay from the inputs ends once it has what the graph asks for."""

    label: str = ""
    """The step's place in its model, for error messages."""

    def __call__(self, *state: Any, **context: Any) -> Any:
        """``forward(*state, **context)``, hooks included, in the step's memory mode.

        A container, whose members run in theirs, replaces this by ``nn.Module``'s own.
        """
        from revzoo.core.modes import run_alone  # which is built on steps

        if not all(isinstance(t, Tensor) for t in state):
            return plain_call(self, *state, **context)
        return run_alone(self, state, context)

    def _get_name(self) -> str:
        """The class, as ``repr`` shows it, with the memory mode where the step has its own."""
        own = type(self).__call__ is Step.__call__
        return f"{type(self).__name__}[{self.memory}]" if own else type(self).__name__

    @property
    def outputs(self) -> int:
        """How many streams the step returns; by default, as many as it takes."""
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
        """The module whose state a replay restores, with what it reaches; itself by default."""
        return self

    def difference(self) -> str:
        """What the step knows of a replay that does not repeat its forward pass; ends the error."""
        return ""


def _no_inverse(self: Invertible, *state: Tensor, **context: Any) -> State:
    raise NotImplementedError(f"{type(self).__name__} must define inverse(*state) -> state")


def _no_log_det(self: Invertible, *state: Tensor, **context: Any) -> Tensor:
    raise NotImplementedError(
        f"{name_of(self)} defines no log_det(*state) -> tensor (B,): the log-determinant of its "
        "Jacobian is unknown. Define it, or use a step that does"
    )


class Invertible(Step):
    """A step with an inverse: ``inverse(*forward(*state)) == state`` up to rounding.

    ``forward`` must be a function of its inputs, the module's parameters and buffers and torch's
    random state alone, so that a replay gives the same value.

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

    inverse: Callable[..., Any] = _no_inverse

    log_det: Callable[..., Tensor] = _no_log_det
    """``log_det(*state, **context)``: log of the absolute determinant of the Jacobian of
    ``forward`` at ``state``, one value per image ``(B,)``, natural logarithm, differentiable."""

    carried: tuple[str, ...] = ()
    """Buffers that ``forward`` updates before it uses them, and that ``inverse`` and ``log_det``
    read: a replay inverts with the values that the forward pass left."""

    @property
    def invertible(self) -> bool:
        """True; a container answers for its members."""
        return True

    reads_words: bool = False
    """Whether :meth:`replay` takes streams in fixed point as their words."""

    def replay(self, outputs: State, record: Recording, context: Mapping[str, Any]) -> State:
        """Recover the inputs from ``outputs``, the streams, and record the step once more.

        Tensors must be recorded in the order of ``forward``, from inputs that are laid out as they
        were. Override this only where inverting
        and recording can share work, as in a coupling.
        """
        inputs = record.inverted(self.inverse, outputs, context)
        check_inputs(self, inputs, len(record.needs))
        inputs = record.laid_out(inputs)
        record(self.forward, inputs, record.needs, context)
        return inputs

    def forward_with_log_det(self, *state: Tensor, **context: Any) -> tuple[Any, Tensor]:
        """``forward(*state)``, then ``log_det(*state)``; override it where they share work."""
        return plain_call(self, *state, **context), self.log_det(*state, **context)


def is_container(module: nn.Module) -> TypeGuard[Step]:
    """Whether it is a step whose members run in memory modes of their own, and it in none."""
    if not isinstance(module, Step):
        return False
    return module.delegates or type(module).__call__ is nn.Module.__call__


def plain_call(step: Step, /, *state: Tensor, **context: Any) -> Any:
    """Call ``step`` as any module, whatever its memory mode is."""
    return nn.Module.__call__(step, *state, **context)


def label_steps(module: nn.Module, prefix: str = "") -> None:
    """Tell each step of ``module`` its path, so that errors can name it; ``prefix`` is its own."""
    for path, step in module.named_modules(prefix=prefix):
        if isinstance(step, Step):
            step.label = path


def name_of(step: Step) -> str:
    """The step's path, if it is known, and its type."""
    return f"{step.label} {type(step).__name__}".strip()


def as_state(outputs: Any, step: Step | None = None) -> State:
    """The outputs of a step as a state; a step of one stream may return a bare tensor.

    Raises:
        TypeError: it is neither a tensor nor a tuple of tensors; names ``step``.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    if isinstance(outputs, (tuple, list)) and all(isinstance(t, Tensor) for t in outputs):
        return tuple(outputs)
    raise TypeError(
        f"{name_of(step) if step is not None else 'a step'} returned {_kind(outputs)}, expected a "
        "tensor or a tuple of tensors, one per stream"
    )


def streams_of(outputs: Any, step: Step) -> State:
    """As :func:`as_state`, without the step's extra outputs."""
    state = as_state(outputs, step)
    return state[: len(state) - step.extras] if step.extras else state


def check_inputs(step: Step, inputs: Sequence[Any], count: int) -> None:
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
