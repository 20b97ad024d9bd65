"""Calls of steps, which the backward pass evaluates once more.

A :class:`Call` belongs to one function of the graph. An :class:`AdditiveCall` runs one or more
additive couplings: their gradients need no graph of the sums, so it records only the branches. A
:class:`GeneralCall` runs any other invertible step.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.hooks import RemovableHandle

from revzoo.core.conditions import Conditions, Kept, Members, leave
from revzoo.core.guard import (
    Guard,
    Replayed,
    names_of,
    note_sums,
    sample,
    sample_of,
    words_sum,
)
from revzoo.core.invertible import (
    Invertible,
    State,
    as_state,
    changes_input,
    check_inverted,
    explain_streams,
    name_of,
    plain_call,
    refuse_changed_inputs,
    refuse_changed_outputs,
    streams_of,
)
from revzoo.core.kernels import sum_of
from revzoo.core.saved import saving_for_replay
from revzoo.core.sums import plus
from revzoo.core.tensors import (
    autocast_dtype,
    detached,
    unshared,
    version_of,
    versions_of,
    with_strides,
)
from revzoo.core.words import (
    Fixed,
    Streams,
    apply_to_words,
    apply_with_words,
    as_fixed,
    as_floats,
    backing_tensors,
    call_on_grid,
    discard,
    fixed_of,
    keeps_words,
    read_with_words,
    set_words,
)

Gradients = Sequence[Tensor | None]
Unwound = tuple[Streams, list[Tensor | None]]


class Call:
    """What the replay of one or more steps needs; no activation and no graph.

    Attributes:
        arguments: the keyword arguments' tensors that require gradient.
        trained: for each step, the parameters that require gradient.
        streams: the output, until the tape takes it.
        differentiable: which of the tensors that the steps returned depend on one with gradient.
        done: whether the function has run backward, or there is none.
        function: the node in the graph, as a weak reference.
        index: its place on the tape.
    """

    streams: Streams = ()
    differentiable: Sequence[bool] = ()
    done = False
    function: Callable[[], Any] = staticmethod(lambda: None)
    index = -1

    def __init__(
        self,
        steps: tuple[Invertible, ...],
        members: Members,
        state: State,
        context: Mapping[str, Any],
        limit: float | None,
    ) -> None:
        self.steps = steps
        self.step = steps[0]
        self.limit = limit
        self.needs = [t.requires_grad for t in state]
        self.members = members
        self.conditions = Conditions(steps, members, state)
        self.trained = members.trained()
        self.arguments: list[Tensor] = []
        self._given = context
        self._context: dict[str, Any] = {}
        for name, value in context.items():
            leaves, structure = tree_flatten(value)
            self.arguments += [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            self._context[name] = [Kept.of(t) for t in leaves], structure

    @property
    def name(self) -> str:
        return name_of(self.step)

    @property
    def may_run_backward(self) -> bool:
        """Whether the graph may still run the function backward."""
        return not self.done and self.function() is not None

    def forward(self, state: State) -> Any:
        """The outputs, detached."""
        raise NotImplementedError

    def unwind(
        self,
        outputs: list[Tensor | Fixed],
        guard: Guard,
        grads: list[Tensor | None],
        needs: Sequence[bool],
    ) -> Unwound:
        """Invert the steps; may empty ``outputs`` and ``grads``, so that they are freed early.

        Args:
            outputs: the streams after the steps.
            guard: gets the figures to compare.
            grads: of what the function returned; empty if no gradient is wanted.
            needs: which inputs of the function need a gradient: streams, arguments, parameters.

        Returns:
            The streams before the steps; the gradients of the function's inputs.
        """
        raise NotImplementedError

    def _again(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The keyword arguments for an evaluation, with new leaves; and those with gradient."""
        wanted: list[Tensor] = []
        context: dict[str, Any] = {}
        for name, (leaves, structure) in self._context.items():
            if any(leaf.changed() for leaf in leaves):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: the keyword argument {name!r} of {self.name} changed "
                    "between its forward pass and its replay"
                )
            values = [leaf.again() for leaf in leaves]
            wanted += [v for v, leaf in zip(values, leaves, strict=True) if leaf.needs]
            context[name] = tree_unflatten(values, structure)
        return context, wanted

    # the forward pass

    def _evaluate(
        self, step: Invertible, fn: Callable[..., Any], inputs: State, needs: Sequence[bool]
    ) -> Any:
        """``fn(*inputs, **context)`` of code that may record: detached, and without a graph."""
        try:
            # torch computes some layers by other kernels if nothing is recorded
            with torch.enable_grad(), saved_tensors_hooks(_forget, _refuse):
                start = torch._C._autograd._get_sequence_nr()
                leaves = [_leaf(t, n) for t, n in zip(inputs, needs, strict=True)]
                values = fn(*leaves, **tree_map_only(Tensor, _leaf, self._given))
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise changes_input(step, "in place") from error
        self._refuse_graphs(step, values, start)
        found = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
        self.differentiable = [t.requires_grad for t in found]
        return tree_map_only(Tensor, Tensor.detach, values)

    def _refuse_graphs(self, step: Invertible, values: Any, start: int) -> None:
        """Raise if the step uses a tensor with a graph of its own, or leaves one behind."""
        roots = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
        for node in _nodes(map(_edge_of, roots)):
            if node._sequence_nr() < start:
                raise RuntimeError(
                    f"{name_of(step)} uses a tensor that was computed outside of it and requires "
                    f"gradient ({node.name()}); expected such tensors as keyword arguments, "
                    f"seq(x, name=tensor), which the branches receive. Or {step.remedy}"
                )
        for m in self.members.unknown(self.steps):
            for name, v in vars(m).items():
                node = v.grad_fn if isinstance(v, Tensor) else None
                if node is not None and node._sequence_nr() >= start:
                    where = f"{type(m).__name__}.{name} of {name_of(step)}"
                    with torch.enable_grad():
                        # depends on the parameters, so that autograd.grad() of them reaches it
                        leaf = v.detach().requires_grad_()
                        vars(m)[name] = _Refused.apply(where, leaf, *self.trained[0])

    # the backward pass

    def _derive(
        self, roots: Iterable[Any], grads: Gradients, inputs: Sequence[Any], needs: Sequence[bool]
    ) -> list[Tensor | None]:
        """The gradients of those ``inputs`` that need one, from edges; frees the graph."""
        each = zip(roots, grads, strict=True)
        pairs = [(r, g) for r, g in each if g is not None and r is not None]
        wanted = [t if n else None for t, n in zip(inputs, needs, strict=True)]
        every = targets = [t for t in wanted if t is not None]
        if not pairs or not targets:
            return [None] * len(inputs)
        others: list[Any] = []
        if not self.members.quiet:  # it may use leaves that the function did not receive
            received = set(map(id, inputs))
            leaves = [node for node in _nodes([r for r, _ in pairs]) if hasattr(node, "variable")]
            others = [node for node in leaves if id(node.variable) not in received]
            every = [*targets, *(node.variable for node in others)]
        # the hooks of these tensors run where their gradient arrives, not here, too
        hooked = [(t, t._backward_hooks) for t in every if t._backward_hooks]
        for t, _ in hooked:
            t._backward_hooks = None
        passed_on = [_pass_on(node, dict(hooked).get(node.variable)) for node in others]
        try:
            # torch.autograd.grad without its checks; positional in torch: the roots, their
            # gradients, keep the graph, create a graph, inputs, allow unused
            run = Variable._execution_engine.run_backward
            ends, known = zip(*pairs, strict=True)
            found = run(ends, known, False, False, tuple(every), True, accumulate_grad=False)
        finally:
            for handle in passed_on:
                handle.remove()
            for t, hooks in hooked:
                t._backward_hooks = hooks
        if len(targets) == len(inputs):
            return list(found[: len(targets)])
        of_targets = iter(found)
        return [None if t is None else next(of_targets) for t in wanted]

    def _replayed(self) -> Replayed:
        return Replayed(self.steps, names_of(self.steps), self.limit or 0.0, True)


class _Before(NamedTuple):
    """The stream that a coupling adds to, before it: what to restore, and what to compare."""

    strides: tuple[int, ...]
    down: Tensor | None = None
    total: Tensor | None = None  # of the words; for the guard
    values: Tensor | None = None  # a sample; for the guard


class AdditiveCall(Call):
    """Additive couplings ``(x, z) -> (z, x + F(z))``, one after the other.

    The function of a single one returns only the sum, since z passes it by. That of several frees
    gradients and, if it ``frees_input``, its input as soon as they are used; their holders never
    read them again.
    """

    frees_input = False

    def forward(self, state: State) -> Any:
        on_grid = self.step.grid is not None and keeps_words()
        # a stream is its floats and its words; the sum needs only the words, if there are any
        x: tuple[Tensor, Fixed | None]
        y: tuple[Tensor, Fixed | None]
        x, z = ((t, fixed_of(t) if on_grid else None) for t in state)
        self._before: list[_Before] = []
        step: Any
        try:
            for at, step in enumerate(self.steps):
                strides, dtype = _strides_of(x[0]), x[0].dtype
                # what goes wrong in any coupling shows in the streams before the first
                guarded = self.limit is not None and at < len(state)
                before: Tensor | Fixed = x[1] or x[0]
                if self.frees_input and at < len(state) and isinstance(before, Fixed):
                    discard(x[0])
                del x
                value = step.checked_value(self._value(step, z[0]), before)
                if isinstance(before, Fixed):
                    y = plus(before, value, dtype, step, sums=guarded)
                    note = _Before(strides, before.down, before.checksum if guarded else None)
                else:
                    values = sample_of(before) if guarded else None
                    note = _Before(strides, values=values)
                    y = before + step.fitting(value, before), None
                    if self.frees_input and at < len(state):
                        discard(before)
                self._before.append(note)
                x, z = z, y
                del value, before, y  # before the next evaluation
        except (RuntimeError, TypeError) as error:
            explain_streams(error, step, state, "forward")
            raise
        self._given = {}  # the tape must not hold a graph
        self.members.walked = True
        self.conditions.finish()
        for t, words in (x, z):
            if words is not None:
                set_words(t, words)
        self.streams = tuple(words or t.detach() for t, words in (x, z))
        return (x[0], z[0]) if len(self.steps) > 1 else z[0]

    def _value(self, step: Invertible, z: Tensor) -> Any:
        """What the branch returns."""
        version = version_of(z)
        branch: Callable[..., Any] = step.branch  # type: ignore[assignment]
        if self.members.quiet and self.members.walked:
            values = branch(z, **self._given)
        else:
            values = self._evaluate(step, branch, (z,), self.needs[1:])
        refuse_changed_inputs(step, (z,), [version])
        return values

    def unwind(
        self,
        outputs: list[Tensor | Fixed],
        guard: Guard,
        grads: list[Tensor | None],
        needs: Sequence[bool],
    ) -> Unwound:
        x2, y2 = outputs
        outputs.clear()
        single = len(self.steps) == 1
        gx, gy = (None, *grads)[-2:] if grads else (None, None)
        grads.clear()  # the caller would hold them until the last step is replayed
        context, arguments = self._again()
        of_others: list[Tensor | None] = []
        after = len(needs)
        undo = None
        try:
            step: Any
            for at in reversed(range(len(self.steps))):
                step, before, own = self.steps[at], self._before[at], self.trained[at]
                # the arguments of a single step are before its parameters
                start = after - len(own) - len(arguments)
                wanted = (not single or needs[1], *needs[start:after]) if needs else ()
                after = start
                records = gy is not None and any(wanted)
                if undo is None:
                    undo = self.conditions.enter()
                leaf = self._leaf(x2, step).requires_grad_(records and self.needs[1])
                # code that we do not know records always: the same kernels as in forward
                with torch.set_grad_enabled(records or not self.members.quiet):
                    value = step.checked_value(step.branch(leaf, **context), y2)
                # the gradients need only the node, so the difference may take the value's memory
                root = _edge_of(value)
                value = value.detach()
                x1 = _with_strides(_minus(y2, value, before, step), before.strides)
                if before.total is not None and isinstance(x1, Fixed):
                    # words that got other strides have no checksum yet
                    total = sum_of(x1.words) if x1.checksum is None else x1.checksum
                    note_sums(self.steps, before.total, total)
                if before.values is not None:
                    guard.compare(self._replayed(), {0: before.values}, (x1, x2), (x2, y2))
                    guard.note_uses([leaf], (x1, x2))
                x2, y2 = x1, x2  # frees the sum before memory peaks
                del value, x1
                if self.conditions.autocast:  # gradients are computed outside of it
                    leave(undo)
                    undo = None
                received = (leaf, *arguments, *own)
                found: list[Tensor | None] = [None] * len(received)
                if records:
                    found = self._derive((root,), (gy,), received, wanted)
                of_others[:0] = found[1:]
                gz = found[0]
                if gz is not None:  # a narrow one does not stay so: others are added to it
                    gx = gz.to(y2.dtype) if gx is None else gx + gz
                gx, gy = gy, gx
                del root, leaf, received, found, gz  # before the next evaluation
        finally:
            if undo is not None:
                leave(undo)
        return (x2, y2), [gx, gy, *of_others]

    def _leaf(self, t: Tensor | Fixed, step: Any) -> Tensor:
        if not isinstance(t, Fixed):
            return t.detach()
        # code that we do not know may hold steps, which go on with the words as in forward
        if not self.members.quiet:
            return read_with_words(t)
        # a branch that casts its input gets it as cast: it need not be read and written again;
        # `is True`, since a container may have a layer of this name
        narrows = t.dtype == torch.float32 and getattr(step.branch, "narrows", False) is True
        return t.read(autocast_dtype(t.words) if narrows else None)


class PairCall(AdditiveCall):
    """An additive coupling of two of several streams (``Step.pair``), which gets only these two."""

    @property
    def at(self) -> int:
        """The stream that changes."""
        assert self.step.pair
        return self.step.pair[0]

    def among(self, state: State) -> Streams:
        """All streams after the step; ``state`` are those before it."""
        streams = [t.detach() for t in state]
        known = as_fixed(streams) if self.step.grid is not None and keeps_words() else streams
        return (*known[: self.at], self.streams[1], *known[self.at + 1 :])

    def unwind(
        self,
        outputs: list[Tensor | Fixed],
        guard: Guard,
        grads: list[Tensor | None],
        needs: Sequence[bool],
    ) -> Unwound:
        assert self.step.pair
        i, j = self.step.pair
        before, pair, after = outputs[:i], [outputs[j], outputs[i]], outputs[i + 1 :]
        outputs.clear()  # so that the sum is freed before memory peaks
        (x, _), found = super().unwind(pair, guard, grads, needs)
        return (*before, x, *after), found


def _minus(y: Tensor | Fixed, value: Tensor, before: _Before, step: Any) -> Tensor | Fixed:
    """``y - value``, in the memory of ``value`` if nothing else uses it."""
    if isinstance(y, Fixed):
        sums = before.total is not None
        return y.minus(value, before.down, overwrite=unshared(value), sums=sums)
    with torch.no_grad():
        if value.dtype == y.dtype and unshared(value):
            return torch.sub(y, value, out=value)
        return y - step.fitting(value, y)


_taken = threading.local()  # ``last``: a function, and what it got; it runs next in this thread


def stash_gradients(call: Call, grads: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    """A hook of a function, before it runs: takes its gradients, for tensors without memory.

    The caller holds what it passes until the function returns.
    """
    _taken.last = call, grads
    return tuple(None if g is None else _hollow(g.shape, g.dtype, g.device) for g in grads)


def pop_stashed_gradients(call: Call) -> tuple[Tensor | None, ...] | None:
    """The gradients that :func:`stash_gradients` took for this function, once."""
    last, _taken.last = getattr(_taken, "last", None), None
    return last[1] if last is not None and last[0] is call else None


@functools.lru_cache(maxsize=64)
def _hollow(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor whose elements share the memory of one."""
    return torch.empty((), dtype=dtype, device=device).expand(shape)


class GeneralCall(Call):
    """Any invertible step."""

    saved: Sequence[Tensor] = ()
    _samples: Mapping[int, Tensor] = {}
    _sum: Tensor | None = None

    def forward(self, state: State) -> Any:
        saved: list[Tensor] = []
        step = self.step

        def called(*state: Tensor, **context: Any) -> Any:
            with saving_for_replay(saved):
                return call_on_grid(plain_call, step, state, context, inverts=True)

        outputs = self._evaluate(step, called, state, self.needs)
        self.saved = saved
        self.finish(state, outputs)
        return outputs

    def finish(self, state: State, outputs: Any) -> None:
        """Note the streams after the step; figures of those that it changes, before it."""
        self._given = {}  # the tape must not hold a graph
        step = self.step
        self.shapes = [t.shape for t in state]
        self.dtypes = [t.dtype for t in state]
        self.strides = [_strides_of(t) for t in state]
        self.streams = as_fixed([t.detach() for t in streams_of(outputs, step)])
        # without sums, which no branch reads
        x = as_fixed(state[: len(state) - step.float_streams])
        # without the words
        self._fixed = [(t.scale, t.down) if isinstance(t, Fixed) else None for t in x]
        self.conditions.finish()
        if self.limit is None:
            return
        if not any(type(t) is Fixed for t in self.streams):
            x = as_floats(x)  # the step loses the words
        elif fixed := [t for t in x if isinstance(t, Fixed)]:
            self._sum = words_sum(fixed)
        if step.guarded:
            self._samples = sample(x, self.streams)

    def unwind(
        self,
        outputs: list[Tensor | Fixed],
        guard: Guard,
        grads: list[Tensor | None],
        needs: Sequence[bool],
    ) -> Unwound:
        step = self.step
        known = tuple(outputs)
        outputs.clear()
        context, arguments = self._again()
        record = Recorder(self, records=bool(grads))
        held = backing_tensors(known)
        versions = versions_of(held)
        takes_words = step.needs_words or type(step).replay is Invertible.replay
        undo = self.conditions.enter()
        try:
            # code that we do not know records always: the same kernels as in forward
            quiet = self.members.quiet and not record.records
            with torch.set_grad_enabled(not quiet):
                takes = known if takes_words else as_floats(known)
                returned, recorded = step.replay(takes, record, context)
        finally:
            leave(undo)
        refuse_changed_outputs(step, held, versions)
        inputs = self._checked(returned)
        self._compare(guard, inputs, known)
        found: list[Tensor | None] = []
        if record.records:
            guard.note_uses([t for t in record.leaves if t is not None], inputs)
            received = [*record.leaves, *arguments, *self.trained[0]]
            roots = [*map(_edge_of, recorded)]
            del known, held, takes, returned, recorded  # the backward pass needs the graph alone
            found = self._derive(roots, grads, received, needs)
            for i, (output, factor) in record.multiples.items():
                grad = grads[output]
                found[i] = None if grad is None or not needs[i] else factor * grad
        return inputs, found

    def _checked(self, returned: Sequence[Any]) -> Streams:
        """The streams that the inverse returned, as the forward pass took them."""
        check_inverted(self.name, returned, self.shapes)
        inputs = as_fixed(returned)
        for t, known in zip(inputs, self._fixed, strict=False):
            if known is not None and isinstance(t, Fixed):
                t.scale, t.down = known
        return tuple(map(_with_strides, inputs, self.strides))

    def _compare(self, guard: Guard, inputs: Streams, known: Streams) -> None:
        if self._sum is not None:
            fixed = [t for t in inputs[: len(self._fixed)] if isinstance(t, Fixed)]
            # none has words if a hook of all modules changed a stream after this step
            found = words_sum(fixed) if fixed else torch.zeros_like(self._sum)
            note_sums(self.steps, self._sum, found)
        if self._samples:
            guard.compare(self._replayed(), self._samples, inputs, known)


class Recorder:
    """Leaves and graph of one replay; an argument of :meth:`Invertible.replay`.

    Attributes:
        records: whether gradients are wanted; if not, ``replay`` need not return outputs.
        needs: which streams required gradient in the forward pass.
        shapes: of the streams in the forward pass.
        saved: what the step saved in its forward pass by ``save_for_replay``.
        multiples: streams without a leaf, ``{stream: (output, factor)}``, whose gradient is a
            multiple of that of one output.
    """

    def __init__(self, call: GeneralCall, *, records: bool) -> None:
        self._call = call
        self.records = records
        self.needs = call.needs
        self.shapes = call.shapes
        self.saved = call.saved
        self.leaves: list[Tensor | None] = [None] * len(self.needs)
        self.multiples: dict[int, tuple[int, float]] = {}

    def leaf(self, i: int, t: Tensor | Fixed) -> Tensor:
        """Stream ``i`` of the step's input in floating point, where the recorded graph ends."""
        t = _with_strides(t, self._call.strides[i])
        # with words, as in the forward pass: steps inside may go on with them
        leaf = read_with_words(t) if isinstance(t, Fixed) else t.detach()
        self.leaves[i] = leaf = leaf.requires_grad_(self.needs[i] and self.records)
        return leaf

    def inverted(
        self, inverse: Callable[..., Any], outputs: Streams, context: Mapping[str, Any]
    ) -> Streams:
        """``inverse(*outputs, **context)`` without recording, under the conditions of the forward.

        ``carried`` buffers have their values after it. The next recording sees the same conditions.
        """
        step = self._call.step
        undo = self._call.conditions.enter(inverting=True)
        try:
            with torch.no_grad():
                if step.moves_values and all(isinstance(t, Fixed) for t in outputs):
                    fixed = tuple(t for t in outputs if isinstance(t, Fixed))
                    return apply_to_words(
                        lambda *s: inverse(*s, **context), fixed, self._call.dtypes
                    )
                returned = inverse(*as_floats(outputs), **context)
                return as_fixed(as_state(returned, step, inverse=True))
        finally:
            leave(undo)


def _pass_on(node: Any, hooks: Mapping[int, Any] | None) -> RemovableHandle:
    """Pass a gradient to the accumulate node of its leaf as soon as it arrives.

    FSDP2 divides the gradients of a module among the processes when the gradient of its input
    arrives; those that come later would be lost. ``hooks`` are the leaf's own.
    """
    leaf = node.variable

    def arrived(g: Tensor) -> None:
        handle.remove()  # the node calls the hooks of its leaf
        leaf._backward_hooks.update(hooks or {})
        torch.autograd.backward([GradientEdge(node, 0)], [g])

    handle: RemovableHandle = leaf.register_hook(arrived)
    return handle


def _edge_of(value: Tensor) -> GradientEdge | None:
    if value.grad_fn is None:
        return get_gradient_edge(value) if value.requires_grad else None
    return GradientEdge(value.grad_fn, value.output_nr)


def _nodes(roots: Iterable[GradientEdge | None]) -> list[Any]:
    """The nodes of the graph behind ``roots``."""
    waiting: list[Any] = [root.node for root in roots if root is not None]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [n for n, _ in node.next_functions if n is not None]
    return list(seen)


def _leaf(t: Tensor, needs: bool | None = None) -> Tensor:
    return detached(t).requires_grad_(t.requires_grad if needs is None else needs)


def _strides_of(t: Tensor) -> tuple[int, ...]:
    return t.stride() if t.layout is torch.strided else ()


def _with_strides(t: Tensor | Fixed, stride: tuple[int, ...]) -> Tensor | Fixed:
    """``t`` with the strides of the forward pass, see :mod:`revzoo.core.tensors`."""
    held = t.words if isinstance(t, Fixed) else t
    if held.stride() == stride or held.dim() != len(stride):  # a wrong inverse: a check raises
        return t
    if isinstance(t, Fixed):
        return t.with_words(with_strides(held, stride))
    return apply_with_words(lambda x: with_strides(x, stride), (t,))[0]


def _forget(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RuntimeError(
        "a gradient reached a tensor of a step's forward pass, which has no graph in this memory "
        "mode: return a tensor that a loss needs from the branch, and set the step's extras. For a "
        "step that differentiates inside its forward, use memory='store'"
    )


class _Refused(torch.autograd.Function):
    """A tensor that a step left in an attribute: to read, not to differentiate."""

    @staticmethod
    def forward(ctx: Any, where: str, t: Tensor, *_: Tensor) -> Tensor:
        ctx.where = where
        return t.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"a gradient reached {ctx.where}, which belongs to an evaluation without a graph: "
            "return such a tensor from the branch, and set the step's extras to the number of "
            "tensors after its streams. Or use memory='recompute' or 'store' for this step"
        )
