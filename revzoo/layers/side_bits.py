"""The step that makes a block of a run reversible, with a few extra bits per value.

A run ``x[k+1] = B[k](x[k])`` has no inverse. With ``b = 2**-bits`` this one has:

    x[k+1] = (1 + b) B[k](x[k]) - 2 b x[k] + b x[k-1]        (the first: x[1] = B[0](x[0]))

With ``B(x) = x + F(x)`` this is ``x + F(x) + b (F(x) - the previous step)``: a second difference of
size b, which hardly changes the output of a trained network. The blocks are black boxes. In
floating point the inverse ``x[k-1] = (x[k+1] - (1 + b) B[k](x[k]) + 2 b x[k]) / b`` would multiply
errors by ``2**bits`` at every block. On words (:mod:`revzoo.core.words`) ``b x[k-1]``
is a shift. We pack and keep the bits that it drops: ``bits=4`` keeps 4 bits per element and block
instead of 32, and no activation inside the block.

Related work: BDIA-transformers (Zhang et al. 2024, arXiv 2407.09093) with b = 1/2, a random sign
and one side bit; Dr2Net (Zhao et al., CVPR 2024), floating point, coefficients annealed in
fine-tuning; Momentum ResNets (Sander et al. 2021, arXiv 2102.07870); the buffer of bits is from
Maclaurin et al. 2015 (arXiv 1502.03492).

NOTE [ Blocks in place ]
    :func:`revzoo.make_reversible` puts a step beside each block, and the block's ``forward`` calls
    the step. The model's code does not change, and the step has no parameters, so the
    ``state_dict`` is the same.

    A block continues the run if its input is the tensor that the previous block returned, and no
    code has changed it or the previous input in place. Any other input starts a new run. So does an
    input from another checkpoint, whose replay does not run the previous block.

    A block ends the run if the shape of its output differs from its input, or if the input's type
    cannot hold the values of the output's type. It also ends the run if its output leaves the range
    of the run's grid, as in language models, whose values grow to thousands: the next block starts
    a run on a coarser grid. The grid of the run adapts, so the next pass may continue it. A block
    that ends a run is recomputed from its input.

    On the CPU we check the range in every pass, elsewhere only in the first one, since the check
    needs a host sync.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, signature
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # as torch.compiler.disable, but imports it later
from torch.fx import Proxy
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from revzoo.core.conditions import is_replaying
from revzoo.core.guard import note_scale, range_failure
from revzoo.core.invertible import Invertible, NotInvertibleError, State, Step, name_of
from revzoo.core.kernels import Scale, free_to_read, on_device, triton_for
from revzoo.core.modes import on_grid_of, run_on_adapted_grid, run_step
from revzoo.core.replay import Recorder
from revzoo.core.saved import innermost_hooks, save_for_replay, saving_for_replay
from revzoo.core.sums import plus, put_on_grid_of
from revzoo.core.tensors import version_of
from revzoo.core.words import AUTO, Fixed, fixed_of, set_words, words_in

NAME = "reversible"  # the step's name among the block's modules
MAX_BITS = 8
# by x[k]: x[k-1], and the marks of both when x[k] was returned
_previous: Any = WeakTensorKeyDictionary()


def _marks_of(before: Tensor, x: Tensor) -> tuple[Any, ...]:
    """The versions and the checkpoint, which must be the same when a block continues the run."""
    # a reentrant checkpoint has no hooks, but gradients are off inside it
    hooks = innermost_hooks(True)
    checkpoint = None if hooks is None else hooks[0]
    versions = version_of(before), version_of(x)
    return *versions, checkpoint, torch.is_grad_enabled(), x.requires_grad


def _pop_previous(x: Tensor) -> Tensor | None:
    """x[k-1] for ``x``, which is x[k]; None if ``x`` is not such a state, or was changed since."""
    before, *marks = _previous.pop(x, (None,))
    return before if before is not None and tuple(marks) == _marks_of(before, x) else None


class Call(NamedTuple):
    """The role of a block's last call in its run."""

    joined: bool  # whether it joined the run of the previous block
    continues: bool  # whether the next block can join
    scale: Scale | None  # its grid


_calls: WeakKeyDictionary[SideBits, Call] = WeakKeyDictionary()


class _Running(threading.local):
    """The call that runs in this thread."""

    returned: list[Any] | None = None  # of a block: what is no tensor, and the nested structure
    evaluated: SideBits | None = None  # the step whose block is running


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


class _Next(torch.autograd.Function):
    """``(1 + b) value - 2 b x + b before``; ``fixed`` are the words of ``before``, shifted.

    In a replay, which needs no values, it has neither ``before`` nor ``fixed``.
    """

    @staticmethod
    def forward(
        ctx: Any, before: Tensor | None, x: Tensor, value: Tensor, fixed: Fixed | None, step: Any
    ) -> Tensor:
        ctx.step, ctx.dtype, ctx.scale = step, value.dtype, None
        if before is None or fixed is None:
            return x.new_empty(()).expand(value.shape)
        ctx.scale = fixed.scale
        y, words = plus(fixed, step.difference(x, value, fixed), before.dtype, step)
        set_words(y, words)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        b = 2.0**-ctx.step.bits
        of_before = None
        if ctx.scale is not None:
            note_scale(ctx.scale, ctx.step)
            of_before = b * grad
        return of_before, -2 * b * grad, ((1 + b) * grad).to(ctx.dtype), None, None


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
    needs_words = True
    memory = "exact"
    grid = AUTO

    def __init__(self, block: nn.Module, bits: int, *, last: bool) -> None:
        super().__init__()
        self.bits = bits
        self.last = last
        self.streams, self.extras = 1, 0
        self.fits: bool | None = None  # whether the last output was within the range of its grid
        # not through nn.Module, which would register the block inside itself
        object.__setattr__(self, "block", block)
        # set by torch.compile or by tools that move weights between devices
        object.__setattr__(self, "patched", vars(block).get("forward"))

    @property
    def subject(self) -> nn.Module:
        return self.block  # type: ignore[return-value]

    @property
    def last_call(self) -> Call | None:
        """The role of the block's last call; None before the first."""
        return _calls.get(self)

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
        # popped, so that a second block that reads x starts a run: only one block can follow
        before = _pop_previous(x)
        state = (x,) if before is None else (before, x)
        self.streams = len(state)
        returned: list[Any] = []
        outer = _running.returned, _running.evaluated
        _running.returned, _running.evaluated = returned, None

        def run() -> tuple[State, State]:
            # its own recording collects the tensors for the replay; in mode store nobody may
            with saving_for_replay(None):
                outputs = run_step(self, on_grid_of(self, state), _args=args, **kwargs)
            return outputs, outputs[:2]

        try:
            x_out, y, *rest = run_on_adapted_grid(self.subject, run)
        finally:
            _running.returned, _running.evaluated = outer
        others, structure = returned
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
            y, packed = self._following(before, x, value, known)
            if self._fits(y):
                if packed is not None:
                    save_for_replay(packed)
                self.extras = len(rest)
                return x, y, *rest
        if before:  # the run ends here: keep its last state
            save_for_replay(before[0].detach() if known is None else known.words)
        # the replay needs x alone, so the tape does not keep the value
        self.extras = 1 + len(rest)
        return x, value, *rest

    def _following(
        self, before: Sequence[Tensor], x: Tensor, value: Tensor, known: Fixed | None
    ) -> tuple[Tensor, Tensor | None]:
        """The next state, and the packed bits that it drops; None without words."""
        b = 2.0**-self.bits
        fixed = words_in(self, x)
        if not before:
            if fixed is not None:
                return put_on_grid_of(fixed, value, self), None
            # a block may return its input, but a run identifies its states by their tensors
            return value.clone() if value is x else value.to(x.dtype), None
        if fixed is None or known is None:
            return ((1 + b) * value - 2 * b * x + b * before[0]).to(x.dtype), None
        packed, words = pack_bits(known.words, self.bits)
        shifted = known.with_words(words)
        return _Next.apply(before[0], x, value, shifted, self), packed

    def difference(self, x: Tensor, value: Tensor, fixed: Fixed) -> Tensor:
        """``(1 + b) value - 2 b x`` in the precision of the words."""
        b = 2.0**-self.bits
        kind = torch.float64 if fixed.words.dtype == torch.int64 else torch.float32
        return ((1 + b) * value.to(kind)).sub_(x.to(kind), alpha=2 * b)

    def _undone(self, y: Fixed, x: Tensor, value: Tensor, side: Tensor) -> Fixed:
        """The stream before the last; ``side`` are the low bits of its words."""
        shifted = y.minus(self.difference(x, value, y), y.down, overwrite=True)
        return shifted.with_words(unpack_bits(side, shifted.words, self.bits, overwrite=True))

    def _fits(self, y: Tensor) -> bool:
        """Whether ``y`` is within the range of its grid; always True for a fixed grid."""
        fixed = fixed_of(y)
        if self.grid != AUTO or fixed is None or fixed.peaks is None:
            return True
        peaks, scale = fixed.peaks, fixed.scale
        if self.fits is None or free_to_read(y) or not torch.is_grad_enabled():
            # infinite values fit no grid
            self.fits = not bool(((peaks >= scale.end) & peaks.isfinite()).any())
            if not self.fits and not is_replaying():
                range_failure(scale)  # adapts the grid: the next pass need not end the run here
        if not self.fits:
            scale.forget(peaks)
        return self.fits

    def inverse(self, *state: Tensor, **context: Any) -> State:
        raise NotInvertibleError(
            f"{name_of(self)} has no inverse outside the backward pass: the dropped bits are kept "
            "only for the backward pass"
        )

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        x, *following = outputs
        count = len(record.needs)
        leaf = record.leaf(count - 1, x)
        value, *rest = self._evaluate(leaf, **context)
        # the start of a run returns its input as the first output
        if count == 1:
            return (x,), (leaf, value, *rest)
        (saved,) = record.saved
        if saved.dtype != torch.uint8:  # the run ended: its state instead of bits
            before = x.with_words(saved) if isinstance(x, Fixed) else saved
            return (before, x), (leaf, value, *rest)
        (y,) = following
        with torch.no_grad():
            before = self._undone(y, leaf, value, saved)
        if not record.records:
            return (before, x), ()
        record.multiples[0] = 1, 2.0**-self.bits
        return (before, x), (leaf, _Next.apply(None, leaf, value, None, self), *rest)

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
    same = _sizes(y) == _sizes(x) and y.device == x.device and y.is_floating_point()
    return same and torch.promote_types(x.dtype, y.dtype) == x.dtype


def _sizes(t: Tensor) -> Any:
    # nested, as torch's encoder in eval mode with a padding mask; a jagged one has a shape
    nested = t.is_nested and t.layout is torch.strided
    return [part.shape for part in t.unbind()] if nested else t.shape


def pack_bits(words: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The low ``bits`` of each word, and ``words >> bits``; a byte holds as many words as fit.

    An arithmetic shift rounds down, also below zero.
    """
    slot = _slot_bits(bits)
    if (ours := _triton_for(words)) is not None:
        with on_device(words):
            packed, shifted = ours.pack_bits(words, bits, slot)
        return packed, shifted
    # a narrowing cast keeps the low bits, even of negative words (two's complement)
    low = words.to(torch.uint8).flatten()  # the low byte
    if rest := -len(low) % (8 // slot):
        low = nn.functional.pad(low, (0, rest))
    low &= 2**bits - 1
    # words far apart share a byte, so both packing and unpacking are whole-row operations
    packed, *parts = low.view(8 // slot, -1)
    for k, part in enumerate(parts, 1):
        packed |= part.bitwise_left_shift_(slot * k)
    # a copy, since a view would keep all rows in memory
    return packed.clone() if parts else packed, words >> bits


def unpack_bits(packed: Tensor, shifted: Tensor, bits: int, *, overwrite: bool = False) -> Tensor:
    """The words that :func:`pack_bits` got: ``shifted << bits``, with the low bits.

    ``overwrite`` allows writing them over ``shifted``.
    """
    slot = _slot_bits(bits)
    words = shifted if overwrite else torch.empty_like(shifted)
    if (ours := _triton_for(shifted)) is not None:
        with on_device(shifted):
            ours.unpack_bits(packed, shifted, bits, slot, words)
        return words
    parts = packed.new_empty(8 // slot, len(packed))
    for k, part in enumerate(parts):
        torch.bitwise_right_shift(packed, slot * k, out=part)
    parts &= 2**bits - 1
    torch.bitwise_left_shift(shifted, bits, out=words)
    return words.bitwise_or_(parts.flatten()[: words.numel()].view(words.shape))


def _triton_for(words: Tensor) -> Any:
    ours = triton_for(words)
    return None if ours is None or ours.layout_of(words) is None else ours


def _slot_bits(bits: int) -> int:
    return next(slot for slot in (1, 2, 4, 8) if slot >= bits)


def step_of(block: nn.Module) -> SideBits | None:
    """The step beside ``block``, if it is reversible."""
    step = getattr(block, NAME, None)
    return step if isinstance(step, SideBits) else None


def attach(runs: Sequence[Sequence[nn.Module]], bits: Sequence[int]) -> list[SideBits]:
    """Make the blocks of ``runs`` reversible, each run with its bits; returns their steps."""
    # a block may be in two lists: it is the last only if it ends both
    inner = {block for run in runs for block in run[:-1]}
    steps = {}
    for run, count in zip(runs, bits, strict=True):
        for block in run:
            if block in steps:
                continue
            step = steps[block] = SideBits(block, count, last=block not in inner)
            block.add_module(NAME, step.train(block.training))
            block.forward = Forward(step)
            if isinstance(block, Step):
                block.delegates = True
    return [*steps.values()]


def detach(step: SideBits) -> None:
    """Make the block of ``step`` plain again."""
    block = step.subject
    del block._modules[NAME], block.forward
    if step.patched is not None:
        block.forward = step.patched  # type: ignore[assignment]
    if isinstance(block, Step):
        del block.delegates
