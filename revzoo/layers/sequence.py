"""Containers: sequences of steps whose activations are recomputed from the sequence's output.

The streams stay separate tensors through the whole sequence: no block concatenates or chunks.
"""

from __future__ import annotations

import copy
import functools
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeGuard, overload

import torch
from torch import Tensor, nn

from revzoo._checks import check_callable
from revzoo.core.conditions import Members, repeating
from revzoo.core.guard import check_ranges, scales_of
from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    Settings,
    State,
    Step,
    all_steps,
    as_state,
    bare,
    calls_only_forward,
    explain_streams,
    is_container,
    label_steps,
    name_of,
    refuse_changed_outputs,
    steps_in,
)
from revzoo.core.modes import (
    assign_memory,
    can_run_together,
    can_share,
    default_mode,
    mode_of,
    on_grid_of,
    run_in_mode,
    run_on_adapted_grid,
    run_step,
)
from revzoo.core.tape import run_inverting
from revzoo.core.tensors import runs_eagerly, versions_of
from revzoo.core.words import (
    apply_with_words,
    fixed_of,
    inverse_on_grid,
    keeps_words,
    renew_words,
)
from revzoo.layers.coupling import AdditiveCoupling
from revzoo.layers.logdet import WithLogDet, zero_total
from revzoo.layers.streams import HALVES, Merge, Split, check_cut, widened

_ALONE = 2  # couplings at the end, whose outputs others see
_TOGETHER = 8  # couplings in one function; more save no time, and their gradients come together

_thread = threading.local()  # ``nested``: whether another sequence is calling this one as a step


class ReversibleSequence(Invertible):
    """Runs steps one after the other, each in its own memory mode.

    Called with one tensor ``(B, 2C, ...)``, it splits the tensor in two along ``dim`` and merges
    the result: ``y = seq(x)``, ``x = seq.inverse(y)``. Called with two: ``y1, y2 = seq(x1, x2)``.
    If the first step takes one stream (``streams = 1``), the tensor is not split. Every step
    receives the keyword arguments, such as a conditioning tensor.

    It is a list of steps like ``nn.Sequential``: ``seq[0]``, slices (a sequence of the same steps),
    assignment, ``del``, :meth:`append`, :meth:`insert`, :meth:`extend`, :meth:`pop`, ``+``, ``*``.
    Steps may have names: ``seq["name"]``, ``"name" in seq``, ``seq["name"] = step`` (a new name
    appends), :meth:`keys`, :meth:`items`. A step added later takes the memory mode of the sequence,
    or ``invert`` if ``exact`` does not fit it; ``repr`` shows the modes. Extra outputs of the steps
    (``Step.extras``) follow the streams: ``y, loss = seq(x)``.

    Args:
        steps: :class:`~revzoo.Invertible` modules, or a dictionary of them by name; the
            ``state_dict`` then has names instead of numbers. A :class:`Step` without an inverse is
            allowed: mode ``invert`` recomputes it from its input, and :meth:`inverse` raises.
        memory: mode of all steps, see :mod:`revzoo.core.modes`; :func:`revzoo.set_memory`
            changes it later. It replaces the modes of the steps; None keeps them, also for steps
            added later. ``"auto"``: ``exact`` if it fits each step with an inverse, otherwise
            ``invert``.
        dim: where to split a single tensor: 1 for channels, -1 for tokens ``(B, N, C)``.
        split: relative sizes of the two streams of a split tensor: ``(1, 2)`` splits 3 channels
            into 1 and 2.

    Raises:
        TypeError: a member is not a Step.
        ValueError: unknown mode; a name that is a number or has a dot; at the call, odd channels
            or a wrong number of streams.

    Example:
        >>> blocks = [revzoo.ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)]
        >>> seq = revzoo.ReversibleSequence(blocks, memory="exact")
        >>> seq(torch.randn(2, 8)).sum().backward()
        >>> seq.inverse(seq(torch.randn(2, 8))).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        steps: Iterable[Step] | Mapping[str, Step],
        *more: Step,
        memory: str | None = "auto",
        dim: int = 1,
        split: tuple[int, int] = HALVES,
    ) -> None:
        super().__init__()
        if more or not isinstance(steps, Iterable):
            got = f"{len(more) + 1} modules" if more else f"one {type(steps).__name__}"
            raise TypeError(
                f"ReversibleSequence got {got}: expected a list of steps, "
                "ReversibleSequence([a, b]), not (a, b) as for nn.Sequential"
            )
        self.dim, self.split = check_cut(dim, split, name="split")
        self.steps = _Steps()
        named = steps.items() if isinstance(steps, Mapping) else ((None, step) for step in steps)
        self._set_steps(list(named))
        if memory is not None:
            members = [*all_steps(self).values()]
            assign_memory(members, default_mode(members) if memory == "auto" else memory)

    @property
    def streams(self) -> int:  # type: ignore[override]
        first = next(iter(self), None)
        return 2 if first is None else first.streams

    @property
    def outputs(self) -> int:
        return list(self)[-1].outputs if len(self) else 2

    @property
    def extras(self) -> int:  # type: ignore[override]
        return sum(step.extras for step in self)

    @property
    def invertible(self) -> bool:
        return all(step.invertible for step in self)

    @property
    def exact(self) -> bool:  # type: ignore[override]
        return all(step.exact for step in self)

    __call__ = nn.Module.__call__  # each member runs in its own memory mode

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps._modules.values())  # type: ignore[arg-type]

    @overload
    def __getitem__(self, index: int | str) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> ReversibleSequence: ...

    def __getitem__(self, index: int | str | slice) -> Step | ReversibleSequence:
        if not isinstance(index, slice):
            return list(self)[self._position(index)]
        part = self._with_steps(())
        part.steps = self.steps[index]  # set together, so the steps keep their labels
        return part

    def __setitem__(self, index: int | str | slice, step: Step | Iterable[Step]) -> None:
        items = self._items()
        if isinstance(index, slice):
            items[index] = [(None, each) for each in step]  # type: ignore[union-attr]
        elif isinstance(index, str) and index not in self:
            items.append((index, step))  # type: ignore[arg-type]
        else:
            i = self._position(index)
            items[i] = items[i][0], step  # type: ignore[assignment]
        self._set_steps(items)

    def __delitem__(self, index: int | str | slice) -> None:
        items = self._items()
        del items[index if isinstance(index, slice) else self._position(index)]
        self._set_steps(items)

    def __contains__(self, key: object) -> bool:
        return key in self.steps._modules if isinstance(key, str) else any(key is s for s in self)

    def keys(self) -> Iterable[str]:
        """The names of the steps, in order; the position as a string for a step without a name."""
        return self.steps._modules.keys()

    def values(self) -> Iterable[Step]:
        """The steps, in order."""
        return list(self)

    def items(self) -> Iterable[tuple[str, Step]]:
        """Pairs of :meth:`keys` and :meth:`values`."""
        return list(zip(self.keys(), self, strict=True))

    def pop(self, index: int | str = -1) -> Step:
        """Remove and return a step, by position or name."""
        step = self[index]
        del self[index]
        return step

    def __add__(self, other: ReversibleSequence) -> ReversibleSequence:
        if not isinstance(other, ReversibleSequence):
            return NotImplemented
        return self._with_steps([*self._items(), *other._items()])

    def __iadd__(self, other: Iterable[Step]) -> Self:
        self.extend(other)
        return self

    def __mul__(self, times: int) -> ReversibleSequence:
        """The same steps, with the same parameters, ``times`` times."""
        if type(times) is not int:
            return NotImplemented
        more = [(None, step) for step in self] * (times - 1)
        return self._with_steps([*self._items(), *more] if times > 0 else ())

    __rmul__ = __mul__

    def __imul__(self, times: int) -> Self:
        self._set_steps((self * times)._items())
        return self

    def _with_steps(self, items: Iterable[tuple[str | None, Step]]) -> ReversibleSequence:
        """A sequence of other steps with the settings of this one."""
        other = ReversibleSequence((), memory=None, dim=self.dim, split=self.split)
        other._set_steps(list(items))
        vars(other).update({k: v for k, v in vars(self).items() if k in Settings._fields})
        return other

    def append(self, step: Step, *, name: str | None = None) -> ReversibleSequence:
        """Add ``step`` at the end; returns the sequence."""
        return self.insert(len(self), step, name=name)

    def extend(self, steps: Iterable[Step]) -> ReversibleSequence:
        """Add ``steps`` at the end; returns the sequence.

        Steps of a sequence keep their names, except names that are taken.
        """
        if isinstance(steps, ReversibleSequence):
            taken = {name for name, _ in self._items()}
            more = [(None if name in taken else name, step) for name, step in steps._items()]
        else:
            more = [(None, step) for step in steps]
        self._set_steps([*self._items(), *more])
        return self

    def insert(self, index: int, step: Step, *, name: str | None = None) -> ReversibleSequence:
        """Insert ``step`` before position ``index``; returns the sequence.

        Raises:
            TypeError: ``step`` is not a Step.
            ValueError: ``name`` is taken, is a number or has a dot.
        """
        items = self._items()
        items.insert(index, (name, step))
        self._set_steps(items)
        return self

    def _items(self) -> list[tuple[str | None, Step]]:
        """Names (None for numbers) and steps."""
        named: Iterable[tuple[str, Any]] = self.steps._modules.items()
        return [(None if name.isdigit() else name, step) for name, step in named]

    def _position(self, index: int | str) -> int:
        if not isinstance(index, str):
            if not -len(self) <= operator.index(index) < len(self):
                raise IndexError(f"{name_of(self)} has no step {index}: it has {len(self)} steps")
            return range(len(self))[index]
        names = list(self.keys())
        if index not in names:
            known = ", ".join(map(repr, names)) or "none"
            raise KeyError(f"{name_of(self)} has no step {index!r}; steps: {known}")
        return names.index(index)

    def _set_steps(self, items: list[tuple[str | None, Step]]) -> None:
        # all checks first, so that an error changes nothing
        for i, (name, step) in enumerate(items):
            _check_name(name)
            _check_step(i, step)
            if any(m is self for m in step.modules()):
                raise ValueError(f"step {i} contains this sequence: expected a step outside of it")
        names = [str(i) if name is None else name for i, (name, _) in enumerate(items)]
        if len({*names}) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"two steps got the name {twice!r}: expected each name once")
        # a step that moves within the sequence keeps its mode
        before = {id(step) for step in self}
        self.steps = _Steps(dict(zip(names, (step for _, step in items), strict=True)))
        label_steps(self, self.label)
        if "memory" in vars(self):
            for step in self:
                if id(step) not in before:
                    self._assign_memory_to(step)

    def _assign_memory_to(self, step: Step) -> None:
        """Set the sequence's memory mode, or ``invert`` if it does not fit."""
        others = (s for s in steps_in(self).values() if s.invertible and s is not step)
        members = [*all_steps(step).values()]
        try:
            assign_memory(members, self.memory, grid=next((s.grid for s in others), None))
        except ValueError:
            assign_memory(members, "invert")

    def forward(self, *state: Tensor, **context: Any) -> Tensor | State:
        return bare(self._run(list(state), context))

    def _run(self, streams: list[Tensor], context: dict[str, Any]) -> State:
        """Streams and extra outputs after the steps; empties ``streams``."""
        if keeps_words():  # not in a captured graph, which would repeat the assignment
            # the outer sequence has checked its streams; the check reads every value
            nested, _thread.nested = getattr(_thread, "nested", False), False
            if not nested:
                renew_words(t for t in streams if isinstance(t, Tensor))
        # a second pass, if the grid must adapt, starts from the same streams
        kept = None if self.training else tuple(streams)

        def run() -> tuple[State, State]:
            outputs, _, extras = self._walk(streams if kept is None else list(kept), (), context)
            return (*outputs, *extras), (*outputs, *extras)

        return run_on_adapted_grid(self, run)

    def _walk(
        self, streams: list[Tensor], total: State, context: dict[str, Any]
    ) -> tuple[State, State, State]:
        """Streams, sum of log-determinants (if ``total`` is not empty), and extra outputs.

        Empties ``streams``, which would keep the first ones in memory until the last step has run.
        """
        state: State = tuple(streams)
        streams.clear()
        extras: list[Tensor] = []
        splits = len(state) == 1 and isinstance(state[0], Tensor) and self.streams == 2
        if splits:
            first = _settings_at_end(self, 0)
            # A tensor without words does not continue an exact chain, so the split joins nothing.
            # We split in mode store and round the two halves, which takes less memory than rounding
            # the whole.
            if first.grid is not None and fixed_of(state[0]) is None:
                first = first._replace(memory="store", grid=None, drift_limit=None)
            state = run_step(_edge(Split, self.dim, self.split, first), state)
        self._check_count(state)
        shares = not (total or context) and runs_eagerly()
        private = [False] * len(state)  # which streams only this method holds
        waiting = list(self)[::-1]
        while waiting:
            step = waiting.pop()
            if _opens(step, state):
                waiting += list(step)[::-1]
                continue
            # a stem or transition keeps autocast's dtype: nothing is reconstructed from its input
            if not is_container(step) and step.invertible:
                known = state
                state = on_grid_of(step, widened(state))
                private = [p or t is not k for p, t, k in zip(private, state, known, strict=False)]
                del known
            if shares and can_share(step) and can_run_together(step, state):
                run, streams, state = _couplings_from(step, waiting, state), [*state], ()
                state, private = _run_couplings(run, streams, private=all(private))
                continue
            state, total, more = _advance(step, state, total, context)
            private = [False] * len(state)
            extras += more
        if splits:
            if len(state) != 2:
                raise ValueError(
                    f"{type(self).__name__} got one tensor to split in two, but its last step "
                    f"returned {len(state)} streams to merge: pass the streams one by one"
                )
            last = _settings_at_end(self, -1)
            state = run_step(_edge(Merge, self.dim, self.split, last), state)
        return state, total, tuple(extras)

    def inverse(self, *state: Tensor, **context: Any) -> Tensor | State:
        """The input that :meth:`forward` maps to ``state``; does not update statistics.

        Raises:
            NotInvertibleError: a step loses information; the message names it.
            RangeError: a stream is too large for exact sums on its grid.
        """
        return bare(self._run_back(list(state), context))

    def _run_back(self, streams: list[Tensor], context: dict[str, Any]) -> State:
        """The input for the output ``streams``; empties the list."""
        self._check_invertible()
        self._check_tensors(streams, "inverse(y1, y2)")
        renew_words(t for t in streams if isinstance(t, Tensor))
        inputs = self._walk_back(streams, context)
        check_ranges(scales_of(inputs))
        return inputs

    def _walk_back(self, streams: list[Tensor], context: dict[str, Any]) -> State:
        state: State = tuple(streams)
        streams.clear()
        one_tensor = len(state) == 1 and isinstance(state[0], Tensor)
        splits = one_tensor and self.streams == self.outputs == 2
        state = apply_with_words(Split(self.dim, self.split).forward, state) if splits else state
        # container by container: each may override inverse()
        for step in reversed(list(self)):
            if isinstance(step, ReversibleSequence):
                if type(step).inverse is ReversibleSequence.inverse:
                    state = step._walk_back(list(state), context)
                else:
                    state = as_state(step.inverse(*state, **context))
            else:
                state = on_grid_of(step, state)
                versions = versions_of(state)
                assert isinstance(step, Invertible)
                # an inverse evaluates branches, which must not update statistics or draw the
                # caller's numbers
                with repeating(step, state):
                    try:
                        inputs = inverse_on_grid(step, *state, **context)
                    except (RuntimeError, TypeError) as error:
                        explain_streams(error, step, state, "inverse")
                        raise
                refuse_changed_outputs(step, state, versions)
                state = inputs
        return apply_with_words(Merge(self.dim, self.split).forward, state) if splits else state

    def forward_with_log_det(self, *state: Tensor, **context: Any) -> tuple[Tensor | State, Tensor]:
        """Outputs without extra outputs, and the sum of the steps' log-determinants ``(B,)``.

        Computes both in one pass, in the memory modes of the steps.

        Raises:
            NotInvertibleError: a step loses information; the message names it.
            NotImplementedError: a step has no log-determinant; the message names it.
        """
        self._check_invertible()
        self._check_tensors(state, "log_det(x1, x2)")
        renew_words(t for t in state if isinstance(t, Tensor))

        def run() -> tuple[tuple[State, Tensor], State]:
            outputs, (total,), _ = self._walk(list(state), (zero_total(state[0]),), context)
            return (outputs, total), (*outputs, total)

        outputs, total = run_on_adapted_grid(self, run)
        return bare(outputs), total

    def log_det(self, *state: Tensor, **context: Any) -> Tensor:
        """The sum of :meth:`forward_with_log_det`, at the same cost."""
        return self.forward_with_log_det(*state, **context)[1]

    def _check_invertible(self) -> None:
        for i, step in enumerate(self):
            if not step.invertible:
                raise NotInvertibleError(
                    f"step {i} of {len(self)}, {type(step).__name__}, has no inverse: it loses "
                    "information. Invert the steps after it, or replace it by an invertible step"
                )

    def _check_tensors(self, streams: Iterable[object], call: str) -> None:
        for i, t in enumerate(streams):
            if not isinstance(t, Tensor):
                raise TypeError(
                    f"{type(self).__name__} got a {type(t).__name__} as stream {i}, expected a "
                    f"tensor: pass the streams one by one, {call}"
                )

    def _check_count(self, state: State) -> None:
        self._check_tensors(state, "seq(x1, x2)")
        if len(state) != self.streams:
            raise ValueError(
                f"{type(self).__name__} got {len(state)} streams, expected the {self.streams} that "
                "its first step takes: pass that many"
            )


def run_sequence(sequence: ReversibleSequence, streams: list[Tensor]) -> State:
    """``sequence(*streams)``; empties the list, so that each stream is freed after its last use.

    If the call does more than run the members, the list keeps the streams until the call ends.
    """
    if _is_plain(sequence):
        return sequence._run(streams, {})
    return as_state(sequence(*streams))


def invert_sequence(sequence: ReversibleSequence, streams: list[Tensor]) -> State:
    """``sequence.inverse(*streams)``; empties the list, unless a class overrides ``inverse``."""
    if type(sequence).inverse is ReversibleSequence.inverse:
        return sequence._run_back(streams, {})
    return as_state(sequence.inverse(*streams))


def _opens(step: Step, state: State) -> TypeGuard[ReversibleSequence]:
    """Whether the members of ``step`` can run in its place."""
    # the same streams: it splits no tensor
    return isinstance(step, ReversibleSequence) and _is_plain(step) and len(state) == step.streams


def _is_plain(sequence: ReversibleSequence) -> bool:
    """Whether we can run the members instead; a call keeps its inputs until the last has run."""
    inherits = type(sequence).forward is ReversibleSequence.forward
    return inherits and calls_only_forward(sequence)


def _couplings_from(step: Step, waiting: list[Step], state: State) -> list[Any]:
    """``step`` and the couplings that may share functions with it, from the stack ``waiting``."""
    steps, settings = [step], Settings.of(step)
    while waiting:
        following = waiting[-1]
        if _opens(following, state):
            waiting[-1:] = list(following)[::-1]
        elif can_share(following) and Settings.of(following) == settings:
            steps.append(waiting.pop())
        else:
            break
    return steps


def _run_couplings(
    steps: list[Any], streams: list[Tensor], *, private: bool
) -> tuple[State, list[bool]]:
    """The streams, and which of them only the caller holds. Empties both lists.

    Several couplings share a function. The last two have one each, so hooks of the tensors that
    they return see the same gradients as in plain training.
    """
    state: State = tuple(streams)
    streams.clear()
    free = [private, private]
    while steps:
        count = min(len(steps) - _ALONE, _TOGETHER)
        outputs = None
        if count > 1:
            several, first = tuple(steps[:count]), steps[0]
            if (members := Members.together(several)) is not None:  # they share no parameter
                limit = mode_of(first.memory).drift_limit(first)
                outputs = run_inverting(several, members, state, {}, limit, private=all(free))
        if outputs is None:
            count = 1
            outputs = as_state(run_in_mode(steps[0], state, {}), steps[0])
            free = [free[1], True]
        else:
            free = [True, True]
        del steps[:count]
        state, outputs = outputs, None
    return state, free


def _advance(
    step: Step, state: State, total: State, context: dict[str, Any]
) -> tuple[State, State, State]:
    """Run one step; if there is a total, add the log-determinant."""
    # a container runs its members, whose tapes join (NOTE [ Chains joined by hand ])
    if isinstance(step, ReversibleSequence):
        if total:
            return step._walk(list(state), total, context)
        if keeps_words():
            _thread.nested = True  # its input is a stream of this sequence
        try:
            outputs = as_state(step(*state, **context))
        finally:
            if keeps_words():
                _thread.nested = False
    elif not (total or step.extras):
        return as_state(run_in_mode(step, state, context), step), total, ()
    else:
        outputs = run_step(WithLogDet(step) if total else step, (*state, *total), **context)
    end = len(outputs) - step.extras
    cut = end - len(total)
    return outputs[:cut], outputs[cut:end], outputs[end:]


def _settings_at_end(step: Step, index: int) -> Settings:
    """The settings of a split (``index`` 0) or merge (-1) beside the first or last step."""
    while isinstance(step, ReversibleSequence) and len(step):
        step = list(step)[index]
    memory = step.memory if mode_of(step.memory).inverts else "store"
    return Settings.of(step)._replace(memory=memory, guarded=False)


def merged(state: State, last: Step, merge: Step) -> State:
    """Merge the streams of ``last`` into one tensor, which joins its chain."""
    _settings_at_end(last, -1)._replace(guarded=merge.guarded).assign(merge)
    return run_step(merge, state)


def _edge(kind: Callable[..., Step], dim: int, parts: tuple[int, int], settings: Settings) -> Step:
    """A split or merge that joins the chain of the step whose settings it has."""
    # torch.compile does not trace caches, and records nothing
    make = _new_edge if torch.compiler.is_compiling() else _same_edge
    return make(kind, dim, parts, settings)


def _new_edge(
    kind: Callable[..., Step], dim: int, parts: tuple[int, int], settings: Settings
) -> Step:
    edge = kind(dim, parts)
    settings.assign(edge)
    return edge


# the same object in each call: a new one would need a new search of what it reaches
_same_edge = functools.lru_cache(maxsize=256)(_new_edge)


class _Steps(nn.ModuleList):
    """Modules by position; some have names."""

    def __init__(self, named: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for name, module in (named or {}).items():
            self.add_module(name, module)

    def _get_name(self) -> str:
        return "ModuleList"

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return list(self)[index]
        items = list(self._modules.items())[index]
        return _Steps({(str(i) if k.isdigit() else k): m for i, (k, m) in enumerate(items)})

    def __repr__(self) -> str:  # ModuleList shows numbers and groups equal modules
        return super().__repr__() if all(map(str.isdigit, self._modules)) else _repr(self)


_repr = nn.Module.__repr__


def _check_step(i: int, step: object) -> None:
    """Raise a TypeError unless ``step``, at position ``i``, is a Step."""
    if isinstance(step, type):
        raise TypeError(f"step {i} is the class {step.__name__}: create it with (...)")
    if not isinstance(step, Step):
        kind = type(step)  # with its module: compat.memcnn has classes of the same names
        raise TypeError(
            f"step {i} is a {kind.__module__}.{kind.__name__}, expected a revzoo.Invertible: wrap "
            "a residual function in AdditiveCoupling, a pair of them in ReversibleBlock(f, g); let "
            "the class of a module with an inverse derive from revzoo.Invertible"
        )


def _check_name(name: str | None) -> None:
    if name is None:
        return
    wrong = not isinstance(name, str) or not name or name.isdigit() or "." in name
    if wrong or hasattr(nn.ModuleList(), name):
        raise ValueError(
            f"a step got the name {name!r}: expected a name without dots that is neither a number "
            "nor an attribute of nn.ModuleList"
        )


class ReversibleBlock(ReversibleSequence):
    """The RevNet block: ``y1 = x1 + F(x2)``, ``y2 = x2 + G(y1)`` (Gomez et al. 2017, eq. 6).

    Args:
        f: residual function F, ``(B, C, ...)`` to the same shape.
        g: residual function G, likewise; None for a copy of ``f`` with its own parameters, as in
            MemCNN.
        memory: see :class:`ReversibleSequence`.

    Raises:
        TypeError: ``f`` or ``g`` is not a module.

    Example:
        >>> block = revzoo.ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4))
        >>> y1, y2 = block(torch.randn(2, 4), torch.randn(2, 4))
    """

    def __init__(self, f: nn.Module, g: nn.Module | None = None, *, memory: str = "auto") -> None:
        check_callable("f", f)
        g = copy.deepcopy(f) if g is None else g
        check_callable("g", g)
        super().__init__([AdditiveCoupling(f), AdditiveCoupling(g)], memory=memory)
