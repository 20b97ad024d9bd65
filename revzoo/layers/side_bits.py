"""Makes any run of blocks that keep their shape reversible, with a few extra bits per value.

A run ``x[k+1] = B[k](x[k])`` has no inverse. With ``b = 2**-bits`` this one has:

    x[k+1] = (1 + b) B[k](x[k]) - 2 b x[k] + b x[k-1]        (the first: x[1] = B[0](x[0]))

With ``B(x) = x + F(x)`` this is ``x + F(x) + b (F(x) - the previous step)``: a second difference of
size b, which hardly changes the output of a trained network. The blocks are black boxes. In
floating point the inverse ``x[k-1] = (x[k+1] - (1 + b) B[k](x[k]) + 2 b x[k]) / b`` would multiply
errors by ``2**bits`` at every block. On words (:mod:`revzoo.core.fixedpoint`) ``b x[k-1]`` is a
shift. We pack and keep the bits that it drops: for 4 bits, 4 per element and block instead of 32,
and no activation inside the block.

Kin: BDIA-transformers (Zhang et al. 2024, arXiv 2407.09093) with b = 1/2, a random sign and one
side bit; Dr2Net (Zhao et al., CVPR 2024), floating point, coefficients annealed in fine-tuning;
Momentum ResNets (Sander et al. 2021, arXiv 2102.07870); the buffer of bits is from Maclaurin et al.
2015 (arXiv 1502.03492).

NOTE [ Blocks in place ]
    ``make_reversible`` puts a step beside each block, and the block's ``forward`` calls the step.
    The model's code does not change, and the step has no parameters, so the ``state_dict`` is the
    same.

    A block continues the run if its input is the tensor that the previous block returned, and no
    code has changed it or the previous input in place. Any other input starts a new run. So does an
    input from another checkpoint, whose replay does not run the previous block.

    A block ends the run if its output has another shape than its input, or a type whose values the
    input's type cannot hold. It also ends the run if its output leaves the range of the run's grid,
    as in language models, whose values grow to thousands: the next block starts a run on a coarser
    grid. A block that ends a run is recomputed from its input.

    On the CPU we check the range in every pass, elsewhere only in the first one, since the check
    needs a host sync.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from inspect import Signature, getattr_static, signature
from itertools import pairwise
from types import MethodType, NoneType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.compiler.disable, but imports it later
from torch.fx import GraphModule, Proxy
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from revzoo._checks import check_module, did_you_mean, is_count
from revzoo.core.fixedpoint import (
    AUTO,
    COARSEST_BITS,
    Fixed,
    Scale,
    as_floats,
    fixed_of,
    fraction_bits,
    keeps_words,
    pack_bits,
    put_on_grid_of,
    second_difference,
    undo_second_difference,
)
from revzoo.core.guard import check_forward_range
from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    Recorder,
    State,
    Step,
    kind_of,
    label_steps,
    name_of,
)
from revzoo.core.modes import run_step
from revzoo.core.slots import collect_asides, put_aside
from revzoo.core.tensors import has_values, version_of
from revzoo.layers.residual import Residual

NAME = "reversible"  # of the step among the block's modules
MOST_BITS = 8
# by x[k]: x[k-1], and the marks of both when x[k] was returned
_previous: Any = WeakTensorKeyDictionary()

# Private in torch: the hooks of the innermost checkpoint. With a version that lacks it, do not use
# torch's checkpoints: nothing shows where they begin and end.
_hooks_now = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)


def _marks_of(before: Tensor, x: Tensor) -> tuple[Any, ...]:
    """What must not have changed when a block continues the run: versions and checkpoint.

    A reentrant checkpoint has no hooks. But gradients are off inside it, and what it returns
    requires gradient only afterwards.
    """
    hooks = _hooks_now(True)
    checkpoint = None if hooks is None else hooks[0]
    versions = version_of(before), version_of(x)
    return *versions, checkpoint, torch.is_grad_enabled(), x.requires_grad


def _pop_previous(x: Tensor) -> Tensor | None:
    """x[k-1] for ``x``, which is x[k]; None if ``x`` is no such state, or was changed since."""
    before, *marks = _previous.pop(x, (None,))
    return before if before is not None and tuple(marks) == _marks_of(before, x) else None


class Call(NamedTuple):
    """The role of a block's last call in its run."""

    joined: bool  # whether it joined the run of the previous block
    continues: bool  # whether the next block can join
    scale: Scale | None  # its grid


_calls: WeakKeyDictionary[SideBits, Call] = WeakKeyDictionary()


class _Running(threading.local):
    """The call that runs in this thread.

    Not attributes of the step: threads share it, and copies and pickles would contain them.
    """

    returned: list[Any] | None = None
    """Two parts of a block's result: the values that are no tensors, and its nested structure."""
    evaluated: SideBits | None = None
    """The step whose block is running."""


_running = _Running()


class Forward:
    """The ``forward`` of a reversible block: runs the step, and has the block's signature."""

    def __init__(self, step: SideBits) -> None:
        self.step = step

    @_disable_dynamo  # runs are found by the identity of tensors
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.step.run(*args, **kwargs)

    @property
    def __signature__(self) -> Signature:
        return signature(self.step.plain)


class SideBits(Invertible):
    """One block of a run: ``(x[k-1], x[k]) -> (x[k], x[k+1])``, or at its start ``x -> (x, B(x))``.

    Args:
        block: maps a tensor to one of the same shape, or to a tuple that begins with one. The block
            holds the step as a submodule; the step refers to the block, but not as a submodule.
        bits: b is ``2**-bits``; the step keeps this many bits of each value.
        last: whether it is the last block of the run.
    """

    exact = True
    sums = True
    reads_words = True
    needs_words = True
    memory = "exact"
    grid = AUTO
    fits: bool | None = None
    """Whether the last output was within the range of the run's grid."""

    def __init__(self, block: nn.Module, bits: int, *, last: bool) -> None:
        super().__init__()
        self.bits = bits
        self.last = last
        # past nn.Module, which would register the block as a submodule of its own submodule
        object.__setattr__(self, "block", block)
        # set by torch.compile or by tools that move weights between devices
        object.__setattr__(self, "patched", vars(block).get("forward"))

    @property
    def subject(self) -> nn.Module:
        return self.block  # type: ignore[return-value]

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
        """The block's ``forward`` in a reversible model."""
        # the stream may come by keyword
        if not args and (name := next(iter(signature(self.plain).parameters), "")) in kwargs:
            args = (kwargs.pop(name),)
        return self._run(*args, **kwargs) if args else self.plain(**kwargs)

    def _run(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        if isinstance(x, Proxy):  # torch.fx, as for feature maps: the graph calls the whole block
            path = x.tracer.path_of_module(self.subject)  # type: ignore[attr-defined]
            return x.tracer.create_proxy("call_module", path, (x, *args), kwargs)
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return self.plain(x, *args, **kwargs)
        # popped, so that a second block that reads x starts a run: only one can follow
        before = _pop_previous(x)
        state = (x,) if before is None else (before, x)
        self.streams = len(state)
        returned: list[Any] = []
        outer = _running.returned, _running.evaluated
        _running.returned, _running.evaluated = returned, None
        try:
            # its own recording collects what it puts aside; in mode store nobody may
            with collect_asides(None):
                x_out, y, *rest = run_step(self, state, _args=args, **kwargs)
        finally:
            _running.returned, _running.evaluated = outer
        others, structure = returned
        # on the CPU, a block whose output leaves the range of an automatic grid ends the run
        if self.grid is not None and not (self.grid == AUTO and y.device.type == "cpu"):
            check_forward_range(self, (x_out, y))
        fixed = fixed_of(x_out)
        # a step without a grid returns no words, though its input may have some
        stays_on_grid = self.grid is None or fixed is None or fixed_of(y) is not None
        continues = stays_on_grid and _alike(y, x)
        if continues and not self.last:
            _previous[y] = x_out, *_marks_of(x_out, y)
        _calls[self] = Call(before is not None, continues, None if fixed is None else fixed.scale)
        return tree_unflatten([y, *rest, *others], structure)

    def forward(self, *state: Tensor, **context: Any) -> State:
        *before, x = state
        value, *rest = self._evaluate(x, **context)
        known = fixed_of(before[0]) if before else None
        if _alike(value, x):
            y = self._following(before, x, value, known)
            if self._fits(y):
                if known is not None:
                    put_aside(pack_bits(known.words, self.bits))
                self._set_extras(len(rest))
                return x, y, *rest
        if before:  # the run ends here: keep its last state
            put_aside(before[0].detach() if known is None else known.words)
        # the replay needs x alone, so the tape does not keep the value
        self._set_extras(1 + len(rest))
        return x, value, *rest

    def _set_extras(self, count: int) -> None:
        # only if it differs: a step with new attributes is searched again (core/reach.py)
        if self.extras != count:
            self.extras = count

    def _following(
        self, before: Sequence[Tensor], x: Tensor, value: Tensor, known: Fixed | None
    ) -> Tensor:
        b = 2.0**-self.bits
        fixed = fixed_of(x) if self.grid is not None and keeps_words() else None
        if not before:
            if fixed is not None:
                return put_on_grid_of(fixed, value)
            # a block may return its input, but the run tells x[k] and x[k+1] apart
            return value.clone() if value is x else value.to(x.dtype)
        if fixed is None or known is None:
            return ((1 + b) * value - 2 * b * x + b * before[0]).to(x.dtype)
        return second_difference(before[0], x, value, known, self.bits)

    def _fits(self, y: Tensor) -> bool:
        """Whether ``y`` is within the range of its grid; always True for a fixed grid."""
        fixed = fixed_of(y)
        if self.grid != AUTO or fixed is None or fixed.peak is None or not has_values(y):
            return True
        if self.fits is None or y.device.type == "cpu":
            peak = float(fixed.peak.value)
            # infinite values fit no grid, so a new run would not help: the guard raises
            self.fits = not float(fixed.scale.end) <= peak < math.inf
        return self.fits

    def inverse(self, *state: Tensor, **context: Any) -> State:
        raise NotInvertibleError(
            f"{name_of(self)} has no inverse outside the backward pass: the dropped bits are kept "
            "only for that"
        )

    def replay(self, outputs: Any, record: Recorder, context: Mapping[str, Any]) -> Any:
        x, *following = outputs
        (read,) = as_floats((x,))
        needs = record.needs[-1:]
        value, *_ = record(self._evaluate, (read,), needs, context)
        # the start of a run returns its input as the first output
        if len(record.needs) == 1:
            return (x,)
        (aside,) = record.aside
        if aside.dtype != torch.uint8:  # the run ended: no bits, but its state
            before = x.with_words(aside) if isinstance(x, Fixed) else aside
        else:
            (y,) = following
            with torch.no_grad():
                before = undo_second_difference(y, read, value, aside, self.bits)
        return before, x

    def _evaluate(self, x: Tensor, *, _args: tuple[Any, ...] = (), **kwargs: Any) -> State:
        """The tensors that the block returns."""
        kind = type(self.block).__name__
        if _running.evaluated is self:
            raise RuntimeError(
                f"{kind} calls all its children, and so the step {NAME!r} that make_reversible "
                "added: expected a block that calls its layers by name; choose other blocks with "
                "make_reversible(blocks=...)"
            )
        outer, _running.evaluated = _running.evaluated, self
        try:
            leaves, structure = tree_flatten(self.plain(x, *_args, **kwargs))
        finally:
            _running.evaluated = outer
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        others = leaves[len(tensors) :]
        if not tensors or any(isinstance(leaf, Tensor) for leaf in others):
            types = ", ".join(type(leaf).__name__ for leaf in leaves) or "nothing"
            raise TypeError(
                f"{name_of(self)} got {types} from {kind}: expected a tensor, or a tuple with its "
                "tensors first; choose other blocks with make_reversible(blocks=...)"
            )
        if _running.returned is not None:  # not in a replay
            _running.returned[:] = others, structure
        return tuple(tensors)

    @property
    def plain(self) -> Callable[..., Any]:
        """The block's own ``forward``."""
        block = self.subject
        return self.patched or MethodType(type(block).forward, block)  # type: ignore[return-value]

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


def _alike(y: Tensor, x: Tensor) -> bool:
    """Whether ``y`` can follow ``x`` in a run: same shape and device, and a lossless cast."""
    same = _sizes(y) == _sizes(x) and y.device == x.device
    return same and (y.dtype == x.dtype or _holds(x.dtype, y.dtype))


def _holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether the floating-point type ``wide`` can hold all values of ``narrow``."""
    if not narrow.is_floating_point:
        return False
    a, b = torch.finfo(wide), torch.finfo(narrow)
    return a.max >= b.max and a.eps <= b.eps


def _sizes(t: Tensor) -> Any:
    # nested, as torch's encoder in eval mode with a padding mask; a jagged one has a shape
    nested = t.is_nested and t.layout is torch.strided
    return [part.shape for part in t.unbind()] if nested else t.shape


def make_reversible(
    model: nn.Module, bits: int | None = 4, *, blocks: Iterable[str] | None = None
) -> nn.Module:
    """Make the runs of blocks of ``model`` reversible, in place; see the module for the method.

    A run is two or more consecutive modules of one class in an ``nn.Sequential`` or
    ``nn.ModuleList``, or numbered attributes (``b1``, ``b2``) with parameters of equal shapes. If
    the modules of a run contain runs, as stages contain blocks, the run whose modules have equal
    shapes is used. Blocks that contain :class:`revzoo.Residual` modules are split into these.
    Training keeps ``bits`` bits per element and block, and the last state of each
    run; :func:`revzoo.set_memory` selects other modes. The ``state_dict`` keeps its keys and
    shapes, so weights load before or after. :func:`reversible_blocks` and :func:`revzoo.audit` list
    the reversible blocks.

    Args:
        model: from torchvision, timm, Hugging Face, or your own; its interface does not change.
        bits: 1 to 8; more bits change the outputs less and need more memory. 4 keeps the accuracy
            of trained networks. None restores the plain network. May change on a reversible model.
        blocks: paths of the modules that contain the blocks (``["layer3", "encoder.layers"]``);
            None for all.

    Returns:
        ``model``.

    Raises:
        TypeError: ``model`` is no module; ``blocks`` is a string.
        ValueError: ``bits`` is out of range; a path leads to no module; no run was found; the
            blocks are compiled by torch.jit.script or are not called by a graph of torch.fx; a
            block's ``forward`` was replaced since, or is no ordinary method; a block has an
            attribute ``reversible``. The model is then as before.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 4)
        >>> net = revzoo.make_reversible(encoder, bits=4)
        >>> net(torch.randn(2, 5, 16)).sum().backward()
    """
    check_module("model", model)
    if bits is not None and not (is_count(bits) and bits <= MOST_BITS):
        raise ValueError(f"bits={bits!r}: expected 1 to {MOST_BITS}, or None for the plain network")
    if isinstance(blocks, str):
        raise TypeError(f"blocks={blocks!r}: expected a list of paths, blocks=[{blocks!r}]")
    # explicit Residual modules first: the user has marked the branches
    if blocks is None:
        runs = [*_residuals_in(model), *_runs_in(model)]
    else:
        chosen_paths = list(blocks)
        chosen = [_container(model, path) for path in chosen_paths]
        runs = [run for m in chosen for run in list(_residuals_in(m)) or _groups(m)]
    if not runs and bits is not None:
        where = kind_of(model) if blocks is None else f"blocks={chosen_paths}"
        raise ValueError(
            f"{where} has no run of blocks: expected revzoo.Residual modules, or "
            "two or more consecutive modules of one class in an nn.Sequential or nn.ModuleList, "
            "or modules named b1, b2, ... of one class, whose parameters have equal shapes"
        )
    chosen_blocks = dict.fromkeys(itertools.chain(*runs))
    among = model.modules() if blocks is None else chosen_blocks
    earlier = {block: step for block in among if (step := _step_of(block)) is not None}
    # all checks first, so that an error changes nothing
    for block, step in earlier.items():
        _check_forward(block, step)
    if bits is not None:
        _check_graphs(model, {*chosen_blocks})
        for block in chosen_blocks:
            _check_block(block)
    for block, step in earlier.items():
        _make_plain(block, step)
    if bits is not None:
        # a block may be in two lists: then it is the last only if it ends both
        inner = {block for run in runs for block in run[:-1]}
        for block in chosen_blocks:
            step = SideBits(block, bits, last=block not in inner)
            block.add_module(NAME, step.train(block.training))
            block.forward = Forward(step)
            if isinstance(block, Step):
                block.delegates = True
    label_steps(model)
    return model


def _check_forward(block: nn.Module, step: SideBits) -> None:
    """Raise a ValueError if the ``forward`` of a reversible block was replaced."""
    forward = vars(block).get("forward")
    if not isinstance(forward, Forward) or forward.step is not step:
        raise ValueError(
            f"{name_of(step)}: {type(block).__name__}.forward was replaced after "
            "make_reversible; undo that before you call make_reversible again"
        )


def _check_block(block: nn.Module) -> None:
    """Raise a ValueError if a module cannot become a reversible block."""
    if isinstance(block, torch.jit.ScriptModule):
        raise ValueError(
            f"{block.original_name} is compiled by torch.jit.script: expected blocks "
            "in Python; torch.compile and torch.export take a reversible network"
        )
    kind = type(block)
    if hasattr(block, NAME) and _step_of(block) is None:
        raise ValueError(
            f"{kind.__name__} has an attribute {NAME!r}, under which make_reversible adds its "
            "step: rename it, or choose other blocks with make_reversible(blocks=...)"
        )
    if isinstance(getattr_static(kind, "forward"), (staticmethod, classmethod, property)):
        raise ValueError(
            f"{kind.__name__}.forward is no ordinary method: make it one, def forward(self, x), or "
            "choose other blocks with make_reversible(blocks=...)"
        )


def _make_plain(block: nn.Module, step: SideBits) -> None:
    del block._modules[NAME], block.forward
    if step.patched is not None:
        block.forward = step.patched  # type: ignore[assignment]
    if isinstance(block, Step):
        del block.delegates


def _check_graphs(model: nn.Module, blocks: set[nn.Module]) -> None:
    """Raise a ValueError if a graph of torch.fx calls the layers of a block, but not the block."""
    for traced in (m for m in model.modules() if isinstance(m, GraphModule)):
        targets = [node.target for node in traced.graph.nodes if node.op == "call_module"]
        called = {m for target in targets for m in traced.get_submodule(str(target)).modules()}
        for path, module in traced.named_modules():
            if module in blocks - called:
                raise ValueError(
                    f"the graph of torch.fx does not call block {path!r}, only its layers: make "
                    "the network reversible before it is traced (create_feature_extractor)"
                )


def _container(model: nn.Module, path: str) -> nn.Module:
    modules = dict(model.named_modules())
    if path not in modules:
        known = [name for name, module in modules.items() if _is_list(module)]
        raise ValueError(
            f"blocks: {kind_of(model)} has no nn.Sequential or nn.ModuleList {path!r}"
            f"{did_you_mean(path, known)}"
        )
    return modules[path]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList))


def _residuals_in(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The outermost ``Residual`` modules in their order, as one run."""

    def outermost(m: nn.Module) -> Iterator[nn.Module]:
        if isinstance(m, Residual):
            yield m
        elif not _inverts(m):
            yield from itertools.chain(*map(outermost, m.children()))

    if run := list(dict.fromkeys(outermost(module))):
        yield run


def _runs_in(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The runs in ``module``, none inside another; without runs of ``Residual`` modules."""
    if _inverts(module) or isinstance(module, Residual):
        return
    taken: list[nn.Module] = []
    for group in _groups(module):
        if any(True for block in group for _ in _residuals_in(block)):
            continue
        if not _is_list(module) and not any(itertools.starmap(_alike_built, pairwise(group))):
            continue  # e.g. branches of a block: no list shows that they follow each other
        inside = [run for block in group for run in _runs_in(block)]
        if any(map(_has_twins, inside)) and not _has_twins(group):  # the group are stages
            yield from inside
        else:
            yield group
        taken += group
    for child in module.children():
        if not any(child is block for block in taken):
            yield from _runs_in(child)


def _groups(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Children of one class that follow each other, two or more."""
    numbered = {n: m for n, m in module.named_children() if n[-1:].isdigit() and _is_block(m)}
    children = [numbered.get(name) for name, _ in module.named_children()]
    for kind, group in itertools.groupby(children, type):
        blocks = [block for block in group if block is not None]
        if kind is not NoneType and len(blocks) > 1:
            yield blocks


def _is_block(module: nn.Module) -> bool:
    leaf = type(module).__module__.startswith("torch.nn") and not any(module.children())
    has_parameters = next(module.parameters(), None) is not None
    return has_parameters and not (leaf or _inverts(module) or _is_list(module))


def _inverts(module: nn.Module) -> bool:
    return isinstance(module, Step) and module.invertible


def _has_twins(group: Sequence[nn.Module]) -> bool:
    return any(itertools.starmap(_alike_built, itertools.combinations(group, 2)))


def _alike_built(a: nn.Module, b: nn.Module) -> bool:
    return [p.shape for p in a.parameters()] == [p.shape for p in b.parameters()]


class BlockRow(NamedTuple):
    """A block that :func:`make_reversible` has wrapped.

    Attributes:
        path: in the model.
        bits: kept per value if the block joins a run.
        role: ``"joins"`` a run; ``"starts"`` one, or is recomputed from its input where none
            follows; ``"ends"`` one, since its output has another shape or type, or leaves the range
            of the grid; ``"alone"``, which both starts and ends; ``""`` before the first call.
        grid: fractional bits of the integers in the last call; None in floating point, before, or
            if the values that entered the run were not finite.
    """

    path: str
    bits: int
    role: str
    grid: int | None


def reversible_blocks(model: nn.Module) -> list[BlockRow]:
    """The blocks that :func:`make_reversible` has wrapped, with the roles of their last calls.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
        >>> net = revzoo.make_reversible(encoder, bits=4)
        >>> y = net(torch.randn(2, 5, 16))
        >>> for row in revzoo.reversible_blocks(net):
        ...     print(row)
        BlockRow(path='layers.0', bits=4, role='starts', grid=23)
        BlockRow(path='layers.1', bits=4, role='joins', grid=23)
    """
    steps = {n: m for n, m in model.named_modules() if isinstance(m, SideBits)}
    return [_row(path.rpartition(".")[0], step) for path, step in steps.items()]


def one_number_converts(model: nn.Module) -> bool:
    """Whether ``make_reversible(plain, bits)`` makes this network for some ``bits`` or None."""
    steps = {block: _step_of(block) for block in model.modules()}
    bits = {block: step.bits for block, step in steps.items() if step is not None}
    runs = [*_residuals_in(model), *_runs_in(model)]
    return not bits or (len({*bits.values()}) == 1 and bits.keys() == {*itertools.chain(*runs)})


def _step_of(block: nn.Module) -> SideBits | None:
    step = getattr(block, NAME, None)
    return step if isinstance(step, SideBits) else None


def _row(path: str, step: SideBits) -> BlockRow:
    call = _calls.get(step)
    if call is None:
        return BlockRow(path, step.bits, "", None)
    role = {
        (True, True): "joins",
        (False, True): "starts",
        (True, False): "ends",
        (False, False): "alone",
    }[call.joined, call.continues]
    grid = None
    # the scale of an input with NaN is NaN
    if call.scale is not None and has_values(call.scale.down) and float(call.scale.end) > 0:
        bits = fraction_bits(call.scale)
        grid = bits if bits > COARSEST_BITS else None  # Inf has the coarsest grid
    return BlockRow(path, step.bits, role, grid)
