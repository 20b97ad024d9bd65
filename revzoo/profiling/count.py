"""Counts one training step: every tensor's lifetime, its maker, and who keeps it.

The step runs for real, or on fake tensors, which have shapes but no data: their operators compute
and allocate nothing. The same code, ours and autograd's, decides which tensors are kept, so both
give the same count.

Why not ``torch.distributed._tools.mem_tracker.MemTracker``: it is private, it keeps snapshots per
module instead of a row per tensor, and it does not know that our steps run again in the backward
pass. Its peak is the same (``tests/profiling/test_audit.py`` compares the two).

Known limit: one count at a time, as it watches the calls of all modules.

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

NOTE [ Equal steps ]
    Of equal steps in a row, a trace for a plan runs two: one that gets its input from another step,
    and one that gives its output to another step. :func:`revzoo.profiling.chain.chain_of` puts
    copies of the first in the place of the others. Nothing may run between them.
"""

from __future__ import annotations

import bisect
import contextlib
import inspect
import operator
import random
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_iter, tree_map_only
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from revzoo._checks import check_module, counts_of, shortened
from revzoo.core import tape
from revzoo.core.invertible import Step, bare, evaluation_mode, streams_of
from revzoo.core.live import LiveMemory, dense_in
from revzoo.core.modes import DEVICE_MODES, MODES, effective_mode, mode_of
from revzoo.core.tensors import has_values
from revzoo.core.twins import Fakes, returns_arguments
from revzoo.core.words import fixed_of
from revzoo.layers.sequence import ReversibleSequence
from revzoo.profiling.units import bytes_from

_Module: Any = nn.Module


@dataclass(slots=True)
class Allocation:
    """A storage, its maker and its lifetime."""

    size: int  # bytes
    kind: str
    """``parameter``, ``buffer`` (or another attribute of a module), ``gradient``, ``optimiser``,
    ``input``, ``kept`` (an activation that outlives the forward pass) or ``temporary``."""
    module: str  # path of the module that made it; empty for the model itself and the loss
    operation: str  # the operator that made it
    shape: tuple[int, ...]  # of the first tensor in it
    dtype: torch.dtype
    born: int  # index of the operator in the step
    died: int | None = None  # index of the first operator after its end
    saved: int = 0  # number of tensors in it that autograd saved
    savers: set[int] = field(default_factory=set)  # the links whose forward pass saved one

    def alive(self, at: int) -> bool:
        """Whether it exists while operator ``at`` runs."""
        return self.born <= at and (self.died is None or self.died > at)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Saved:
    """A tensor that autograd saves, as long as it does."""

    tensor: Tensor
    allocation: Allocation
    link: int  # whose forward pass saves it


class Layout(NamedTuple):
    """What a tensor looks like, without the tensor."""

    shape: torch.Size
    dtype: torch.dtype
    needs: bool  # gradient

    @classmethod
    def of(cls, t: Tensor) -> Layout:
        """The layout of ``t``."""
        return cls(t.shape, t.dtype, t.requires_grad)


@dataclass(slots=True)
class Call:
    """A step of a chain as the forward pass called it."""

    name: str  # its path in the model
    key: tuple[object, ...]  # calls with equal keys do the same
    mode: str  # the memory mode in which it runs
    moves: bool  # whether it only moves values
    rounds: bool  # whether it rounds its inputs to a grid where it begins a run
    layout: tuple[Layout, ...]  # of each input stream
    inputs: list[Allocation]  # of the input streams; two streams may share one
    outputs: list[Allocation] = field(default_factory=list)
    ends: list[Allocation] = field(default_factory=list)
    """What a tape keeps if the step is inverted and the next one is not: the words of fixed-point
    streams, and the other streams."""
    copies: list[str] = field(default_factory=list)
    """Paths of equal steps after it that did not run (NOTE [ Equal steps ])."""

    @property
    def inverted(self) -> bool:
        """Whether the backward pass inverts it."""
        return mode_of(self.mode).inverts


class Trace(LiveMemory):  # type: ignore[no-untyped-call]
    """Follows one training step of ``model`` (see :func:`trace_step`)."""

    def __init__(
        self, model: nn.Module, fakes: Fakes | None = None, *, shortens: bool = False
    ) -> None:
        super().__init__()
        self._shortens = shortens
        self.allocations: list[Allocation] = []  # in order of creation
        self.calls: list[Call] = []  # of the forward pass, without steps inside other steps
        # of each operator: bytes alive after it, its link, and its nanoseconds (nominal_cost)
        self.levels: list[int] = []
        self.owners: list[int] = []
        self.costs: list[int] = []
        self.turn = 0  # index of the first operator of the backward pass
        self.uncounted: list[str] = []  # users of memory that is not counted, and why
        self._fakes = fakes
        self._alive: dict[int, Allocation] = {}  # by address of the storage
        self._saved: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self._names = {
            id(m): path
            for path, m in model.named_modules()
            if not isinstance(m, ReversibleSequence)
        }
        self._modules = [""]  # the running ones, by path
        self._in_step = self._in_inverted = False
        # the number of the next node, and the module and the link to which it belongs
        self._marks: list[tuple[int, str, int]] = [(0, "", 0)]
        self._node = ("", 0)  # module and link of the node that runs, in the backward pass
        self._task: int | None = None  # the backward pass
        self._outer = torch._C._current_graph_task_id()  # if a backward hook counts a step
        self._place = ("", 0)  # module and link of the running operator
        self._operation = ""
        self._call: Any = None  # what a call of a module runs without the trace

    def register(self, tensors: Iterable[Any], kind: str) -> None:
        """Set the kind of the tensors that exist before the step, and count them."""
        for t in dense_in([*tensors]):
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

    def named_calls(self) -> list[tuple[str, Call]]:
        """The path of each step that the forward pass calls, with its call, or one like it."""
        return [(name, call) for call in self.calls for name in (call.name, *call.copies)]

    @property
    def tick(self) -> int:
        """Number of operators so far."""
        return len(self.levels)

    def __enter__(self) -> Trace:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            with self._inside(self._names.get(id(module))):
                return self._call(module, *args, **kwargs)

        # not hooks: hooked layers keep more (revzoo.models.lean); and not __call__: its
        # identity tells which steps are containers
        self._call = _Module._call_impl
        _Module._call_impl = call
        tape.watcher = self._run_step
        if self._fakes is None:
            super().__enter__()  # type: ignore[no-untyped-call]
        else:
            self._fakes.watcher = self.run
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._fakes is None:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        else:
            self._fakes.watcher = None
        _Module._call_impl = self._call
        tape.watcher = None

    def run(self, call: Callable[..., Any], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operator by ``call`` and record its outputs."""
        # before it runs, as it may keep an output in a module
        self._operation, self._place = func.overloadpacket.__name__, self._where()
        outputs = call(*args, **kwargs)
        if not returns_arguments(func):
            if self._fakes is not None:
                outputs = self._resized(func, args, kwargs, outputs)
            for t in dense_in(outputs):
                self._count(t)
        self.owners.append(self._place[1])
        self.levels.append(self.now)
        self.costs.append(nominal_cost(func, args, kwargs, outputs))
        return outputs

    def _resized(self, func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
        try:
            return with_real_sizes(func, args, kwargs, outputs)
        except Exception as error:  # such as a missing device, or no memory
            reason = str(error).partition("\n")[0]
            note = (
                f"the workspace of {self._operation}, whose size only a real step knows ({reason})"
            )
            self.uncounted += [note] * (note not in self.uncounted)
            return outputs

    def _where(self) -> tuple[str, int]:
        """Module and link of the running operator (NOTE [ Who made a tensor ])."""
        task, node = torch._C._current_graph_task_id(), torch._C._current_autograd_node()
        if task == self._outer or node is None:  # in the forward pass and the loss
            return self._modules[-1], self._link()
        number = node._sequence_nr()
        self._task = task if self._task is None else self._task
        # a replay's own backward pass belongs to the node that replays; the accumulation of a
        # gradient, which has no number, to the node before
        if task == self._task and number < 2**63:
            at = bisect.bisect_right(self._marks, number, key=operator.itemgetter(0)) - 1
            self._node = self._marks[at][1:]
        return self._modules[-1] or self._node[0], self._node[1]

    def _link(self) -> int:
        """The link that the forward pass runs (NOTE [ Links of a trace ])."""
        return 2 * len(self.calls) - self._in_step

    def _count(self, t: Tensor) -> None:
        super()._count(t)
        storage = t.untyped_storage()
        if storage._cdata in self._alive:
            return
        allocation = Allocation(
            size=storage.nbytes(),
            kind="temporary",
            module=self._place[0],
            operation=self._operation,
            shape=tuple(t.shape),
            dtype=t.dtype,
            born=self.tick,
        )
        self.allocations.append(allocation)
        self._alive[storage._cdata] = allocation

    def _forget(self, address: int, size: int, reference: object) -> None:
        super()._forget(address, size, reference)
        self._alive.pop(address).died = self.tick

    @contextlib.contextmanager
    def _inside(self, path: str | None) -> Iterator[None]:
        """From the next node on, nodes belong to the module at ``path``, if it has one."""
        self._modules.append(self._modules[-1] if path is None else path)
        self._mark()
        try:
            yield
        finally:  # torch's checkpoint stops a replay early by an exception
            self._modules.pop()
            self._mark()

    def _mark(self) -> None:
        if not self.turn:
            number = torch._C._autograd._get_sequence_nr()
            self._marks.append((number, self._modules[-1], self._link()))

    def _run_step(self, run: tape.Run, step: Step, state: Any, context: Any) -> Any:
        """Run a step in its mode, which may not call the module, and keeps tensors beside it."""
        path = self._names.get(id(step))
        before = self._in_step, self._in_inverted
        # only the outermost step counts: steps inside a branch belong to it
        counts = path is not None and not self._in_step and not self.turn
        if path is not None and counts:
            # without the tensors: a reference from here would keep them alive
            layout = tuple(map(Layout.of, state))
            inputs = [self.allocation_of(t) for t in state]
            mode = effective_mode(step)
            # a step that is called again adds to the gradients of its first call
            alone = context or step.extras or path in dict(self.named_calls())
            kind = signature(step) if self._shortens and not alone else path
            key = mode, layout, kind
            call = Call(path, key, mode, step.moves_values, step.needs_words, layout, inputs)
            if self._repeats(call):
                self.calls[-2].copies.append(self.calls[-1].name)
                self.calls[-1].name = path
                return bare(state)
            self.calls.append(call)
            self._in_step = True
        self._in_inverted = mode_of(effective_mode(step)).inverts
        try:
            with self._inside(path):
                outputs = run(step, state, context)
        finally:
            self._in_step, self._in_inverted = before
            self._mark()
        if counts:
            streams = streams_of(outputs, step)
            call.outputs = [self.allocation_of(t) for t in streams]
            words = [fixed_of(t) for t in streams]
            call.ends = [
                self.allocation_of(t if fixed is None else fixed.words)
                for t, fixed in zip(streams, words, strict=True)
            ]
        return outputs

    def _repeats(self, call: Call) -> bool:
        """Whether the call need not run (NOTE [ Equal steps ])."""
        before = self.calls[-2:]
        return (
            len(before) == 2
            and all(c.key == call.key for c in before)
            and [id(t) for t in before[-1].outputs] == [id(t) for t in call.inputs]
            and self.owners[-1] == self._link() - 1  # the last operator is the last step's
        )

    def turn_back(self) -> None:
        """End the forward pass: its live tensors are kept for the backward pass."""
        self.turn = self.tick
        for allocation in self._alive.values():
            if allocation.kind == "temporary":
                allocation.kind = "kept"
        # not in pack(): torch's checkpoint lets go of the inputs of a step that saves nothing
        for saved in self._saved:
            saved.allocation.saved += 1
            saved.allocation.savers.add(saved.link)

    def pack(self, t: Tensor) -> Tensor | _Saved:
        """Note that autograd saves ``t``; the pack hook of the forward pass."""
        # detached: an output saved by its own node would keep that node alive
        kept = t if t.is_leaf else t.detach()
        if self._in_inverted:  # for a tape
            return kept
        saved = _Saved(kept, self.allocation_of(t), self._link())
        self._saved.add(saved)
        return saved

    @staticmethod
    def unpack(saved: Tensor | _Saved) -> Tensor:
        """The tensor that :meth:`pack` got."""
        return saved.tensor if isinstance(saved, _Saved) else saved


def with_real_sizes(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> Any:
    """The fake ``outputs`` of operator ``func``, with storages of the real size.

    A fused kernel, such as an LSTM on the CPU, keeps a workspace whose size only oneDNN or cuDNN
    knows, so its fake version returns an empty tensor of bytes. We run such an operator on zeros.

    Raises:
        RuntimeError: the operator cannot run on this machine, or not on zeros.
    """
    fakes = [t for t in dense_in(outputs) if isinstance(t, FakeTensor)]
    empty = any(t.dtype is torch.uint8 and not t.untyped_storage().nbytes() for t in fakes)
    # on the CPU, the result of the second keeps the storage of the columns, which is larger
    if not fakes or not (empty or func is torch.ops.aten.col2im.default):
        return outputs

    def zeros(t: Tensor) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_()

    with unset_fake_temporarily():
        real_args, real_kwargs = tree_map_only(Tensor, zeros, (args, kwargs))
        real = dense_in(func(*real_args, **real_kwargs))

    def resized(t: Tensor) -> Tensor:
        like = next(real)
        size = like.untyped_storage().nbytes()
        if t.untyped_storage().nbytes() == size:
            return t
        return t.new_empty(size // t.element_size()).as_strided(like.shape, like.stride())

    return tree_map_only(Tensor, resized, outputs)


# A processor that does 10 floating-point operations while it moves a byte (true of most CPUs and
# GPUs within a factor of three) and needs 5 microseconds to start an operator.
_FLOPS, _BYTES, _START = 100e9, 10e9, 5e-6


def nominal_cost(func: Any, args: Any, kwargs: dict[str, Any], outputs: Any) -> int:
    """Nanoseconds of an operator on a nominal processor, from its FLOPs and the bytes it moves.

    Good for comparing steps, equal on every machine, and independent of data.
    """
    if func.is_view:  # it moves no data
        return 0
    moved = sum(t.nbytes for t in dense_in((args, kwargs, outputs)))
    if not moved:
        return 0
    counter = flop_registry.get(func.overloadpacket)
    flops = counter(*args, **kwargs, out_val=outputs) if counter is not None else 0
    return int(1e9 * (flops / _FLOPS + moved / _BYTES + _START))


def signature(module: nn.Module) -> list[object]:
    """What distinguishes modules, beyond their inputs: types, options and layouts of tensors."""
    ignored = "label", "_members", "_modules"  # the path; made by the first call; one by one below

    def plain(value: Any) -> object:
        if isinstance(value, Tensor):
            return Layout.of(value)
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items() if k not in ignored}
        if isinstance(value, (tuple, list)):
            return [*map(plain, value)]
        known = isinstance(value, (bool, int, float, str)) or inspect.isroutine(value)
        return value if known else type(value)

    return [(type(m), plain(vars(m))) for m in module.modules()]


def trace_step(model: nn.Module, images: Tensor, *, shortens: bool = False) -> Trace:
    """Run one training step of ``model`` on ``images`` and follow its tensors.

    Gradients exist from the start, as in gradient accumulation and in Lightning's loop, which drops
    them after the forward pass. Changes ``model``: pass a copy.

    Args:
        model: real, or fake (see :func:`~revzoo.core.twins.fake_twin`).
        images: its input; fake ones for a fake model.
        shortens: run only two of equal steps in a row (NOTE [ Equal steps ]).

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
    trace = Trace(model, mode if isinstance(mode, Fakes) else None, shortens=shortens)
    with mode:
        for p in trained:
            if p.grad is None:  # else it would count as made by the backward pass
                p.grad = torch.zeros_like(p)
        # with plain attributes
        trace.register(map(vars, model.modules()), "buffer")
        trace.register(model.parameters(), "parameter")
        trace.register((p.grad for p in trained), "gradient")
        trace.register([images], "input")
        # a compiled model is counted as plain code
        with torch.compiler.set_stance("force_eager"), trace:
            with saved_tensors_hooks(trace.pack, trace.unpack), _explained(model, images):
                outputs = model(images)
            with saved_tensors_hooks(trace.pack, trace.unpack):
                loss = default_loss(outputs)
                del outputs
            # training leaves the autocast context here, which frees the cast weights
            torch.clear_autocast_cache()
            trace.turn_back()
            torch.autograd.backward(loss)
    return trace


@contextlib.contextmanager
def _explained(model: nn.Module, images: Tensor) -> Iterator[None]:
    """Explain the errors of a forward pass, in which a user's model may fail in any way."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ValueError(
            f"the forward pass of {type(model).__name__} reads values ({error}), which fake "
            "tensors lack: expected one that depends only on shapes. Use audit(real=True), and "
            "set the memory modes by hand instead of planning them"
        ) from error
    except Exception as error:
        error.add_note(
            f"Audits and plans call {type(model).__name__} with input_shape only, here with one "
            f"random {images.dtype} tensor of shape {tuple(images.shape)}: expected a model that "
            "takes it. Wrap a model with other inputs, such as integers, in a module that makes "
            "them from such a tensor. A forward pass that reads values, as numpy() does, needs "
            "audit(real=True)"
        )
        raise


def default_loss(outputs: Any) -> Tensor:
    """Cross-entropy of logits ``(B, classes)``; the sum of any other output.

    Raises:
        ValueError: no output requires gradient.
    """
    trained = [t for t in tree_iter(outputs) if isinstance(t, Tensor) and t.requires_grad]
    if not trained:
        kind = "tensor" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise ValueError(
            f"the model returned a {kind}, in which nothing requires gradient: expected a tensor, "
            "or a tuple, list or dictionary of tensors, that depends on parameters; look for "
            "detach() and torch.no_grad() in its forward pass"
        )
    if isinstance(outputs, Tensor) and outputs.dim() == 2 and not outputs.is_complex():
        labels = torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device)
        return nn.functional.cross_entropy(outputs, labels)
    # a loss is real
    parts = [torch.view_as_real(t) if t.is_complex() else t for t in trained]
    return torch.stack([t.sum() for t in parts]).sum()


def forward_flops(model: nn.Module, images: Tensor) -> int:
    """Floating-point operations of a forward pass in evaluation mode, per image.

    Counted by torch: matrix products and convolutions, with two operations per multiply-add.
    """
    with evaluation_mode(model), torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(images)
    return counter.get_total_flops() // len(images)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run under the conditions of a plain training step, then undo its effects.

    It affects the random states, and tensors that a copy shares with the model.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    python, numpy = random.getstate(), np.random.get_state()  # a forward pass may use them
    # a copy of the model shares what its functions hold, such as a patched forward its own layers
    parameters = [p for p in model.parameters() if not is_lazy(p)]
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None  # a step would add to it
    buffers = [t for t in model.buffers() if has_values(t) and not is_lazy(t)]
    values = [t.detach().clone() for t in buffers]
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
            for p, gradient in zip(parameters, gradients, strict=True):
                p.grad = gradient
            for t, value in zip(buffers, values, strict=True):
                if not torch.equal(t, value):
                    t.detach().copy_(value)


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
    for path, module in model.named_modules():
        name = f"the module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{name} is TorchScript ({type(module).__name__}), whose tensors cannot be "
                "followed: expected the nn.Module that it was compiled from"
            )
        if any(map(is_lazy, module._parameters.values())):
            raise ValueError(
                f"{name} is a {type(module).__name__} without weights: expected layers that "
                "are initialised. Call the model once on a batch, under torch.no_grad()"
            )
        [*dense_in(vars(module))]  # raises
    return checked_shape(input_shape), bytes_from(extra, name="extra", least=0)


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
