"""The invertible checkpoint: a chain of steps keeps no activation but its last output.

``torch.utils.checkpoint`` keeps the input of every segment. Here each step is one small
``autograd.Function``. Its forward keeps no graph; its backward inverts the step and evaluates it
once more, with recording on, for the gradients.

Source: Gomez et al., "The Reversible Residual Network", 2017, arXiv 1707.04585, algorithm 1.

NOTE [ The tape ]
    forward     step 0     step 1     step 2         The graph holds one function for each
              x ------> s ------> s ------> y        step, and no activation.
    backward                          <---- y        The function of step 2 inverts it, which
                            <---- s                  gives s, and computes the gradients. From
                                                     s the function of step 1 goes on.

    1. The tape of a chain holds one *known state*: the words of the streams in mode ``exact``, the
       streams themselves in ``invert``. ``_position`` counts the steps before it. For each step the
       tape holds the conditions (:mod:`revzoo.core.conditions`) and a figure of the streams that
       the step changed, which the replay compares.
    2. Functions hold the tape; the tape refers to functions weakly. So there is no cycle, and
       graph and tape are freed at once.
    3. Parameters are inputs of the function, so their gradients arrive at their own accumulate
       nodes: hooks, DDP, ``autograd.grad`` and frozen parts work as usual. A leaf that the step
       captures in another way is accumulated in the replay. A captured tensor that has a graph of
       its own raises.
    4. If the graph will not be used again, and neither this step nor a later one can still run
       backward, the tape is cut: the step's input becomes the known state. If no earlier step can
       run either, no state is kept.
    5. Otherwise (``retain_graph``, a partial graph) the known state stays, and the walk continues
       from a *cursor*. A step that no gradient reaches is undone on the way. A step that the
       cursor has passed is reached from the known state again.
    6. First derivatives only: ``create_graph=True`` raises.
    7. A step that only moves values is plain autograd, which saves nothing; the tape undoes it.

NOTE [ Chains joined by hand ]
    Invertible modules called one after the other form one chain, also without a container. A step
    continues a tape if its input is exactly the tape's known state: the same tensors, not changed
    since. We look up the tape by the ``id`` of the last tensor; weak references show whether this
    id still belongs to the same tensor.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable, profiler
from torch.autograd.graph import GradientEdge, saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from revzoo.core.ambient import capturing_cuda_graph
from revzoo.core.arguments import Kept
from revzoo.core.calls import (
    call_on_grid,
    call_without_changing_hooks,
    refuse_changed_outputs,
    runs_forward_alone,
)
from revzoo.core.conditions import Conditions, Members, leave
from revzoo.core.fixedpoint.scale import Scale
from revzoo.core.fixedpoint.words import (
    Fixed,
    Streams,
    apply_to_words,
    apply_with_words,
    as_fixed,
    as_floats,
    backing_tensors,
    fixed_of,
    keeps_words,
    read_with_words,
    within,
)
from revzoo.core.guard.drift import Guard, Replayed, note_scale, note_sums, words_sum
from revzoo.core.guard.samples import Sample, sample
from revzoo.core.invertible import (
    Invertible,
    State,
    Step,
    as_state,
    check_stream_count,
    name_of,
    plain_call,
    streams_of,
)
from revzoo.core.saved import SavedState, graph_is_kept, saving_for_replay
from revzoo.core.sums import plus
from revzoo.core.tensors import detached, versions_of, with_strides

LAZY_WARNING = (
    "lazy layers have no weights yet: until they do, steps that hold them keep their activations, "
    "as with memory='store'. If memory is short, call the model on a batch under torch.no_grad() "
    "first, and remove layers that no pass calls"
)


Run = Callable[[Step, State, Mapping[str, Any]], Any]

watcher: Callable[[Run, Step, State, Mapping[str, Any]], Any] | None = None
"""Runs each step in its mode, if set: ``watcher(run, step, state, context)``. For measurements."""


def run_inverting(
    step: Invertible, state: State, context: Mapping[str, Any], drift_limit: float | None
) -> Any:
    """Call ``step`` so that its backward pass recovers its input from its output."""
    if drift_limit is not None and capturing_cuda_graph():
        raise RuntimeError(
            f"{name_of(step)} runs while a CUDA graph is captured, but the guard reads its figures "
            "on the host after each backward pass: switch it off with "
            "revzoo.set_drift_limit(model, None), or use memory='store'"
        )
    members = Members.of(step)
    if members.lazy:
        warnings.warn(LAZY_WARNING, UserWarning, stacklevel=2)
        return call_on_grid(plain_call, step, state, context)
    tape = Tape.ending_with(state, step)
    tape.close()  # steps inside this one must not join this chain
    alone = runs_forward_alone(step)
    if alone and step.moves_values:
        return _moved(step, tape, members, state, context, drift_limit)
    entry = Entry(step, members, state, context, drift_limit, alone and step.adds)
    function = _Added if entry.adds else _Evaluated
    returned = function.apply(entry, tape, *state, *entry.arguments, *members.trained())
    outputs = (state[1], returned) if entry.adds else returned
    if any(entry.differs) and not any(t.requires_grad for t in as_state(outputs, step)):
        raise RuntimeError(
            f"{entry.name} uses parameters that are not its own, so no gradient would reach them: "
            "register their module as a submodule of the step, or pass them as keyword arguments"
        )
    tape.append(entry, outputs if entry.adds else streams_of(outputs, step))
    return outputs


def _moved(
    step: Invertible,
    tape: Tape,
    members: Members,
    state: State,
    context: Mapping[str, Any],
    drift_limit: float | None,
) -> Any:
    """Rule 7."""
    entry = Entry(step, members, state, context, drift_limit if step.guarded else None)
    entry.done = True
    entry.conditions.finish()
    returned = call_on_grid(plain_call, step, state, context)
    outputs = streams_of(returned, step)
    entry.streams = as_fixed([t.detach() for t in outputs])
    entry.observe(as_fixed(state))
    tape.append(entry, outputs)
    return returned


class Entry:
    """One executed step: what its replay needs, but no activation and no graph.

    Attributes:
        arguments: the keyword arguments' tensors that require gradient.
        streams: the output, until the tape takes it.
        differs: which of the tensors that the step returned depend on a tensor with gradient.
        done: whether its function has run backward, or there is none.
    """

    arguments: list[Tensor]
    streams: Streams = ()
    differs: Sequence[bool] = ()
    done = False
    function: Callable[[], Any] = staticmethod(lambda: None)
    index = -1
    saved: Sequence[Tensor] = ()
    trained: Sequence[Tensor] = ()
    _sum: Tensor | None = None
    samples: Sequence[Sample] = ()
    _fixed: Sequence[tuple[Scale, Tensor] | None] = ()

    def __init__(
        self,
        step: Invertible,
        members: Members,
        state: State,
        context: Mapping[str, Any],
        limit: float | None,
        adds: bool = False,
    ) -> None:
        self.step = step
        self.adds = adds and not step.extras
        self.limit = limit
        self.needs = [t.requires_grad for t in state]
        self.dtypes = [t.dtype for t in state]
        self.shapes = [t.shape for t in state]
        self.strides = [t.stride() if t.layout is torch.strided else () for t in state]
        self.conditions = Conditions(step, members, state)
        self.arguments = []
        self._given = context
        self._context: dict[str, Any] = {}
        for name, value in context.items():
            leaves, structure = tree_flatten(value)
            self.arguments += [t for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            self._context[name] = [Kept.of(t) for t in leaves], structure

    def context(self) -> tuple[dict[str, Any], list[Tensor]]:
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

    @property
    def name(self) -> str:
        """The step's path and type, for messages."""
        return name_of(self.step)

    @property
    def waits(self) -> bool:
        """Whether the graph may still run the function backward."""
        return not self.done and self.function() is not None

    # forward

    def evaluate(self, fn: Callable[..., Any], inputs: Sequence[Tensor]) -> Any:
        """``fn(*inputs, **context)`` in the forward pass, detached; without recording if it may."""
        members = self.conditions.members
        kinds = self.conditions.autocast
        if kinds:  # a cast that recorded nothing must not serve later code that records
            cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
        try:
            if members.quiet and self.adds and (members.walked or watcher is not None):
                return fn(*inputs, **self._given)
            # torch computes some layers by other kernels if nothing is recorded
            with torch.enable_grad(), saved_tensors_hooks(_forget, _refuse):
                start = torch._C._autograd._get_sequence_nr()
                needs = self.needs[-len(inputs) :]
                leaves = [_leaf(t, n) for t, n in zip(inputs, needs, strict=True)]
                values = fn(*leaves, **tree_map_only(Tensor, _like, self._given))
            self._refuse_graphs(values, start)
            members.walked = True
            found = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
            self.differs = [t.requires_grad for t in found]
            return tree_map_only(Tensor, Tensor.detach, values)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):
                raise
            raise RuntimeError(
                f"{self.name} changed its input stream in place: expected no change, since a "
                "replay would start from the changed values. Make the first operation of the "
                "branch out of place (inplace=False)"
            ) from error
        finally:
            self._given = {}  # the tape must not hold a graph
            if kinds:
                torch.set_autocast_cache_enabled(cached)

    def _refuse_graphs(self, values: Any, start: int) -> None:
        """Rule 3: raise if the step uses a tensor with a graph of its own, or leaves one behind."""
        roots = [t for t in tree_flatten(values)[0] if isinstance(t, Tensor)]
        for node in _nodes(roots):
            if node._sequence_nr() < start:
                raise RuntimeError(
                    f"{self.name} uses a tensor that was computed outside of it and requires "
                    f"gradient ({node.name()}); expected such tensors as keyword arguments, "
                    f"seq(x, name=tensor), which the branches receive. Or {self.step.remedy}"
                )
        for m in self.conditions.members.unknown(self.step):
            for name, v in vars(m).items():
                node = v.grad_fn if isinstance(v, Tensor) else None
                if node is not None and node._sequence_nr() >= start:
                    where = f"{type(m).__name__}.{name} of {self.name}"
                    with torch.enable_grad():
                        # depends on the parameters, so that autograd.grad() of them reaches it
                        leaf = v.detach().requires_grad_()
                        vars(m)[name] = _Refused.apply(where, leaf, *self.trained)

    # figures for the guard

    def observe(self, x: Streams) -> None:
        """Note a figure of the streams that the step changes, before it."""
        x = x[: len(x) - self.step.float_streams]  # sums, which no branch reads
        self._observed = len(x)
        # without the words
        self._fixed = [(t.scale, t.down) if isinstance(t, Fixed) else None for t in x]
        if self.limit is None:
            return
        if not any(type(t) is Fixed for t in self.streams):
            x = as_floats(x)  # the step loses the words
        elif fixed := [t for t in x if isinstance(t, Fixed)]:
            self._sum = words_sum(fixed)
        if self.step.guarded:
            self.samples = sample(x, self.streams)

    def compare(self, guard: Guard, computed: Streams, known: Streams) -> None:
        """Report the figures of a replay, which started from ``known``."""
        if self.limit is None:
            return
        if self._sum is not None:
            fixed = [t for t in computed[: self._observed] if isinstance(t, Fixed)]
            note_sums(self.step, self.name, self._sum, words_sum(fixed))
        if self.samples:
            half = torch.float16 in [*self.dtypes, *[d for _, d in self.conditions.autocast]]
            replayed = Replayed(self.step, self.name, self.limit, half, True)
            guard.compare(replayed, self.samples, computed, known)

    # the function

    def begin(self, ctx: Any, tape: Tape, others: Sequence[Tensor]) -> None:
        """The function's forward begins; ``others`` are its inputs after the streams."""
        ctx.set_materialize_grads(False)
        ctx.entry, ctx.tape = self, tape
        self.function = weakref.ref(ctx)
        self.trained = others[len(self.arguments) :]
        self.arguments = []  # they may hold this chain's graph

    def add(self, x: Tensor, z: Tensor) -> Tensor:
        """``x + F(z)``, and the streams after it."""
        step: Any = self.step
        value = step.checked_value(self.evaluate(step.branch, (z,)), x)
        fixed = fixed_of(x) if step.grid is not None and keeps_words() else None
        if fixed is None:
            y = x + step.fitting(value, x)
            self.streams = (fixed_of(z) or z.detach(), y.detach())
            before: Tensor | Fixed = x.detach()
        else:
            y, words = plus(fixed, value, x.dtype, step)
            self.streams = (fixed_of(z) or z.detach(), words)
            before = fixed
        self.observe((before,))
        self.conditions.finish()
        return y

    def call(self, state: State) -> Any:
        """The step's outputs, and the streams after it."""
        saved: list[Tensor] = []
        step = self.step

        def called(*state: Tensor, **context: Any) -> Any:
            with saving_for_replay(saved):
                return call_on_grid(call_without_changing_hooks, step, state, context)

        outputs = self.evaluate(called, state)
        self.saved = saved
        self.streams = as_fixed([t.detach() for t in streams_of(outputs, step)])
        self.observe(as_fixed(state))
        self.conditions.finish()
        return outputs

    # backward

    def undo(self, outputs: Streams) -> Streams:
        """The step's inputs, without gradients."""
        return self.replayed(outputs, Recorder(self, records=False, adds=self.adds))[0]

    def replayed(self, outputs: Streams, record: Recorder) -> tuple[Streams, Sequence[Any]]:
        """The step's inputs, and its outputs, recorded again."""
        step, held = self.step, () if self.adds else backing_tensors(outputs)
        versions = versions_of(held)
        context, record.arguments = self.context()
        undo = self.conditions.enter()
        try:
            # unknown code records, also where no gradient is wanted: the same kernels as in forward
            quiet = self.conditions.members.quiet and not record.records
            with torch.set_grad_enabled(not quiet), within(step):
                takes = outputs if self._takes_words else as_floats(outputs)
                inputs, recorded = step.replay(takes, record, context)
        finally:
            leave(undo)
        if not self.adds:  # whose inverse is ours
            refuse_changed_outputs(step, held, versions)
            self._check_streams(inputs)
            inputs = as_fixed(inputs)
        for t, known in zip(inputs, self._fixed, strict=False):
            if known is not None and isinstance(t, Fixed):
                t.scale, t.down = known
        return tuple(map(_with_strides, inputs, self.strides)), recorded

    def _check_streams(self, inputs: Sequence[Any]) -> None:
        """Raise a ValueError unless the inverse returned streams as the forward pass took them."""
        check_stream_count(self.step, inputs, len(self.needs))
        if (shapes := [t.shape for t in inputs]) != self.shapes:
            got, expected = ([tuple(s) for s in each] for each in (shapes, self.shapes))
            raise ValueError(
                f"the inverse of {self.name} returned streams of shape {got}, expected {expected}, "
                "the shapes that its forward took"
            )

    @property
    def _takes_words(self) -> bool:
        step = self.step
        return step.adds or step.needs_words or type(step).replay is Invertible.replay


def _forget(_: Tensor) -> None:
    return None


def _refuse(_: None) -> Tensor:
    raise RuntimeError(
        "a gradient reached a tensor of a step's forward pass, which has no graph in this memory "
        "mode: return a tensor that a loss needs from the branch, and set the step's extras. For a "
        "step that differentiates inside its forward, use memory='store'"
    )


class Recorder:
    """Leaves and graph of one replay; an argument of :meth:`Invertible.replay`.

    Attributes:
        records: whether gradients are wanted; if not, ``replay`` need not return outputs.
        adds: whether only the branch's value is wanted, of a step that ``adds``.
        saved: what the step saved in its forward pass by ``save_for_replay``.
    """

    def __init__(self, entry: Entry, *, records: bool, adds: bool = False) -> None:
        self._entry = entry
        self.records = records
        self.adds = adds
        self.needs = entry.needs
        self.saved = entry.saved
        self.leaves: list[Tensor | None] = [None] * len(entry.needs)
        self.arguments: list[Tensor] = []

    def leaf(self, i: int, t: Tensor | Fixed) -> Tensor:
        """Stream ``i`` of the step's input in floating point, where the recorded graph ends."""
        t = _with_strides(t, self._entry.strides[i])
        leaf = t.read() if isinstance(t, Fixed) else t.detach()
        if isinstance(t, Fixed) and not (self.adds and self._entry.conditions.members.quiet):
            leaf = read_with_words(t)  # as in the forward pass: steps inside may go on with them
        self.leaves[i] = leaf = leaf.requires_grad_(self._entry.needs[i] and self.records)
        return leaf

    def inverted(
        self, inverse: Callable[..., Any], outputs: Streams, context: Mapping[str, Any]
    ) -> Streams:
        """``inverse(*outputs, **context)`` without recording, with the carried buffers."""
        step = self._entry.step
        undo = self._entry.conditions.enter(inverting=True)
        try:
            with torch.no_grad():
                if step.moves_values and all(isinstance(t, Fixed) for t in outputs):
                    fixed = tuple(t for t in outputs if isinstance(t, Fixed))
                    return apply_to_words(
                        lambda *s: inverse(*s, **context), fixed, self._entry.dtypes
                    )
                returned = inverse(*as_floats(outputs), **context)
                return as_fixed(as_state(returned, step, inverse=True))
        finally:
            leave(undo)

    def gradients(
        self,
        roots: Sequence[Any],
        grads: Sequence[Tensor | None],
        needs: Sequence[bool],
        first: int,
    ) -> list[Tensor | None]:
        """The gradients of the function's inputs from stream ``first`` on; ``needs``: which."""
        entry = self._entry
        inputs = [*self.leaves[first:], *self.arguments, *entry.trained]
        wanted = [t if n else None for t, n in zip(inputs, needs, strict=True)]
        targets = [t for t in wanted if t is not None]
        known = zip(roots, grads, strict=True)
        pairs = [(r, g) for r, g in known if g is not None and _derivable(r)]
        if not pairs or not targets:
            return [None] * len(needs)
        found = iter(self._derive([r for r, _ in pairs], [g for _, g in pairs], targets))
        return [None if t is None else next(found) for t in wanted]

    def _derive(
        self, roots: list[Any], grads: list[Tensor], targets: list[Tensor]
    ) -> Sequence[Tensor | None]:
        nodes: list[Any] = []
        if not self._entry.conditions.members.quiet:
            wanted = {id(t) for t in (*self.leaves, *self.arguments, *self._entry.trained)}
            leaves = [node for node in _nodes(roots) if hasattr(node, "variable")]
            nodes = [node for node in leaves if id(node.variable) not in wanted]
        every = [*targets, *(node.variable for node in nodes)]
        # the hooks of these tensors run where their gradient arrives, not here, too
        hooked = [(t, t._backward_hooks) for t in every if t._backward_hooks]
        for t, _ in hooked:
            t._backward_hooks = None
        try:
            found = _derivatives(roots, every, grads)
        finally:
            for t, hooks in hooked:
                t._backward_hooks = hooks
        for node, g in zip(nodes, found[len(targets) :], strict=True):
            if g is not None:  # rule 3: into its own accumulate node, where hooks of FSDP wait
                torch.autograd.backward([GradientEdge(node, 0)], [g])
        return found[: len(targets)]


def _derivatives(
    roots: Sequence[Any], targets: Sequence[Tensor], grads: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    """``torch.autograd.grad(roots, targets, grads, allow_unused=True)``, without its checks."""
    run = Variable._execution_engine.run_backward
    # positional in torch: keep the graph, create a graph, inputs, allow unused
    return run(
        tuple(roots), tuple(grads), False, False, tuple(targets), True, accumulate_grad=False
    )


def _derivable(root: Tensor | GradientEdge | None) -> bool:
    return root is not None and (isinstance(root, GradientEdge) or root.requires_grad)


def _nodes(roots: Sequence[Tensor | GradientEdge]) -> list[Any]:
    """The nodes of the graph behind ``roots``."""
    behind = (r.node if isinstance(r, GradientEdge) else r.grad_fn for r in roots)
    waiting = [node for node in behind if node is not None]
    seen: dict[Any, None] = {}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting += [n for n, _ in node.next_functions if n is not None]
    return list(seen)


def _leaf(t: Tensor, needs: bool) -> Tensor:
    return detached(t).requires_grad_(needs)


def _like(t: Tensor) -> Tensor:
    return _leaf(t, t.requires_grad)


def _with_strides(t: Tensor | Fixed, stride: tuple[int, ...]) -> Tensor | Fixed:
    """``t`` with the strides of the forward pass, see :mod:`revzoo.core.tensors`."""
    held = t.words if isinstance(t, Fixed) else t
    if held.stride() == stride or held.dim() != len(stride):  # a wrong inverse: a check raises
        return t
    if isinstance(t, Fixed):
        return t.with_words(with_strides(held, stride))
    return apply_with_words(lambda x: with_strides(x, stride), (t,))[0]


class _Added(torch.autograd.Function):
    """``x + F(z)``: the coupling whose gradients need no graph of the sum."""

    @staticmethod
    def forward(
        ctx: Any, entry: Entry, tape: Tape, x: Tensor, z: Tensor, *others: Tensor
    ) -> Tensor:
        entry.begin(ctx, tape, others)
        return entry.add(x, z)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Any, ...]:
        needs: tuple[bool, ...] = ctx.needs_input_grad[2:]
        nothing = [None] * len(needs)
        if grad is None:
            return None, None, *nothing
        (value,), record = ctx.tape.replay(ctx.entry, records=any(needs[1:]))
        rest = record.gradients((value,), (grad,), needs[1:], 1) if record.records else nothing[1:]
        return None, None, grad if needs[0] else None, *rest


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


class _Evaluated(torch.autograd.Function):
    """Any invertible step."""

    @staticmethod
    def forward(ctx: Any, entry: Entry, tape: Tape, *inputs: Tensor) -> Any:
        n = len(entry.needs)
        entry.begin(ctx, tape, inputs[n:])
        outputs = entry.call(inputs[:n])
        flat = (outputs,) if isinstance(outputs, Tensor) else outputs
        ctx.mark_non_differentiable(*(t for t, d in zip(flat, entry.differs, strict=True) if not d))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        needs: tuple[bool, ...] = ctx.needs_input_grad[2:]
        if all(g is None for g in grads):
            return None, None, *[None] * len(needs)
        outputs, record = ctx.tape.replay(ctx.entry, records=True)
        return None, None, *record.gradients(outputs, grads, needs, 0)


class Tape:
    """A chain of executed steps and one known state (NOTE [ The tape ])."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._position = 0
        self._has_words = False
        self._known: SavedState | None = None
        self._returned: list[weakref.ref[Tensor]] = []  # the known state as the step returned it
        self._marks: tuple[list[int], list[bool]] = [], []
        self._cursor: tuple[int, Streams] | None = None  # rule 5
        self._guard = Guard()

    @staticmethod
    def ending_with(state: State, step: Step) -> Tape:
        """The tape that ends with ``state``, or a new one (NOTE [ Chains joined by hand ])."""
        tape = _open_tapes.get(id(state[-1]))
        # ids are reused: _knows() compares the objects. The inverse of a floating-point step would
        # recover the words of fixed-point streams only approximately
        if tape is None or not tape._knows(state) or (step.grid is None and tape._has_words):
            return Tape()
        return tape

    def append(self, entry: Entry, outputs: State) -> None:
        """Add an executed step, whose ``outputs`` become the known state."""
        entry.index = len(self.entries)
        self.entries.append(entry)
        self._has_words = Fixed in map(type, entry.streams)
        self._known, entry.streams = SavedState(entry.streams), ()
        # marks of the returned tensors: the caller can change those, but not the words
        self._marks = _marks_of(outputs)
        self._position = len(self.entries)
        self._returned = [weakref.ref(t) for t in outputs]
        # keys of freed tensors stay until the tape is freed; ending_with() compares the tensors
        _open_tapes[id(outputs[-1])] = self

    def close(self) -> None:
        """Prevent other steps from joining until the next one is appended."""
        self._returned = []

    def _knows(self, state: State) -> bool:
        return (
            len(state) == len(self._returned)
            and all(ref() is t for t, ref in zip(state, self._returned, strict=True))
            and _marks_of(state) == self._marks
        )

    def replay(self, entry: Entry, *, records: bool) -> tuple[Sequence[Any], Recorder]:
        """The package's backward rule: invert the step, and record it again.

        Returns:
            The recorded outputs, and the recorder, which derives the gradients.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                f"{entry.name} got create_graph=True in memory mode {entry.step.memory!r}, which "
                "computes first derivatives only. For second derivatives, use "
                "revzoo.set_memory(model, 'recompute') or 'store'"
            )
        if profiler._is_profiler_enabled:
            with profiler.record_function(f"revzoo.replay {entry.name}"):
                return self._replay(entry, records)
        return self._replay(entry, records)

    def _replay(self, entry: Entry, records: bool) -> tuple[Sequence[Any], Recorder]:
        index: int = entry.index
        state = self._walk_to(index + 1)
        record = Recorder(entry, records=records, adds=entry.adds)
        inputs, outputs = entry.replayed(state, record)
        if entry.limit is not None:
            for t in (*state, *inputs):
                if isinstance(t, Fixed):
                    note_scale(t.scale, entry.step)
            entry.compare(self._guard, inputs, state)
            if records:
                self._guard.note_uses([t for t in record.leaves if t is not None], inputs)
        entry.done = not graph_is_kept()
        self._move_to(index, inputs)
        return outputs, record

    def _walk_to(self, position: int) -> Streams:
        """The state after ``position`` steps; cuts the tape or moves the cursor there."""
        at, state = self._nearest(position)
        if any(e.limit is not None for e in self.entries[position - 1 : at]):
            self._guard.begin(state)
        if at > position:
            while at > position:
                at -= 1
                entry = self.entries[at]
                known, state = state, entry.undo(state)
                entry.compare(self._guard, state, known)
            self._move_to(position, state)  # frees the later state before memory peaks
        return state

    def _nearest(self, position: int) -> tuple[int, Streams]:
        if self._cursor is not None and self._cursor[0] >= position:
            return self._cursor
        if self._known is None or position > self._position:
            raise RuntimeError(
                "trying to backward through the graph a second time, but the first pass freed the "
                "tape of its steps: pass retain_graph=True to the first backward pass"
            )
        return self._position, self._known.state(self.entries[-1].name)

    def _move_to(self, index: int, state: Streams) -> None:
        """Continue from ``state``, the input of entry ``index``: cut (rule 4) or keep (rule 5)."""
        if not (graph_is_kept() or any(e.waits for e in self.entries[index:])):
            for entry in self.entries[index:]:
                entry.samples = ()  # the graph holds the entry
            del self.entries[index:]
            self.close()
            # the loss keeps the graph, and so this tape, until the whole backward pass is done
            self._known = SavedState(state) if any(e.waits for e in self.entries) else None
            self._position, self._cursor = index, None
        elif any(e.waits for e in self.entries[:index]):
            self._cursor = index, state
        else:  # the end of the walk
            self._cursor = None


_open_tapes: weakref.WeakValueDictionary[int, Tape] = weakref.WeakValueDictionary()


def _marks_of(state: State) -> tuple[list[int], list[bool]]:
    # requires_grad, too: detach_() takes a tensor out of the graph without a new version
    return versions_of(state), [t.requires_grad for t in state]
