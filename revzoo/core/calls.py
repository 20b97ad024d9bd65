"""Calls a step or its inverse.

On a grid, the integer words of the streams move with the float values. A hook that changes a
stream, or a change in place, raises: the inverse would not undo it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules import module

from revzoo.core.fixedpoint.words import (
    counting_changes,
    keeps_words,
    move_words,
    within,
)
from revzoo.core.invertible import Invertible, State, Step, as_state, name_of, plain_call
from revzoo.core.tensors import as_dense, storage_id, version_of, versions_of


def call_on_grid(
    call: Callable[..., Any], step: Step, state: State, context: Mapping[str, Any]
) -> Any:
    """``call(step, *state, **context)``; the words move with the values."""
    if not _keeps_words_of(step):
        return call(step, *state, **context)
    with within(step):
        if not step.moves_values:
            return call(step, *state, **context)
        # plain_call does not check hooks: outputs that a hook may have changed get no words
        trusted = call is call_without_changing_hooks or not hooked(step)
        return _call_with_words(
            step,
            functools.partial(call, step, *state, **context),
            functools.partial(step.forward, **context) if trusted else None,
            state,
            step.extras,
        )


def inverse_on_grid(step: Invertible, /, *state: Tensor, **context: Any) -> State:
    """``step.inverse(*state, **context)``; the words move with the values."""
    if not _keeps_words_of(step):
        return as_state(step.inverse(*state, **context), step, inverse=True)
    inverse = functools.partial(step.inverse, **context)
    with within(step):
        if not step.moves_values:
            return as_state(inverse(*state), step, inverse=True)

        def call() -> State:
            return as_state(inverse(*state), step, inverse=True)

        inputs: State = _call_with_words(step, call, inverse, state, 0)
        return inputs


def explain_streams(error: Exception, step: Step, state: State, direction: str) -> None:
    """Add a note to an error of torch or Python that names the step and its streams.

    Args:
        error: of ``step.forward`` or ``step.inverse``.
        step: the step.
        state: the streams that it got.
        direction: ``"forward"`` or ``"inverse"``.
    """
    if hasattr(error, "__notes__"):  # a step inside this one has added its note
        return
    call = f"{getattr(type(step), direction).__qualname__}()"
    if type(error) is RuntimeError:
        shapes = " and ".join(str(tuple(t.shape)) for t in state)
        types = " and ".join(dict.fromkeys(str(t.dtype) for t in state))
        expected = {"forward": "its layers take", "inverse": "its forward returns"}[direction]
        error.add_note(
            f"The {direction} of {name_of(step)} got streams of shape {shapes} and type {types}: "
            f"expected the shapes and the type that {expected}"
        )
    # only for errors of this call itself, not of a branch or for a keyword argument
    elif str(error).startswith(call) and "positional argument" in str(error):
        error.add_note(
            f"{name_of(step)} takes `streams` = {step.streams} streams: set streams = 1 in its "
            f"class if its {direction} takes one"
        )


def _keeps_words_of(step: Step) -> bool:
    return step.grid is not None and keeps_words()


def _call_with_words(
    step: Step,
    call: Callable[[], Any],
    fn: Callable[..., Any] | None,
    state: State,
    extras: int,
) -> Any:
    """``call()`` of a step that moves values; ``fn`` gives its dense streams their words."""
    with counting_changes():
        returned = call()
        # extra outputs are not streams: they get no words and may have any layout
        outputs = as_state(returned, step)
        cut = len(outputs) - extras
        streams = tuple(as_dense(t, state[0]) for t in outputs[:cut])
    if fn is not None:
        ours = type(step).__module__.startswith("revzoo.layers.")
        move_words(fn, state, streams, keeps_samples=ours)
    return streams[0] if isinstance(returned, Tensor) else (*streams, *outputs[cut:])


def call_without_changing_hooks(step: Step, /, *state: Tensor, **context: Any) -> Any:
    """Call ``step``; its forward hooks may read the streams, but not change them.

    Raises:
        RuntimeError: a hook changed a stream, which the inverse of the step would not undo.
    """
    if not hooked(step):
        return plain_call(step, *state, **context)
    before = _identity(state)
    # a hook sees the tensors before and after forward(), so compare what forward() got and returned
    # with the caller's tensors
    with _watched(step) as inside:
        outputs = plain_call(step, *state, **context)
    if inside and inside != [before, _identity(as_state(outputs, step))]:
        raise RuntimeError(
            f"a forward hook on {name_of(step)} changed its streams, which its inverse would not "
            "undo: put the change into a step, or use memory='recompute' or 'store' for this step"
        )
    return outputs


class _Watch(NamedTuple):
    """A step whose ``forward`` is wrapped while calls of one or more threads run."""

    users: list[int]  # number of running calls
    on_instance: bool  # whether ``forward`` was an attribute of the step, not only of its class
    forward: Callable[..., Any]


class _Thread(threading.local):
    inside: dict[int, list[list[Any]]] = {}  # noqa: RUF012 -- replaced, never changed


_thread = _Thread()  # the records of _watched, by the id of the step
_watches: dict[int, _Watch] = {}
_watching = threading.Lock()


@contextlib.contextmanager
def _watched(step: Step) -> Iterator[list[list[Any]]]:
    """Record arguments and outputs of this thread's last call of ``forward`` in a list."""
    inside: list[list[Any]] = []
    # a new dictionary: all threads share the first one
    outer = _thread.inside
    _thread.inside = {**outer, id(step): inside}
    with _watching:
        watch = _watches.get(id(step))
        if watch is None:
            # one wrapper for all threads, counted: the last call to end removes it
            watch = _Watch([0], "forward" in vars(step), step.forward)
            _watches[id(step)] = watch
            step.forward = functools.partial(_watched_forward, step, watch.forward)
        watch.users[0] += 1
    try:
        yield inside
    finally:
        _thread.inside = outer
        with _watching:
            watch.users[0] -= 1
            if not watch.users[0]:
                del _watches[id(step)]
                if watch.on_instance:
                    step.forward = watch.forward
                else:
                    # deleted, not assigned: as an attribute it would hold the step in a cycle
                    del step.forward


def _watched_forward(step: Step, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    outputs = forward(*args, **kwargs)
    inside = _thread.inside.get(id(step))
    if inside is not None:
        inside[:] = [_identity(args), _identity(as_state(outputs, step))]
    return outputs


def hooked(layer: nn.Module) -> bool:
    """Whether forward hooks run on the layer, either its own or global ones."""
    return bool(layer._forward_hooks or layer._forward_pre_hooks) or _global_hooks()


def _global_hooks() -> bool:
    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


def calls_only_forward(layer: nn.Module) -> bool:
    """Whether a call of ``layer`` runs the ``forward`` of its class and nothing else."""
    return type(layer).__call__ is nn.Module.__call__ and runs_forward_alone(layer)


def runs_forward_alone(layer: nn.Module) -> bool:
    """Whether ``nn.Module.__call__`` of ``layer`` runs its class's ``forward`` and no hook."""
    own = layer._backward_hooks or layer._backward_pre_hooks
    of_all = module._global_backward_hooks or module._global_backward_pre_hooks
    replaced = layer._compiled_call_impl is not None or "forward" in vars(layer)
    return not (hooked(layer) or own or of_all or replaced)


def _identity(state: tuple[Any, ...]) -> list[Any]:
    """Memory, geometry and version of each stream; equal for an alias."""
    return [
        (storage_id(t), t.storage_offset(), t.shape, t.stride(), version_of(t))
        if isinstance(t, Tensor)
        else t
        for t in state
    ]


def explain_transforms(error: Exception, step: Step) -> None:
    """Raise an error with a remedy if ``error`` is torch's for ``torch.func`` under our hooks."""
    if "support saved tensor hooks" in str(error):
        raise RuntimeError(
            f"{name_of(step)} runs a torch.func transform inside its forward, which torch refuses "
            f"while activations are recomputed or offloaded: {step.remedy}"
        ) from error


def refuse_changed_inputs(step: Step, inputs: State, versions: list[int]) -> None:
    """Raise a RuntimeError if the forward pass of ``step`` changed a stream in place."""
    if (now := versions_of(inputs)) != versions:
        raise RuntimeError(
            f"{name_of(step)} changed its input stream {_changed(now, versions)}: expected no "
            "change, since a replay would start from the changed values. Make the first operation "
            "of the branch out of place (inplace=False)"
        )


def refuse_changed_outputs(step: Step, outputs: State, versions: list[int]) -> None:
    """Raise a RuntimeError if the inverse of ``step`` changed a stream in place."""
    if (now := versions_of(outputs)) != versions:
        raise RuntimeError(
            f"the inverse of {name_of(step)} changed its input stream {_changed(now, versions)}: "
            "the caller may still hold that tensor, as an output of the forward pass. Make the "
            "operations of the inverse out of place"
        )


def _changed(now: list[int], versions: list[int]) -> str:
    i = next(i for i, (a, b) in enumerate(zip(now, versions, strict=True)) if a != b)
    return f"{i} in place (version {versions[i]} became {now[i]})"
