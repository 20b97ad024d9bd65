"""The interface of a step, which the tape, the containers and the networks use.

A network is a sequence of *steps*. A step maps a *state*, a tuple of streams, to the next state.
An :class:`Invertible` step also has an inverse. So :mod:`revzoo.core.tape` can drop its
activations and recompute them from the outputs in the backward pass.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

from torch import Tensor, nn
from torch.nn.modules import module

from revzoo.core.tensors import versions_of

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

    exact_inverse: bool = True
    """Whether mode ``exact`` supports the reversal of an exact step (:class:`~revzoo.Reversed`),
    too. A step that saves the bits that its products drop gets them back only in its replay."""

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
    """:class:`~revzoo.core.kernels.Growth` of chains that begin here, after the first."""

    drift_limit: float | None = 1e-3
    """Largest relative error of a reconstruction; None compares nothing. See
    :mod:`revzoo.core.guard`."""

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
        check_inverted(name_of(self), inputs, record.shapes)
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
    """The outputs of a step, or of its ``inverse``, as a state; one stream may be a bare tensor.

    Raises:
        TypeError: ``outputs`` is neither a tensor nor a tuple of tensors; names ``step``.
    """
    if isinstance(outputs, Tensor):
        return (outputs,)
    # lists, too: a branch of the user may return one, and torch.fx does
    if isinstance(outputs, (tuple, list)) and all(isinstance(t, Tensor) for t in outputs):
        return tuple(outputs)
    name = "the inverse of " * inverse + (name_of(step) if step is not None else "a step")
    got = f"a {type(outputs).__name__}"
    if isinstance(outputs, (tuple, list)):
        got = f"({', '.join(type(t).__name__ for t in outputs)})"
    raise TypeError(
        f"{name} returned {got}, expected a tensor or a tuple of tensors, one per stream"
    )


def bare(state: State) -> Tensor | State:
    """The opposite of :func:`as_state`: a single stream as a bare tensor, other states as is."""
    return state[0] if len(state) == 1 else state


def streams_of(outputs: Any, step: Step) -> State:
    """Like :func:`as_state`, without the step's extra outputs."""
    state = as_state(outputs, step)
    return state[: len(state) - step.extras] if step.extras else state


def check_inverted(name: str, inputs: Sequence[Any], shapes: Sequence[Sequence[int]]) -> None:
    """Raise a ValueError unless the inverse of ``name`` returned streams of these ``shapes``."""
    if [t.shape for t in inputs] != shapes:
        got, expected = [tuple(t.shape) for t in inputs], [*map(tuple, shapes)]
        raise ValueError(
            f"the inverse of {name} returned streams of shape {got}, expected {expected}, those "
            "that its forward took, in their order"
        )


@contextlib.contextmanager
def evaluation_mode(network: nn.Module) -> Iterator[None]:
    """Set evaluation mode inside the context, then restore the mode of each module."""
    # one by one: parts may be frozen in evaluation mode
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


# torch's errors of convolutions, linear layers and norms
_WRONG_WIDTH = r"to have \d+ channels|cannot be multiplied|normalized_shape|running_mean should"


def explain_streams(error: Exception, step: Step, state: State, direction: str) -> None:
    """Add the step and its streams to an error of ``step.forward`` or ``step.inverse``.

    Raises:
        RuntimeError: a branch was built for all channels, not for those of one stream.
    """
    if hasattr(error, "__notes__"):  # a step inside has named itself
        return
    shapes = " and ".join(str(tuple(t.shape)) for t in state)
    types = " and ".join(dict.fromkeys(str(t.dtype) for t in state))
    note = (
        f"In the {direction} of {name_of(step)}, which got streams of shape {shapes} and type "
        f"{types}, and takes `streams` = {step.streams} of them"
    )
    if step.streams != 2 or not re.search(_WRONG_WIDTH, str(error)):
        error.add_note(note)
        return
    # of maps (B, C, H, W), or of the features of tokens and vectors
    streams = [t.shape[1 if t.dim() == 4 else -1] for t in state]
    reason = RuntimeError(
        f"a branch of {name_of(step)} does not take its stream, of shape {tuple(state[-1].shape)}: "
        f"a sequence splits {sum(streams)} channels in two, so each branch gets half of the "
        f"channels. Build it for {streams[-1]}. torch says: {str(error).splitlines()[0]}"
    )
    reason.add_note(note)
    raise reason from error


def has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks of its own, with which it cannot be inverted."""
    # forward hooks may change streams; backward hooks need a graph of the call
    forward = layer._forward_hooks or layer._forward_pre_hooks
    return bool(forward or layer._backward_hooks or layer._backward_pre_hooks)


def calls_only_forward(layer: nn.Module) -> bool:
    """Whether a call of ``layer`` runs the ``forward`` of its class and nothing else."""
    return type(layer).__call__ is nn.Module.__call__ and runs_forward_alone(layer)


def runs_forward_alone(layer: nn.Module) -> bool:
    """Whether ``nn.Module.__call__`` of ``layer`` runs its class's ``forward`` and no hook."""
    replaced = layer._compiled_call_impl is not None or "forward" in vars(layer)
    of_all = module._has_any_global_hook()  # type: ignore[no-untyped-call]
    return not (has_hooks(layer) or replaced or of_all)


def explain_transforms(error: Exception, step: Step) -> None:
    """Raise an error with a remedy if ``error`` is torch's for ``torch.func`` under our hooks."""
    if "support saved tensor hooks" in str(error):
        raise RuntimeError(
            f"{name_of(step)} runs a torch.func transform inside its forward, which torch refuses "
            f"while activations are recomputed or offloaded: {step.remedy}"
        ) from error


def refuse_changed_inputs(step: Step, inputs: State, versions: list[int]) -> None:
    """Raise a RuntimeError if the forward pass of ``step`` changed a stream in place."""
    if versions_of(inputs) != versions:
        raise changes_input(step, _changed(inputs, versions))


def changes_input(step: Step, changed: str) -> RuntimeError:
    """The error for a step that changes its input in place."""
    return RuntimeError(
        f"{name_of(step)} changed its input stream {changed}: expected no change, since a replay "
        "would start from the changed values. Make the first operation of the branch out of place "
        "(inplace=False)"
    )


def refuse_changed_outputs(step: Step, outputs: State, versions: list[int]) -> None:
    """Raise a RuntimeError if the inverse of ``step`` changed a stream in place."""
    if versions_of(outputs) != versions:
        raise RuntimeError(
            f"the inverse of {name_of(step)} changed its input stream "
            f"{_changed(outputs, versions)}: the caller may still hold that tensor, as an output "
            "of the forward pass. Make the operations of the inverse out of place"
        )


def _changed(streams: State, versions: list[int]) -> str:
    now = versions_of(streams)
    i = next(i for i, (a, b) in enumerate(zip(now, versions, strict=True)) if a != b)
    return f"{i} in place (version {versions[i]} became {now[i]})"
