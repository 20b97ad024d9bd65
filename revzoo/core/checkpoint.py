"""Any function as a recomputed step: a drop-in for ``torch.utils.checkpoint.checkpoint``.

The call is a :class:`~revzoo.Step` in memory mode ``recompute``: a tape of one entry that keeps the
function's tensor arguments (rule 7 of NOTE [ Slots and the tape ] in
:mod:`revzoo.core.replay.tape`). A replay restores more than torch's version: normalisation
statistics count a batch once, and other buffers, ``torch.Generator`` objects, train/eval flags,
rebound variables and mutated lists have their values of the forward pass (NOTE [ What a replay
restores ] in :mod:`revzoo.core.restore.conditions`).

Known limit: a plain call inside ``torch.compile``, ``torch.export`` and ``torch.func`` transforms.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import MethodType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from revzoo._checks import check_callable
from revzoo.core.invertible import State, Step
from revzoo.core.modes import run_step
from revzoo.core.tensors import tensors_of

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint(
    fn: Callable[..., Any] | None = None,
    /,
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    context_fn: Callable[[], _Contexts] | None = None,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    **kwargs: Any,
) -> Any:
    """``fn(*args, **kwargs)``, whose activations are recomputed in the backward pass.

    Takes the arguments of ``torch.utils.checkpoint.checkpoint``: to switch, change the import.

    Args:
        fn: any callable: a module, a method, a lambda. A replay restores modules, tensors and
            generators that it closes over, is bound to or uses as globals, as in
            :func:`~revzoo.invertible_checkpoint`. Without ``fn``, returns a decorator.
        *args: anything; tensors in nested tuples, lists and dictionaries are kept for the replay.
        use_reentrant: accepted, no effect: this checkpoint is never reentrant.
        preserve_rng_state: accepted, no effect: a replay always draws the same random numbers.
            Otherwise the gradient of dropout would use a different mask than its value.
        context_fn: returns two contexts, for the forward pass and for replays, e.g.
            ``create_selective_checkpoint_contexts`` of torch.
        determinism_check: ``"default"`` compares number, shapes and dtypes of the recomputed
            tensors, and some values; ``"none"`` does not compare values.
        debug: list the operators of both passes in a :class:`~revzoo.ReplayMismatchError`.
        early_stop: stop a replay when it has all tensors that the graph needs.
        respect_saved_tensors_hooks: None or False: the arguments stay where they are.
        **kwargs: as ``args``.

    Returns:
        The object that ``fn`` returns.

    Raises:
        TypeError: ``fn`` is not callable.
        ValueError: the value of an option is not allowed.
        RuntimeError: ``fn`` changed a tensor argument in place, or ran a backward pass through its
            own values: call such a function directly.
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
    if debug and context_fn is not None:
        raise ValueError(
            "debug=True got a context_fn, too: expected one of them, since debug needs its own "
            "contexts"
        )
    if respect_saved_tensors_hooks:
        raise ValueError(
            "respect_saved_tensors_hooks=True: expected None or False. Arguments are kept where "
            "they are, whatever hooks surround the call; use memory='offload' on a step instead"
        )
    options = _Options(context_fn, determinism_check == "default", debug, early_stop)
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


class _Options(NamedTuple):
    context_fn: Callable[[], _Contexts] | None
    compares: bool
    debug: bool
    early_stop: bool


def _run(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], options: _Options
) -> Any:
    if torch.compiler.is_compiling():
        return fn(*args, **kwargs)
    call = _Call(args, kwargs)
    step = Checkpoint(fn, call)
    step.early_stop = options.early_stop
    if options.context_fn is not None:
        step.contexts = first, _ = options.context_fn()
        if hasattr(first, "respect_saved_tensors_hooks"):  # torch's selective checkpointing
            first.respect_saved_tensors_hooks = False  # the outer hooks are ours
    elif options.debug:
        step.contexts = _Operators(), _Operators()
    if not options.compares:
        step.drift_limit = None
    # a fresh step for each call: it holds this call's arguments
    run_step(step, tuple(_distinct_tensors((args, kwargs))), **step.others())
    # the object that fn returned, not the tape's tuple; clear it, since it holds the graph
    returned, call.returned = call.returned, None
    return returned


class _Call:
    """Arguments and result of the forward pass: the caller's objects.

    Not part of the step, so that :mod:`revzoo.core.restore.search` does not find them.
    """

    __slots__ = ("arguments", "returned")

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.arguments: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self.returned: Any = None


class Checkpoint(Step):
    """``fn`` as a step of the tensors among its arguments; holds the other arguments."""

    memory = "recompute"
    remedy = (
        "call it without checkpoint(); determinism_check='none' turns the comparison of values off"
    )
    contexts: _Contexts = (contextlib.nullcontext(), contextlib.nullcontext())

    def __init__(self, fn: Callable[..., Any], call: _Call) -> None:
        super().__init__()
        leaves, self._structure = tree_flatten(call.arguments)
        tensors = _distinct_tensors(leaves)
        self.streams = len(tensors)
        self.label = getattr(fn, "__qualname__", type(fn).__qualname__)
        self._fn = fn
        self._call = call
        self._leaves = tuple(
            _Place(tensors[t], type(t) is nn.Parameter) if isinstance(t, Tensor) else t
            for t in leaves
        )
        self._module = _module_of(fn)

    @property
    def subject(self) -> nn.Module:
        """``fn`` if it is a module, so that the result of the search is kept with it."""
        return self if self._module is None else self._module

    def others(self) -> dict[str, Any]:
        """The arguments that are not tensors, unless a search of the subject finds them."""
        others = [t for t in self._leaves if not isinstance(t, (_Place, *_PLAIN))]
        return {"arguments": others} if others and self._module is not None else {}

    def forward(self, *state: Tensor, **context: Any) -> State:
        first, again = self.contexts
        # the forward pass gets the caller's own objects, once; a replay gets copies of the
        # containers
        if self._call.arguments is not None:
            (args, kwargs), self._call.arguments = self._call.arguments, None
            with first:
                self._call.returned = returned = self._fn(*args, **kwargs)
        else:
            # new containers, with their content before the forward pass
            leaves = [leaf.of(state) if isinstance(leaf, _Place) else leaf for leaf in self._leaves]
            args, kwargs = tree_unflatten(leaves, self._structure)
            if isinstance(again, _Operators):
                again.lines.clear()  # drop an earlier replay's
            with again:
                returned = self._fn(*args, **kwargs)
        return tuple(t for t in tree_leaves(returned) if isinstance(t, Tensor))

    def difference(self) -> str:
        first, again = self.contexts
        if not (isinstance(first, _Operators) and isinstance(again, _Operators)):
            return ""
        return f"\nOperators of the forward pass:\n{first}\nOperators of the replay:\n{again}"


_PLAIN = (int, float, str, type(None))
_CALLS = ("forward", "_wrapped_call_impl", "_call_impl")


def _module_of(fn: Any) -> nn.Module | None:
    """``fn`` if it is a module; for ``module.forward``, the module."""
    # block.forward and block do the same work: both use the search result that the block holds
    owner = fn.__self__ if isinstance(fn, MethodType) and fn.__name__ in _CALLS else fn
    return owner if isinstance(owner, nn.Module) else None


class _Place(NamedTuple):
    """Replaces a tensor of the state among the leaves."""

    i: int
    is_parameter: bool

    def of(self, state: State) -> Tensor:
        """The tensor (detached in a replay), wrapped as a parameter if it was one."""
        t = state[self.i]
        return nn.Parameter(t, t.requires_grad) if self.is_parameter else t


def _distinct_tensors(tree: Any) -> dict[Tensor, int]:
    """The distinct tensors in ``tree`` and their positions: in ``f(x, x)`` x is one tensor."""
    return {t: i for i, t in enumerate(dict.fromkeys(tensors_of(tree)))}


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operators that run, for ``debug``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        shapes = ", ".join(_described(t) for t in tree_leaves((args, kwargs)))
        self.lines.append(f"  {func}({shapes})")
        return func(*args, **(kwargs or {}))

    def __str__(self) -> str:
        return "\n".join(self.lines) or "  none"


def _described(leaf: Any) -> str:
    if isinstance(leaf, Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
    return repr(leaf)
