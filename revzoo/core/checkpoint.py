"""Mode recompute, and a drop-in for ``torch.utils.checkpoint.checkpoint``.

Both run torch's own non-reentrant checkpoint, with contexts of ours around the two evaluations:
normalisation statistics count a batch once, and a parameter that changed in between raises
(NOTE [ The contract ] in :mod:`revzoo.core.conditions`). torch restores random state and autocast.

Code that we do not know may compute something else the second time, and torch compares only shapes
and dtypes. So after such code we run the replay to its end and compare samples of the outputs.

Known limit: a plain call inside ``torch.compile``, ``torch.export`` and ``torch.func`` transforms.

A function that has an inverse needs no kept inputs: :func:`invertible_checkpoint`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from itertools import repeat
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torchs_checkpoint  # also if ours replaces it there

from revzoo._checks import check_callable
from revzoo.core.conditions import Conditions, Kept, Members, leave
from revzoo.core.guard import Guard, Replayed, sample
from revzoo.core.invertible import Invertible, State, Step, as_state
from revzoo.core.tensors import runs_eagerly

Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

ReplayMismatchError = CheckpointError
"""A replay saved different tensors from the forward pass: the step is not deterministic."""


def run_recomputed(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    conditions: Conditions,
    drift: Replayed | None,
    **options: Any,
) -> Any:
    """``call(*args, **kwargs)`` under torch's checkpoint, which takes the ``options``.

    ``drift`` says whose outputs to compare with which limit; None compares nothing.
    """
    compared = None if conditions.members.quiet else drift
    plain = not kwargs and all(map(isinstance, args, repeat(Tensor)))  # the streams of a step
    leaves, structure = (args, None) if plain else tree_flatten((args, dict(kwargs)))
    tensors = list(dict.fromkeys(t for t in leaves if isinstance(t, Tensor)))
    at = {id(t): i for i, t in enumerate(tensors)}
    parameters = {i for i, t in enumerate(tensors) if isinstance(t, nn.Parameter)}
    # the function gets the caller's own objects, a replay copies of them; torch keeps the tensors
    given: tuple[Any, Any] | None = (args, kwargs)
    kept = [at[id(t)] if isinstance(t, Tensor) else Kept.of(t) for t in leaves]
    samples: dict[int, Tensor] = {}

    def run(*state: Tensor) -> Any:
        nonlocal given
        if given is not None:  # the forward pass
            (own, named), given = given, None
            returned = call(*own, **named)
            conditions.finish()
            if compared is not None:
                samples.update(sample(_tensors_in(returned), state))
            return returned
        values = [
            leaf.again() if isinstance(leaf, Kept) else _as_given(state[leaf], leaf in parameters)
            for leaf in kept
        ]
        again, named = (values, {}) if structure is None else tree_unflatten(values, structure)
        undo = conditions.enter()
        try:
            returned = call(*again, **named)
        finally:
            leave(undo)
        if compared is not None:
            guard = Guard()
            guard.begin(())
            guard.compare(compared, samples, _tensors_in(returned))
        return returned

    options["early_stop"] = options.get("early_stop", True) and compared is None
    # the conditions restore the random state, also of devices that no argument is on
    return torchs_checkpoint(
        run, *tensors, use_reentrant=False, preserve_rng_state=False, **options
    )


def _tensors_in(tree: Any) -> State:
    """The tensors to compare; not those of torch.distributed, which may still be on their way."""
    tensors = (t for t in tree_leaves(tree) if isinstance(t, Tensor))
    return tuple(t for t in tensors if not is_traceable_wrapper_subclass(t))


def _as_given(t: Tensor, is_parameter: bool) -> Tensor:
    return nn.Parameter(t, t.requires_grad) if is_parameter else t


def checkpoint(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], Contexts] | None = None,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, whose activations are recomputed in the backward pass.

    Takes the arguments of ``torch.utils.checkpoint.checkpoint``: to switch, change the import.

    Args:
        fn: any callable: a module, a method, a lambda. Without ``fn``, returns a decorator.
        *args: anything; tensors in nested tuples, lists and dictionaries are kept for the replay.
        use_reentrant: accepted, no effect: this checkpoint is never reentrant.
        preserve_rng_state: accepted, no effect: a replay always draws the same random numbers.
        context_fn: returns two contexts, for the forward pass and for replays, e.g.
            ``create_selective_checkpoint_contexts`` of torch.
        determinism_check: ``"default"`` compares number, shapes and dtypes of the recomputed
            tensors, and, of code that is not torch's, values of the outputs; ``"none"`` nothing.
        debug: list the operators of both passes in a :class:`~revzoo.ReplayMismatchError`.
        early_stop: stop a replay when it has all tensors that the graph needs, unless values of the
            outputs are compared.
        respect_saved_tensors_hooks: passed to torch's checkpoint (2.14 or newer).
        **kwargs: as ``args``.

    Returns:
        The object that ``fn`` returns.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: the value of an option is not allowed.
        RuntimeError: in the backward pass, if a tensor was changed in place.
        ReplayMismatchError: in the backward pass, if ``fn`` is not deterministic.
        DriftError: after the backward pass, if values differ.

    Example:
        >>> block = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())
        >>> revzoo.checkpoint(block, torch.randn(4, 8)).sum().backward()
        >>> block[1].num_batches_tracked  # torch.utils.checkpoint counts 2
        tensor(1)
    """
    if determinism_check not in ("default", "none"):
        raise ValueError(f"determinism_check={determinism_check!r}: expected 'default' or 'none'")
    options: dict[str, Any] = {
        "determinism_check": determinism_check,
        "debug": debug,
        "early_stop": early_stop,
    }
    if context_fn is not None:
        options["context_fn"] = context_fn
    if respect_saved_tensors_hooks is not None:
        options["respect_saved_tensors_hooks"] = respect_saved_tensors_hooks
    if fn is not None:
        check_callable("fn", fn)
        return _run(fn, args, kwargs, options)
    if args or kwargs:
        raise ValueError("checkpoint() without a function got arguments for one: pass fn first")

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def checkpointed(*args: Any, **kwargs: Any) -> Any:
            return _run(fn, args, kwargs, options)

        return checkpointed

    return decorate


def _run(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    if not runs_eagerly() or not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    module = _module_of(fn)
    leaves = tree_leaves((args, kwargs))
    among = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    members = Members.of_function(fn if module is None else module, among)
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    remedy = "call it without checkpoint(); determinism_check='none' compares no values"
    conditions = Conditions((), members, tensors, name=name, remedy=remedy, ambient=False)
    drift = None
    if options["determinism_check"] == "default":
        drift = Replayed((_Named(remedy),), name, limit_of(Step, tensors), False)  # type: ignore[arg-type]
    return run_recomputed(fn, args, kwargs, conditions, drift, **options)


def limit_of(step: Step | type[Step], inputs: Iterable[Tensor]) -> float:
    """The largest drift of outputs: 0 on a CPU, which computes the same bits again, unless set."""
    limit = step.drift_limit or 0.0
    on_cpu = all(t.device.type == "cpu" for t in inputs)
    return 0.0 if limit == Step.drift_limit and on_cpu else limit


class _Named:
    """Stands for a step in the guard's messages."""

    drift = None

    def __init__(self, remedy: str) -> None:
        self.remedy = self.drift_remedy = remedy


_CALLS = ("forward", "_wrapped_call_impl", "_call_impl")


def _module_of(fn: Any) -> nn.Module | None:
    """``fn`` if it is a module; for ``module.forward``, the module."""
    # block.forward and block do the same work: both use the members that the block holds
    owner = fn.__self__ if isinstance(fn, MethodType) and fn.__name__ in _CALLS else fn
    return owner if isinstance(owner, nn.Module) else None


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
    outputs = step(*(a for a in args if isinstance(a, Tensor)), **kwargs)
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
