"""Measures how exactly a module inverts, per step and dtype."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from revzoo.core.calls import refuse_changed_outputs
from revzoo.core.conditions import leave, repeating
from revzoo.core.fixedpoint.words import apply_with_words
from revzoo.core.guard.ranges import RangeError
from revzoo.core.invertible import Invertible, NotInvertibleError, State, streams_of
from revzoo.core.modes import on_grid_of
from revzoo.core.tensors import versions_of

Module = TypeVar("Module", bound=nn.Module)


class StepError(NamedTuple):
    """Largest error of one step's round trip, absolute and relative to the largest input."""

    dtype: torch.dtype
    name: str
    absolute: float
    relative: float


class InverseReport(tuple[StepError, ...]):
    """Errors per dtype and step; the row ``"whole"`` is the round trip of the whole module.

    For a model with invertible parts it has a row for each part, and none for the whole.

    It prints as a table of the relative errors. ``skipped`` maps each dtype without rows to the
    error that the module raised in it.
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
        if dtype in self.skipped:
            raise ValueError(f"{dtype} was skipped: {self.skipped[dtype]}")
        errors = [row.relative for row in self if row.dtype == dtype]
        if not errors:
            checked = ", ".join(dict.fromkeys(str(row.dtype) for row in self))
            raise ValueError(f"dtype={dtype} was not checked; this report has {checked}")
        return float(torch.tensor(errors).max())  # NaN if one is NaN

    def __str__(self) -> str:
        dtypes = list(dict.fromkeys(row.dtype for row in self))
        columns = [[row for row in self if row.dtype == dtype] for dtype in dtypes]
        width = max(len(row.name) for row in self)
        heads = [str(dtype).removeprefix("torch.") for dtype in dtypes]
        lines = [
            "largest error of inverse(forward(x)), relative to the largest x",
            f"{'':{width}}" + "".join(f"{head:>10}" for head in heads),
        ]
        for rows in zip(*columns, strict=True):  # the same steps for each dtype
            errors = [f"{row.relative:.1e}" if row.relative else "0" for row in rows]
            lines.append(f"{rows[0].name:{width}}" + "".join(f"{error:>10}" for error in errors))
        for dtype, why in self.skipped.items():
            lines.append(f"{str(dtype).removeprefix('torch.')} skipped: {why}")
        return "\n".join(lines)


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
            and reported (``torch.linalg`` has no bfloat16), unless all raise. With a grid, inputs
            are first rounded to it.
        **context: keyword arguments of every step; floating-point tensors among them are cast, too.

    Raises:
        ValueError: the streams that an inverse returns differ in number or shape from those that
            its step took, or ``inputs`` or ``dtypes`` is empty.
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
    if not inputs:
        raise ValueError(f"got no inputs: pass the inputs of {type(module).__name__}, too")
    if not dtypes:
        raise ValueError(f"dtypes={dtypes}: expected at least one, such as (torch.float32,)")
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

    Works on a copy in float64, so that rounding does not decide; :func:`check_inverse` measures the
    error of each step, in several dtypes. Branches that draw random numbers (dropout in training)
    have no common inverse: call ``eval()``.

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
    if not _has_inverse(module):
        return False
    if not inputs:
        return True
    net, state, cast_context = _copies_in(torch.float64, module, inputs, context)
    with torch.no_grad(), torch.random.fork_rng(_devices(state)):
        try:
            net(*state, **cast_context)  # raises its own errors
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
            with torch.no_grad(), torch.random.fork_rng(_devices(state)):
                net(*state, **cast_context)  # creates the weights of lazy layers
        return _round_trips(net, state, cast_context)
    parts = _outermost(net)
    rows: list[StepError] = []
    calls = _calls_of(net, parts, state, cast_context)
    if missing := [path for path in parts if path not in calls]:
        raise NotInvertibleError(
            f"{type(net).__name__} did not call its part {missing[0]}, so nothing reached it: pass "
            "that part, and its inputs"
        )
    for path, (taken, keywords) in calls.items():
        whole, *steps = _round_trips(parts[path], taken, keywords)
        rows += [whole._replace(name=f"{path} {type(parts[path]).__name__}")]
        rows += [step._replace(name=f"{path}.{step.name}") for step in steps if len(steps) > 1]
    return rows


def _calls_of(
    net: nn.Module, parts: Mapping[str, Invertible], state: State, context: Mapping[str, Any]
) -> dict[str, tuple[State, Mapping[str, Any]]]:
    """What each of ``parts`` gets in its first call while ``net`` runs."""
    calls: dict[str, tuple[State, Mapping[str, Any]]] = {}

    def keep_first(path: str, _: nn.Module, args: Any, keywords: Any) -> None:
        calls.setdefault(path, (args, keywords))

    handles = [
        part.register_forward_pre_hook(partial(keep_first, path), with_kwargs=True)
        for path, part in parts.items()
    ]
    with torch.no_grad(), torch.random.fork_rng(_devices(state)):
        net(*state, **context)
    for handle in handles:
        handle.remove()
    return calls


def _devices(state: State) -> list[torch.device]:
    return list({t.device for t in state if t.device.type == "cuda"})


def _round_trips(net: Invertible, state: State, cast_context: Mapping[str, Any]) -> list[StepError]:
    first = next((step for _, step in _atoms(net)), None)
    state = state if first is None else on_grid_of(first, state)
    with torch.no_grad():
        rows = [_round_trip("whole", net, state, cast_context)[0]]
        if len(state) == 1 and net.streams == 2:
            (x,), dim, parts = state, getattr(net, "dim", 1), getattr(net, "split", (1, 1))
            sizes = [x.shape[dim] // sum(parts) * n for n in parts]
            state = apply_with_words(
                lambda x: [piece.clone() for piece in torch.split(x, sizes, dim=dim)], state
            )
        for name, step in _atoms(net):
            row, state = _round_trip(name, step, state, cast_context)
            rows.append(row)
    return rows


def _copies_in(
    dtype: torch.dtype, module: Module, inputs: State, context: Mapping[str, Any]
) -> tuple[Module, State, Mapping[str, Any]]:
    """Copies of the module, its inputs and its keyword arguments in ``dtype``."""
    state = tuple(_cast(x, dtype) for x in inputs)
    if _has_inverse(module):  # streams of integers, such as torch.arange(8), become floating-point
        state = tuple(x if x.is_complex() else x.to(dtype) for x in state)
    cast_context = tree_map_only(Tensor, lambda t: _cast(t, dtype), context)
    return _in(dtype, module), state, cast_context


def _in(dtype: torch.dtype, module: Module) -> Module:
    """A copy of ``module`` in ``dtype``; ``nn.Module.to`` would make complex parameters real."""
    net = copy.deepcopy(module)
    return net._apply(lambda t: t.to(_type_of(t, dtype)))  # type: ignore[no-untyped-call]


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.detach().to(_type_of(t, dtype))


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128) if t.is_complex() else t.double()


def _type_of(t: Tensor, dtype: torch.dtype) -> torch.dtype:
    """``dtype`` for floating-point tensors, its complex counterpart for complex ones."""
    if t.is_complex():
        if dtype == torch.bfloat16:
            raise RuntimeError("torch computes nothing in complex numbers of this type")
        return dtype.to_complex()
    return dtype if t.is_floating_point() else t.dtype


def _round_trip(
    name: str, step: Invertible, state: State, context: Mapping[str, Any]
) -> tuple[StepError, State]:
    with repeating(step, state) as conditions:
        outputs = streams_of(step(*state, **context), step)
        conditions.finish()
    versions = versions_of(outputs)
    undo = conditions.enter(inverting=True)
    try:
        back: Any = step.inverse(*outputs, **context)
    finally:
        leave(undo)
    refuse_changed_outputs(step, outputs, versions)
    back = tuple(back) if isinstance(back, (tuple, list)) else (back,)
    shapes = [[tuple(getattr(t, "shape", ())) for t in streams] for streams in (back, state)]
    if not all(isinstance(t, Tensor) for t in back) or shapes[0] != shapes[1]:
        got = ", ".join(str(tuple(getattr(t, "shape", (type(t).__name__,)))) for t in back)
        raise ValueError(
            f"the inverse of {name} returned {len(back)} streams ({got}), expected the "
            f"{len(state)} that its forward took, of shapes {shapes[1]}: return them in that order"
        )
    # in float64: the difference of two bfloat16 values rounds
    error = _largest(_wide(b) - _wide(x) for b, x in zip(back, state, strict=True))
    scale = _largest(state)
    row = StepError(state[0].dtype, name, error, error / scale if scale else error)
    return row, outputs


def _largest(tensors: Iterable[Tensor]) -> float:
    """Largest magnitude; NaN if one is NaN, which Python's max would ignore."""
    magnitudes = [_wide(t).abs().max() for t in tensors if t.numel()]
    return torch.stack(magnitudes).max().item() if magnitudes else 0.0


def _atoms(module: Invertible) -> Iterator[tuple[str, Invertible]]:
    """The steps that are not containers, in order, with their paths and types."""
    paths = {part: path for path, part in module.named_modules()}
    for step in _in_order(module):
        yield f"{paths[step]} {type(step).__name__}".strip(), step


def _in_order(module: nn.Module) -> Iterator[Invertible]:
    if isinstance(module, Iterable):
        for step in module:
            yield from _in_order(step)
    else:
        assert isinstance(module, Invertible)
        yield module
