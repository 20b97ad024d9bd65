"""Calls a step or its inverse.

On a grid, the integer words of the streams move with the float values. A change of a stream in
place raises: the inverse would not undo it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module

from revzoo.core.fixedpoint.words import (
    counting_changes,
    keeps_words,
    move_words,
)
from revzoo.core.invertible import Invertible, State, Step, as_state, name_of
from revzoo.core.tensors import as_dense, versions_of


def call_on_grid(
    call: Callable[..., Any],
    step: Step,
    state: State,
    context: Mapping[str, Any],
    *,
    inverts: bool = False,
) -> Any:
    """``call(step, *state, **context)``; the words move with the values.

    Not if a hook may change the outputs, unless the step ``inverts``: then no hook may.
    """
    if step.grid is None or not step.moves_values or not keeps_words():
        return call(step, *state, **context)
    with counting_changes():
        returned = call(step, *state, **context)
    # extra outputs are not streams: they get no words and may have any layout
    outputs = as_state(returned, step)
    cut = len(outputs) - step.extras
    moves = functools.partial(step.forward, **context)
    trusted = inverts or runs_forward_alone(step)
    streams = _with_words(step, moves if trusted else None, state, outputs[:cut])
    return streams[0] if isinstance(returned, Tensor) else (*streams, *outputs[cut:])


def inverse_on_grid(step: Invertible, /, *state: Tensor, **context: Any) -> State:
    """``step.inverse(*state, **context)``; the words move with the values."""
    inverse = functools.partial(step.inverse, **context)
    if step.grid is None or not step.moves_values or not keeps_words():
        return as_state(inverse(*state), step, inverse=True)
    with counting_changes():
        inputs = as_state(inverse(*state), step, inverse=True)
    return _with_words(step, inverse, state, inputs)


def _with_words(step: Step, fn: Callable[..., Any] | None, state: State, outputs: State) -> State:
    """``outputs`` without gaps; ``fn``, which moves values, gives them the words of ``state``."""
    streams = tuple(as_dense(t, state[0]) for t in outputs)
    if fn is not None:
        ours = type(step).__module__.startswith("revzoo.layers.")
        move_words(fn, state, streams, step=None if ours else step)
    return streams


# torch's errors of convolutions, linear layers and norms
_WRONG_WIDTH = r"to have \d+ channels|cannot be multiplied|normalized_shape|running_mean should"


def explain_streams(error: Exception, step: Step, state: State, direction: str) -> None:
    """Add a note to an error of ``step.forward`` or ``step.inverse`` (the ``direction``).

    The note names the step and the streams that it got, unless a step inside has named itself.

    Raises:
        RuntimeError: a branch was built for all channels, not for those of one stream.
    """
    if hasattr(error, "__notes__"):
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
    reason = RuntimeError(
        f"a branch of {name_of(step)} does not take its stream, of shape {tuple(state[-1].shape)}: "
        "a sequence splits a tensor in two, so each branch gets half of the channels. Build it "
        f"for half of them. torch says: {str(error).splitlines()[0]}"
    )
    reason.add_note(note)
    raise reason from error


def has_hooks(layer: nn.Module) -> bool:
    """Whether the layer has hooks of its own.

    Forward hooks may change streams, which no inverse undoes. Backward hooks need a graph of the
    call, which an inverted step does not have.
    """
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
