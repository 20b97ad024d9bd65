"""Follows every tensor of a training step: its lifetime, its maker, and who keeps it.

The step runs for real, or on fake tensors, which have shapes but no data: their operators compute
and allocate nothing. The same code, ours and autograd's, decides which tensors are kept, so both
give the same count.

Why not ``torch.distributed._tools.mem_tracker.MemTracker``: it is private, it keeps snapshots per
module instead of a row per tensor, and it does not know that our steps run again in the backward
pass. Its peak is the same (``tests/profiling/test_audit.py`` compares the two).

NOTE [ Who made a tensor ]
    In the forward pass and in a replay: the innermost running module of the model. Sequences and
    modules that the pass creates do not count. In the backward pass: the module whose forward pass
    recorded the running node. Autograd numbers nodes in order of creation, so the nodes of a module
    have the numbers between its start and its end. An inverting mode records one node for a step,
    and a small graph in its replay, whose backward pass runs inside that node.

NOTE [ Links of a trace ]
    The forward pass is a row of links: the operators before step 0, step 0, the operators between
    steps 0 and 1, step 1, and so on, to the operators after the last step. So step ``i`` is link
    ``2 * i + 1``. A node, and the operators of its backward pass, belong to the link that recorded
    it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import random
import threading
import weakref
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakTensorKeyDictionary

from revzoo._checks import check_module, counts_of, shortened
from revzoo.core import tape
from revzoo.core.conditions import Members
from revzoo.core.fixedpoint.words import fixed_of
from revzoo.core.invertible import Step, is_container
from revzoo.core.modes import DEVICE_MODES, MODES, effective_mode, mode_of
from revzoo.core.tensors import has_values
from revzoo.layers.sequence import ReversibleSequence
from revzoo.profiling.costs import default_loss
from revzoo.profiling.live import LiveMemory, operands
from revzoo.profiling.stages import OUTSIDE, stages_of
from revzoo.profiling.units import bytes_from
from revzoo.profiling.workspaces import is_unsized, sized

_Module: Any = nn.Module
_calls = threading.RLock()  # held while a trace watches the calls of modules


@dataclass(slots=True)
class Allocation:
    """A storage, its maker and its lifetime.

    Attributes:
        size: bytes.
        kind: ``parameter``, ``buffer`` (or another attribute of a module), ``gradient``,
            ``optimiser``, ``input``, ``kept`` (an activation that outlives the forward pass) or
            ``temporary``.
        module: path of the module that made it; empty for the model itself and the loss.
        stage: the model's part that made it, such as ``stem`` or ``stages.1``.
        operation: the operator that made it.
        shape: of the first tensor in it.
        dtype: of that tensor.
        born: index of the operator in the step.
        died: index of the first operator after its end; None if it outlives the step.
        saved: number of tensors in it that autograd saved.
        savers: the links whose forward pass saved one (NOTE [ Links of a trace ]).
    """

    size: int
    kind: str
    module: str
    stage: str
    operation: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    born: int
    died: int | None = None
    saved: int = 0
    savers: set[int] = field(default_factory=set)

    def alive(self, at: int) -> bool:
        """Whether it exists while operator ``at`` runs."""
        return self.born <= at and (self.died is None or self.died > at)


class Layout(NamedTuple):
    """A tensor's shape, strides and dtype, and whether it requires gradient."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs: bool

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        """The layout of ``t``."""
        return cls(t.shape, t.stride(), t.dtype, t.requires_grad)


@dataclass(slots=True)
class StepCall:
    """A step of a chain as the forward pass called it.

    Attributes:
        name: its path in the model.
        mode: the memory mode in which it runs.
        layout: of each input stream.
        context: the keyword arguments, with a :class:`Layout` in place of each tensor.
        inputs: storages of the input streams, in order; two streams may share one.
        outputs: storages of the output streams, likewise.
        words: storages of the words of fixed-point streams, by the id of the stream's storage.
        start: index of the first operator of its forward pass.
        end: index after its last operator.
    """

    name: str
    mode: str
    start: int
    layout: tuple[Layout, ...]
    context: dict[str, Any]
    inputs: list[Allocation]
    outputs: list[Allocation] = field(default_factory=list)
    words: dict[int, Allocation] = field(default_factory=dict)
    end: int = -1

    @property
    def inverted(self) -> bool:
        """Whether the backward pass inverts it."""
        return mode_of(self.mode).inverts


class Trace(LiveMemory):  # type: ignore[no-untyped-call]
    """Follows one training step of ``model`` (see :func:`trace_step`).

    Attributes:
        allocations: in order of creation.
        calls: the steps of the forward pass, without steps inside other steps.
        levels: bytes alive after each operator.
        owners: for each operator, its link (NOTE [ Links of a trace ]).
        costs: nanoseconds of each operator, see :func:`nominal_cost`.
        turn: index of the first operator of the backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.allocations: list[Allocation] = []
        self.calls: list[StepCall] = []
        self.levels: list[int] = []
        self.owners: list[int] = []
        self.costs: list[int] = []
        self.turn = 0
        # modules by operator and error; a dictionary, as a set has no order for the message
        self._unsized: dict[tuple[str, str], dict[str, None]] = {}
        self._alive: dict[int, Allocation] = {}  # by address of the storage
        paths = {m: path for path, m in model.named_modules()}
        self._stages = {"": OUTSIDE, **stages_of([*filter(None, paths.values())])}
        self._names = {
            id(m): path for m, path in paths.items() if not isinstance(m, ReversibleSequence)
        }
        # stacks: running modules by path, and the index in `calls` of their step (-1: none)
        self._modules: list[str] = [""]
        self._current: list[int] = [-1]
        self._tapes = False  # whether the running step is inverted
        # A place is (module, link). The nodes of _places[k] have the numbers from _numbers[k] to
        # _numbers[k + 1].
        self._numbers: list[int] = [0]
        self._places: list[tuple[str, int]] = [("", 0)]
        self._node = ("", 0)  # the place whose node runs, in the backward pass
        self._task: int | None = None  # the backward pass
        self._outer = torch._C._current_autograd_node()  # if a backward hook counts a step
        self._place = ("", 0)  # the place of the running operator
        self._operation = ""
        self._call: Any = None  # what a call of a module runs without the trace
        self._learned = {id(p) for p in model.parameters()}
        # leaves that the forward pass reads from elsewhere, and their gradients
        self._outside: MutableMapping[Tensor, Tensor | None] = WeakTensorKeyDictionary()

    def register(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Set the kind of the tensors that exist before the step, and count them."""
        for t in tensors:
            self.allocation_of(t).kind = kind

    def allocation_of(self, t: Tensor) -> Allocation:
        """The entry of the tensor's storage."""
        self._count(t)
        return self._alive[t.untyped_storage()._cdata]

    @property
    def base(self) -> int:
        """Bytes alive before the step."""
        fixed = ("parameter", "buffer", "gradient", "input")
        return sum(allocation.size for allocation in self.allocations if allocation.kind in fixed)

    @property
    def uncounted(self) -> list[str]:
        """The users of memory that is not counted, and why."""
        return [
            f"the workspace of {operation} in {shortened(modules, 3)}, whose size only a real step "
            f"knows ({reason})"
            for (operation, reason), modules in self._unsized.items()
        ]

    @property
    def tick(self) -> int:
        """Number of operators so far."""
        return len(self.levels)

    def __enter__(self) -> Trace:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if id(module) not in self._names:
                return self._call(module, *args, **kwargs)
            self._enter_module(module, args, kwargs)
            outputs = None
            try:
                outputs = self._call(module, *args, **kwargs)
            finally:  # torch's checkpoint stops a replay early by an exception
                self._leave_module(outputs)
            return outputs

        # not hooks: hooked layers keep more (revzoo.models.components.lean); and not __call__: its
        # identity tells which steps are containers
        _calls.acquire()
        self._call = _Module._call_impl
        _Module._call_impl = call
        tape.watcher = self._run_step
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        _Module._call_impl = self._call
        tape.watcher = None
        _calls.release()
        for t, gradient in self._outside.items():
            t.grad = gradient

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator and record its outputs."""
        if func.namespace == "prim":  # asks a fake tensor for its device
            return func(*args, **kwargs or {})
        self._set_gradients_aside((args, kwargs))
        # before the operator runs: _count, called inside, reads both
        self._operation, self._place = func.overloadpacket.__name__, self._where()
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        for t in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            if isinstance(t, Tensor) and t.layout is not torch.strided:
                module = f"module {self._place[0]!r}" if self._place[0] else "the model's forward"
                raise ValueError(not_dense(f"a tensor that {self._operation} makes in {module}", t))
        self.owners.append(self._place[1])
        self.levels.append(self.now)
        self.costs.append(nominal_cost(func, args, kwargs or {}, outputs))
        return outputs

    def _set_gradients_aside(self, tree: Any) -> None:
        """Take the gradients of foreign leaves in ``tree``, until the step ends.

        A forward pass may read parameters through a closure, which a model shares with its copy.
        They would keep the gradients of the counted step, even fake ones.
        """
        for t in operands(tree):
            if not t.requires_grad or id(t) in self._learned:
                continue
            # is_leaf of a view may raise, if its base changed in place
            if not t._is_view() and t.is_leaf and t not in self._outside:
                self._outside[t] = t.grad
                t.grad = None

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        outputs = func(*args, **kwargs)
        if not is_unsized(func, outputs):
            return outputs
        try:
            return sized(func, args, kwargs, outputs)
        except Exception as error:  # such as a missing device, or no memory
            key = self._operation, str(error).partition("\n")[0]
            self._unsized.setdefault(key, {})[self._place[0] or "the model"] = None
            return outputs

    def _running_node(self) -> Any:
        """The node that runs in the backward pass of the step; None in its forward pass."""
        node = torch._C._current_autograd_node()
        return None if node is self._outer else node

    def _where(self) -> tuple[str, int]:
        """Module and link of the running operator (NOTE [ Who made a tensor ])."""
        node = self._running_node()
        if node is None:
            return self._modules[-1], self._link()
        number = node._sequence_nr()
        task = torch._C._current_graph_task_id()
        if self._task is None and self.turn:
            self._task = task
        # a replay's own backward pass belongs to the node that replays; the accumulation of a
        # gradient, which has no number, to the node before
        if self._task in (None, task) and number < 2**63:
            self._node = self._places[bisect.bisect_right(self._numbers, number) - 1]
        replayed = self._modules[-1]
        return replayed or self._node[0], self._node[1]

    def _link(self) -> int:
        """The link that the forward pass runs (NOTE [ Links of a trace ])."""
        index = self._current[-1]
        return 2 * len(self.calls) if index < 0 else 2 * index + 1

    def _count(self, t: Tensor) -> None:
        storage = t.untyped_storage()
        if storage in self._seen:
            return
        super()._count(t)
        module, _ = self._place
        allocation = Allocation(
            size=storage.nbytes(),
            kind="temporary",
            module=module,
            stage=self._stages[module],
            operation=self._operation,
            shape=tuple(t.shape),
            dtype=t.dtype,
            born=self.tick,
        )
        self.allocations.append(allocation)
        self._alive[storage._cdata] = allocation
        # a reference from here would keep the storage alive
        weakref.finalize(storage, self._bury, storage._cdata, allocation)

    def _bury(self, key: int, allocation: Allocation) -> None:
        allocation.died = self.tick
        # a new storage may have the address of the old one by now
        if self._alive.get(key) is allocation:
            del self._alive[key]

    def _note_words(self, call: StepCall, state: Iterable[Tensor]) -> None:
        for t in state:
            if (fixed := fixed_of(t)) is not None:
                call.words[id(self.allocation_of(t))] = self.allocation_of(fixed.words)

    def _run_step(self, run: tape.Run, step: Step, state: Any, context: Any) -> Any:
        """Run a step in its mode, which may not call the module, and keeps tensors beside it."""
        outer, self._tapes = self._tapes, mode_of(effective_mode(step)).inverts
        named = id(step) in self._names
        outputs = None
        if named:
            self._enter_module(step, state, context)
        try:
            outputs = run(step, state, context)
        finally:
            self._tapes = outer
            if named:
                self._leave_module(outputs)
        return outputs

    def _enter_module(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        name = self._names[id(module)]
        self._modules.append(name)
        # nodes and steps are counted in the forward pass only
        if self._running_node() is not None:
            return
        # only the outermost step counts: steps inside a branch belong to it
        index = self._current[-1]
        if index < 0 and isinstance(module, Step) and not is_container(module):
            state = [t for t in args if isinstance(t, Tensor)]
            layout = tuple(map(Layout.of, state))
            # without the tensors: a reference from here would keep them alive
            context = tree_map_only(Tensor, Layout.of, kwargs)
            streams = [self.allocation_of(t) for t in state]
            mode = effective_mode(module)
            self.calls.append(StepCall(name, mode, self.tick, layout, context, streams))
            self._note_words(self.calls[-1], state)
            index = len(self.calls) - 1
        self._current.append(index)
        self._mark()

    def _leave_module(self, outputs: Any) -> None:
        self._modules.pop()
        if self._running_node() is not None:
            return
        index = self._current.pop()
        if index >= 0 and self._current[-1] < 0:  # the outermost step ends
            call = self.calls[index]
            streams = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
            tensors = [t for t in streams if isinstance(t, Tensor)]
            call.outputs = [self.allocation_of(t) for t in tensors]
            self._note_words(call, tensors)
            call.end = self.tick
        self._mark()

    def _mark(self) -> None:
        """From the next node on, nodes belong to the innermost running module."""
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._places.append((self._modules[-1], self._link()))

    def turn_back(self) -> None:
        """End the forward pass: its live tensors are kept for the backward pass."""
        self.turn = self.tick
        for allocation in self._alive.values():
            if allocation.kind == "temporary":
                allocation.kind = "kept"

    def pack(self, t: Tensor) -> Tensor:
        """Record that autograd saves ``t``; the pack hook of the forward pass."""
        allocation = self.allocation_of(t)
        if not self._tapes:  # a tape lets go of each state for the next one
            allocation.saved += 1
            allocation.savers.add(self._link())
        # detached: an output saved by its own node would keep that node alive
        return t if t.is_leaf else t.detach()


# A processor that does 10 floating-point operations while it moves a byte (true of most CPUs and
# GPUs within a factor of three) and needs 5 microseconds to start an operator.
_FLOPS, _BYTES, _START = 100e9, 10e9, 5e-6


def nominal_cost(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> int:
    """Nanoseconds of an operator on a nominal processor, from its FLOPs and the bytes it moves.

    Good for comparing steps, equal on every machine, and independent of data.
    """
    tensors = operands((args, kwargs, outputs))
    if func.is_view or not tensors:  # a view moves no data
        return 0
    moved = sum(t.nbytes for t in tensors)
    counter = flop_registry.get(func.overloadpacket)
    flops = counter(*args, **kwargs, out_val=outputs) if counter is not None else 0
    return int(1e9 * (flops / _FLOPS + moved / _BYTES + _START))


def trace_step(model: nn.Module, images: Tensor) -> Trace:
    """Run one training step of ``model`` on ``images`` and follow its tensors.

    Gradients exist from the start, as in gradient accumulation and in Lightning's loop, which drops
    them after the forward pass. Changes ``model``: pass a copy.

    Args:
        model: real, or fake (see :func:`~revzoo.profiling.twins.fake_twin`).
        images: its input; fake ones for a fake model.

    Raises:
        ValueError: no parameter requires gradient.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    if not trained:
        raise ValueError(
            f"{type(model).__name__} has no parameter that requires gradient, so no training step: "
            "unfreeze some"
        )
    mode = images.fake_mode if isinstance(images, FakeTensor) else contextlib.nullcontext()
    trace = Trace(model)
    with mode:
        for p in trained:
            # otherwise gradients would count as made by the backward pass
            p.grad = torch.zeros_like(p)
        held = (tree_iter(vars(module)) for module in model.modules())
        tensors = (t for t in itertools.chain.from_iterable(held) if isinstance(t, Tensor))
        trace.register(tensors, "buffer")  # with plain attributes
        trace.register(model.parameters(), "parameter")
        trace.register((p.grad for p in trained if p.grad is not None), "gradient")
        trace.register([images], "input")
        with trace, _explained(model):
            with saved_tensors_hooks(trace.pack, lambda t: t):
                loss = default_loss(_called(model, images))
            # training leaves the autocast context here, which frees the cast weights
            torch.clear_autocast_cache()
            trace.turn_back()
            torch.autograd.backward(loss)
    return trace


def _called(model: nn.Module, images: Tensor) -> Any:
    try:
        return model(images)
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise
    except Exception as error:  # a user's model may fail in any way
        error.add_note(
            f"Audits and plans call {type(model).__name__} with input_shape only, here with one "
            f"random {images.dtype} tensor of shape {tuple(images.shape)}: expected a model that "
            "takes it. Wrap a model with other inputs, such as integers, in a module that makes "
            "them from such a tensor. A forward pass that reads values, as numpy() does, needs "
            "audit(real=True)"
        )
        raise


@contextlib.contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Turn the errors of fake tensors into a ValueError that names the cause."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the forward pass of {type(model).__name__} reads values ({error}), which fake "
            "tensors lack: expected one that depends only on shapes. Use audit(real=True), and "
            "set the memory modes by hand instead of planning them. An ActNorm reads "
            "values in its first pass only: run that pass before planning"
        ) from error


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run under the conditions of a plain training step, then undo its effects.

    It affects the random states, and tensors that a copy shares with the model.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # a forward pass may use them
    # a copy of the model shares the objects that its functions hold in closures and globals
    shared = _reached_leaves(model)
    gradients = [t.grad for t in shared]
    changing = [t for t in shared if not isinstance(t, nn.Parameter) and has_values(t)]
    values = [t.detach().clone() for t in changing]
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        # it reads the values of gradients, which fake tensors lack
        torch.autograd.set_detect_anomaly(False),
        torch.random.fork_rng(devices, device_type="cuda"),
    ):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            for t, gradient in zip(shared, gradients, strict=True):
                t.grad = gradient
            for t, value in zip(changing, values, strict=True):
                if not torch.equal(t, value):
                    t.detach().copy_(value)


def _reached_leaves(model: nn.Module) -> list[Tensor]:
    """The leaf tensors that the model and its functions hold."""
    members = Members.of_function(model)
    found = [table[name] for table, name in (*members.parameters, *members.buffers)]
    found += [t for m in members.norms for t in m.buffers()]
    found += members.tensors
    leaves = (t for t in found if isinstance(t, Tensor) and t.is_leaf and not is_lazy(t))
    return list({id(t): t for t in leaves}.values())


def modes_on(devices: Iterable[torch.device]) -> list[str]:
    """The memory modes worth comparing on these devices.

    On the CPU, ``offload`` would move activations from host memory to host memory.
    """
    on_host = all(device.type in ("cpu", "meta") for device in devices)
    return list(DEVICE_MODES if on_host else MODES)


def checked_arguments(model: Any, input_shape: Any, extra: Any) -> tuple[tuple[int, ...], int]:
    """The shape of the input as a tuple, and the number of extra bytes.

    Raises:
        TypeError: the model is not a module, or is TorchScript; the shape is the input itself.
        ValueError: the shape is not a sequence of positive integers; ``extra`` is not a number of
            bytes; the model has a lazy layer or a sparse tensor.
    """
    check_module("model", model)
    _check_countable(model)
    return checked_shape(input_shape), bytes_from(extra, name="extra", least=0)


def _check_countable(model: nn.Module) -> None:
    for path, module in model.named_modules():
        name = f"the module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{name} is TorchScript ({type(module).__name__}), whose tensors cannot be "
                "followed: expected the nn.Module that it was compiled from"
            )
        held = {**module._parameters, **module._buffers, **vars(module)}
        tensors = [(k, t) for k, v in held.items() for t in tree_iter(v) if isinstance(t, Tensor)]
        for key, t in tensors:
            if is_lazy(t):
                raise ValueError(
                    f"{name} is a {type(module).__name__} without weights: expected layers that "
                    "are initialised. Call the model once on a batch, under torch.no_grad()"
                )
            if t.layout is not torch.strided:
                raise ValueError(not_dense(f"{key!r} of {name}", t))


def uncounted_in(model: nn.Module) -> Iterator[str]:
    """The users of memory in a training step of ``model`` that audits and plans do not count."""
    compiled = [
        path or "the model"
        for path, module in model.named_modules()
        # torch.compile(module) wraps it, module.compile() sets the attribute
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None
    ]
    if compiled:
        yield f"the effect of torch.compile on {shortened(compiled)}: the eager step is counted"
    others = [
        f"{path} ({type(p).__name__})"
        for path, p in model.named_parameters()
        if is_traceable_wrapper_subclass(p)
    ]
    if others:
        yield f"the true size of {shortened(others)}: dense tensors of their shapes are counted"


def not_dense(name: str, t: Tensor) -> str:
    """The message about a tensor that is sparse or nested."""
    return (
        f"{name} has the layout {t.layout}: audits and plans count dense tensors, torch.strided. "
        "Make it dense, as with nn.Embedding(..., sparse=False) or to_dense(); or measure a real "
        "step within revzoo.profiling.live.LiveMemory(), which counts it"
    )


def checked_shape(shape: Any) -> tuple[int, ...]:
    """The shape of an input as a tuple.

    Raises:
        TypeError: it is the input itself.
        ValueError: it is not a sequence of positive integers.
    """
    if isinstance(shape, Tensor):
        raise TypeError(f"input_shape is a tensor: give its shape, {tuple(shape.shape)}")
    sizes = counts_of(shape, repeat=0)
    if not sizes:
        raise ValueError(
            f"input_shape={shape!r}: expected positive whole numbers, the batch first, such as "
            "(64, 3, 32, 32)"
        )
    return sizes
