"""Measures how exactly a module inverts, per step and dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from revzoo.core.conditions import leave, repeating
from revzoo.core.guard import RangeError
from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    State,
    as_state,
    check_inverted,
    refuse_changed_outputs,
    streams_of,
)
from revzoo.core.modes import on_grid_of
from revzoo.core.tensors import versions_of
from revzoo.core.words import apply_with_words

Module = TypeVar("Module", bound=nn.Module)


class StepError(NamedTuple):
    """Largest error of one step's round trip, absolute and relative to the largest input."""

    dtype: torch.dtype
    name: str
    absolute: float
    relative: float


class InverseReport(tuple[StepError, ...]):
    """Errors per dtype and step; it prints as a table of the relative errors.

    The row ``"whole"`` is the round trip of the whole module; a model with invertible parts has a
    row for each part instead. ``skipped`` maps each dtype without rows to the error that the module
    raised in it.
    """

    skipped: dict[torch.dtype, str]

    def __new__(
        cls, rows: Iterable[StepError], skipped: Mapping[torch.dtype, str] | None = None
    ) -> InverseReport:
        report = super().__new__(cls, rows)
        report.skipped = dict(skipped or {})
        return report

    def worst(self, dtype: torch.dtype) -> float:
        """Largest relative error in ``dtype``.

        Raises:
            ValueError: ``dtype`` was skipped, or not checked.
        """
        errors = [row.relative for row in self if row.dtype == dtype]
        if not errors:
            why = self.skipped.get(dtype, "pass it in dtypes")
            raise ValueError(f"dtype={dtype} was not checked: {why}")
        return float(torch.tensor(errors).max())  # NaN if one is NaN

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(row.dtype for row in self))
        columns = [[row for row in self if row.dtype == dtype] for dtype in dtypes]
        width = max(len(row.name) for row in self)
        table = [("", [str(dtype).removeprefix("torch.") for dtype in dtypes])]
        for rows in zip(*columns, strict=True):  # the same steps for each dtype
            errors = [f"{row.relative:.1e}" if row.relative else "0" for row in rows]
            table.append((rows[0].name, errors))
        lines = [f"{name:{width}}" + "".join(f"{e:>10}" for e in row) for name, row in table]
        lines += [f"{dtype} skipped: {why}" for dtype, why in self.skipped.items()]
        title = "largest error of inverse(forward(x)), relative to the largest x"
        return "\n".join([title, *lines])


def check_inverse(
    module: nn.Module,
    *inputs: Tensor,
    dtypes: Sequence[torch.dtype] = (torch.float64, torch.float32, torch.bfloat16),
    **context: Any,
) -> InverseReport:
    """Measure ``inverse(forward(x)) - x`` for ``module`` and each of its steps.

    Works on a copy: parameters, buffers and the random state do not change. Each step is tested on
    the state that reaches it, in the module's mode (train or eval).

    Args:
        module: an :class:`Invertible`, such as a ``ReversibleSequence``; or a model with such
            parts, each of which is tested on the state that reaches it.
        *inputs: inputs of ``module``, e.g. one tensor ``(B, C, H, W)``.
        dtypes: module and inputs are cast to each. A dtype in which the module raises is skipped
            and reported (``torch.linalg`` has no bfloat16), unless all raise.
        **context: keyword arguments of every step; floating-point tensors among them are cast, too.

    Raises:
        ValueError: an inverse returns streams of other shapes than its step took; ``inputs`` or
            ``dtypes`` is empty.
        NotInvertibleError: neither the module nor any of its parts has an inverse, or a step of a
            sequence has none.

    Example:
        >>> double = revzoo.ReversibleSequence([revzoo.AdditiveCoupling(nn.Identity())])
        >>> print(revzoo.check_inverse(double, torch.ones(1, 4)))
        largest error of inverse(forward(x)), relative to the largest x
                                   float64   float32  bfloat16
        whole                            0         0         0
        steps.0 AdditiveCoupling         0         0         0
    """
    if not _outermost(module):
        raise NotInvertibleError(
            f"{type(module).__name__} has no inverse to check, nor has any of its parts: pass a "
            "ReversibleSequence, an Invertible, or a model that holds some"
        )
    if not inputs or not dtypes:
        raise ValueError(f"got {inputs=}, {dtypes=}: pass the inputs of the module, and dtypes")
    rows: list[StepError] = []
    skipped: dict[torch.dtype, str] = {}
    for dtype in dtypes:
        try:
            # a step may return a type other than it got
            rows += [row._replace(dtype=dtype) for row in _rows(module, inputs, context, dtype)]
        except RuntimeError as error:  # operators without a kernel for the dtype raise it
            skipped[dtype] = str(error).splitlines()[0]
            if len(skipped) == len(dtypes):
                raise
    return InverseReport(rows, skipped)


def is_invertible(
    module: nn.Module, *inputs: Tensor, tolerance: float = 1e-6, **context: Any
) -> bool:
    """Whether ``module`` has an inverse that recovers ``inputs``.

    Works on a copy in float64, so that rounding does not decide. Branches that draw random numbers
    (dropout in training) have no common inverse: call ``eval()``.

    Args:
        module: any module; only an :class:`~revzoo.Invertible` has an inverse.
        *inputs: inputs of ``module``; without them, only check that every step has an inverse.
        tolerance: largest error relative to the largest input.
        **context: keyword arguments of every step.

    Raises:
        Exception: any error of the forward pass, except a RangeError, which gives False.

    Example:
        >>> block = revzoo.ReversibleBlock(nn.Conv2d(2, 2, 1))
        >>> revzoo.is_invertible(block, torch.randn(8, 4, 6, 6))
        True
        >>> revzoo.is_invertible(nn.ReLU(), torch.randn(8, 4, 6, 6))
        False
    """
    if not _has_inverse(module) or not inputs:
        return _has_inverse(module)
    try:
        _run(*_copies_in(torch.float64, module, inputs, context))  # raises its own errors
    except RangeError:  # a stream beyond its range cannot be recovered
        return False
    try:
        report = check_inverse(module, *inputs, dtypes=(torch.float64,), **context)
    except (RuntimeError, ValueError, TypeError):  # errors of the inverse
        return False
    return report.worst(torch.float64) <= tolerance


def _has_inverse(module: nn.Module) -> TypeGuard[Invertible]:
    """Whether ``inverse`` undoes ``forward``; an i-RevNet's undoes its ``encode``."""
    return isinstance(module, Invertible) and module.invertible


def _outermost(module: nn.Module) -> dict[str, Invertible]:
    """The invertible parts of ``module`` that are in no other one, by path; itself if it is one."""
    found: dict[str, Invertible] = {}
    for path, part in module.named_modules():
        if _has_inverse(part) and not any(f"{path}.".startswith(f"{p}.") or not p for p in found):
            found[path] = part
    return found


def _rows(
    module: nn.Module, inputs: State, context: Mapping[str, Any], dtype: torch.dtype
) -> list[StepError]:
    # a copy for each dtype: a cast back from bfloat16 would not restore the weights
    net, state, cast_context = _copies_in(dtype, module, inputs, context)
    if _has_inverse(net):
        if any(map(is_lazy, (*net.parameters(), *net.buffers()))):
            _run(net, state, cast_context)  # creates the weights of lazy layers
        return _round_trips(net, state, cast_context)
    parts = _outermost(net)
    calls: dict[str, tuple[State, Mapping[str, Any]]] = {}  # the first call of each part

    def keep_first(path: str, _: nn.Module, args: Any, keywords: Any) -> None:
        calls.setdefault(path, (args, keywords))

    handles = [
        part.register_forward_pre_hook(partial(keep_first, path), with_kwargs=True)
        for path, part in parts.items()
    ]
    _run(net, state, cast_context)
    for handle in handles:
        handle.remove()
    if missing := [path for path in parts if path not in calls]:
        raise NotInvertibleError(
            f"{type(net).__name__} did not call its part {missing[0]}, so nothing reached it: pass "
            "that part, and its inputs"
        )
    rows: list[StepError] = []
    for path, (taken, keywords) in calls.items():
        whole, *steps = _round_trips(parts[path], taken, keywords)
        rows += [whole._replace(name=f"{path} {type(parts[path]).__name__}")]
        rows += [step._replace(name=f"{path}.{step.name}") for step in steps if len(steps) > 1]
    return rows


def _run(net: nn.Module, state: State, context: Mapping[str, Any]) -> None:
    """Call ``net``; the random state does not change."""
    devices = list({t.device for t in state if t.device.type == "cuda"})
    with torch.no_grad(), torch.random.fork_rng(devices):
        net(*state, **context)


def _round_trips(net: Invertible, state: State, cast_context: Mapping[str, Any]) -> list[StepError]:
    steps = _atoms(net)
    state = on_grid_of(steps[0][1], state) if steps else state
    with torch.no_grad():
        rows = [_round_trip("whole", net, state, cast_context)[0]]
        if len(state) == 1 and net.streams == 2:
            dim, parts = getattr(net, "dim", 1), getattr(net, "split", (1, 1))
            sizes = [state[0].shape[dim] // sum(parts) * n for n in parts]
            state = apply_with_words(
                lambda x: [piece.clone() for piece in torch.split(x, sizes, dim=dim)], state
            )
        for name, step in steps:
            row, state = _round_trip(name, step, state, cast_context)
            rows.append(row)
    return rows


def _copies_in(
    dtype: torch.dtype, module: Module, inputs: State, context: Mapping[str, Any]
) -> tuple[Module, State, Mapping[str, Any]]:
    """Copies of the module, its inputs and its keyword arguments in ``dtype``."""

    def cast(t: Tensor) -> Tensor:
        if t.is_complex():
            if dtype == torch.bfloat16:
                raise RuntimeError("torch computes nothing in complex numbers of this type")
            return t.to(dtype.to_complex())
        return t.to(dtype) if t.is_floating_point() else t

    state = tuple(cast(x.detach()) for x in inputs)
    if _has_inverse(module):  # streams of integers, such as torch.arange(8), become floating-point
        state = tuple(x if x.is_complex() else x.to(dtype) for x in state)
    # nn.Module.to would make complex parameters real
    net = copy.deepcopy(module)._apply(cast)  # type: ignore[no-untyped-call]
    return net, state, tree_map_only(Tensor, lambda t: cast(t.detach()), context)


def _round_trip(
    name: str, step: Invertible, state: State, context: Mapping[str, Any]
) -> tuple[StepError, State]:
    with repeating(step, state) as conditions:
        outputs = streams_of(step(*state, **context), step)
        conditions.finish()
    versions = versions_of(outputs)
    undo = conditions.enter(inverting=True)
    try:
        back = as_state(step.inverse(*outputs, **context), step, inverse=True)
    finally:
        leave(undo)
    refuse_changed_outputs(step, outputs, versions)
    check_inverted(name, back, [t.shape for t in state])
    # in float64: the difference of two bfloat16 values rounds
    wide = torch.complex128 if state[0].is_complex() else torch.float64
    error = _largest(b.to(wide) - x.to(wide) for b, x in zip(back, state, strict=True))
    scale = _largest(state)
    row = StepError(state[0].dtype, name, error, error / scale if scale else error)
    return row, outputs


def _largest(tensors: Iterable[Tensor]) -> float:
    """Largest magnitude; NaN if one is NaN, which Python's max would ignore."""
    magnitudes = [t.abs().max().double() for t in tensors if t.numel()]
    return torch.stack(magnitudes).max().item() if magnitudes else 0.0


def _atoms(module: Invertible) -> list[tuple[str, Invertible]]:
    """The steps that are not containers, in order, with their paths and types."""
    paths = {part: path for path, part in module.named_modules()}

    def members(step: Any) -> list[Invertible]:
        return (
            [m for inner in step for m in members(inner)] if hasattr(step, "__iter__") else [step]
        )

    return [(f"{paths[m]} {type(m).__name__}".strip(), m) for m in members(module)]
