"""Any run of blocks that keep their shape, made reversible with a few bits a value.

A run ``x[k+1] = B[k](x[k])`` has no inverse. With ``b = 2**-bits`` this one has:

    x[k+1] = (1 + b) B[k](x[k]) - 2 b x[k] + b x[k-1]        (the first: x[1] = B[0](x[0]))

With ``B(x) = x + F(x)`` that is ``x + F(x) + b (F(x) - the step before)``: a second difference of
size b, which a trained network hardly notices. The blocks stay black boxes. Backwards,
``x[k-1] = (x[k+1] - (1 + b) B[k](x[k]) + 2 b x[k]) / b``, which in floating point would multiply
errors by ``2**bits`` at every block. On words (:mod:`revzoo.core.fixedpoint`) ``b x[k-1]`` is a
shift. The bits that it drops are packed and kept: 4 an element and block instead of 32, and nothing
of what the block keeps inside.

Kin: BDIA-transformers (Zhang et al. 2024, arXiv 2407.09093) with b = 1/2, a random sign and one
side bit; Dr2Net (Zhao et al., CVPR 2024), floating point, coefficients annealed in fine-tuning;
Momentum ResNets (Sander et al. 2021, arXiv 2102.07870); the buffer of bits is that of Maclaurin et
al. 2015 (arXiv 1502.03492).

NOTE [ Blocks in place ]
    ``make_reversible`` puts a step beside each block and lets the block's ``forward`` call it. The
    model's own code is never touched, and the step has no parameters, so the ``state_dict`` is the
    same. A block that is called with the very tensor that the block before returned continues
    the run; any other input starts one. A block whose output has another shape than its input
    ends the run before it and starts none: it is recomputed from its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from revzoo._checks import did_you_mean, is_count
from revzoo.core.fixedpoint import (
    Fixed,
    fixed_of,
    floats,
    keeps_words,
    pack_bits,
    put_on_grid_of,
    second_difference,
    undo_second_difference,
)
from revzoo.core.invertible import (
    Invertible,
    NotInvertibleError,
    Recording,
    State,
    label_steps,
    name_of,
)
from revzoo.core.modes import run_step
from revzoo.core.recording import put_aside

NAME = "reversible"  # of the step among the block's modules
MOST_BITS = 8
_before: Any = WeakTensorKeyDictionary()  # x[k-1], by x[k]


class SideBits(Invertible):
    """One block of a run: ``(x[k-1], x[k]) -> (x[k], x[k+1])``, or at its start ``x -> (x, B(x))``.

    Args:
        block: from a tensor to one of the same shape, or to a tuple that begins with that. The
            block holds the step; the step refers to it, but has no modules of its own.
        bits: b is ``2**-bits``; so many bits of each value are kept.
        last: whether no other block of the run follows.
    """

    exact = True
    sums = True
    reads_words = True
    memory = "exact"
    grid = "auto"

    def __init__(self, block: nn.Module, bits: int, *, last: bool) -> None:
        super().__init__()
        self.bits = bits
        self.last = last
        object.__setattr__(self, "block", block)

    @property
    def subject(self) -> nn.Module:
        return self.block  # type: ignore[return-value]

    def run(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The block's ``forward`` in a reversible model."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return self._plain(x, *args, **kwargs)
        before = _before.pop(x, None)
        state = (x,) if before is None else (before, x)
        self.streams = len(state)
        known, y, *rest = run_step(self, state, args=args, **kwargs)
        if not self.last and _alike(y, x) and keeps_words():
            _before[y] = known
        return tree_unflatten([y, *rest, *self._others], self._structure)

    def forward(self, *state: Tensor, **context: Any) -> State:
        *before, x = state
        value, *rest = self._evaluate(x, **context)
        if not _alike(value, x):
            if before:  # a run ends here: its last state is kept
                fixed = fixed_of(before[0])
                put_aside(before[0].detach() if fixed is None else fixed.words)
            return x, value, *rest
        b = 2.0**-self.bits
        fixed = fixed_of(x) if self.grid is not None and keeps_words() else None
        if not before:
            y = value.to(x.dtype) if fixed is None else put_on_grid_of(fixed, value)
        elif fixed is None or (known := fixed_of(before[0])) is None:
            y = ((1 + b) * value - 2 * b * x + b * before[0]).to(x.dtype)
        else:
            put_aside(pack_bits(known.words, self.bits))
            y = second_difference(before[0], x, value, known, self.bits)
        return x, y, *rest

    def inverse(self, *state: Tensor, **context: Any) -> State:
        raise NotInvertibleError(
            f"{name_of(self)} has no inverse of its own: the bits that it dropped are kept for the "
            "backward pass alone"
        )

    def replay(self, outputs: Any, record: Recording, context: Mapping[str, Any]) -> Any:
        x, y = outputs
        (read,) = floats((x,))
        needs = record.needs[-1:]
        value, *_ = record(self._evaluate, (read,), needs, context)
        if len(record.needs) == 1:
            return (x,)
        (aside,) = record.aside
        if not _alike(value, read):
            before = x.moved(aside) if isinstance(x, Fixed) else aside
        else:
            with torch.no_grad():
                before = undo_second_difference(y, read, value, aside, self.bits)
        return before, x

    def _evaluate(self, x: Tensor, *, args: tuple[Any, ...] = (), **kwargs: Any) -> State:
        """What the block returns: the tensors of it."""
        leaves, structure = tree_flatten(self._plain(x, *args, **kwargs))
        if not leaves or not isinstance(leaves[0], Tensor):
            raise TypeError(
                f"{name_of(self)} got no tensor first from {type(self.block).__name__}: expected a "
                "block that returns a tensor, or a tuple that begins with one; choose such blocks "
                "with make_reversible(blocks=...)"
            )
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._others = leaves[len(tensors) :]
        if any(isinstance(leaf, Tensor) for leaf in self._others):
            raise TypeError(
                f"{name_of(self)} got {structure} from {type(self.block).__name__}: expected its "
                "tensors before whatever else it returns"
            )
        self._structure = structure
        self.extras = len(tensors) - 1
        return tuple(tensors)

    def _plain(self, x: Any, /, *args: Any, **kwargs: Any) -> Any:
        block = self.subject
        return type(block).forward(block, x, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"bits={self.bits}"


def _alike(y: Tensor, x: Tensor) -> bool:
    return y.shape == x.shape and y.device == x.device


def make_reversible(
    model: nn.Module, bits: int | None = 4, *, blocks: Iterable[str] | None = None
) -> nn.Module:
    """Make the runs of blocks of ``model`` reversible, in place; see the module for the method.

    A run is two or more consecutive modules of one class in an ``nn.Sequential`` or
    ``nn.ModuleList`` of the model. Training keeps ``bits`` bits an element and block, and the last
    state of each run; :func:`revzoo.set_memory` chooses other modes. The ``state_dict`` keeps its
    keys and shapes, so weights load before or after.

    Args:
        model: torchvision's, timm's, Hugging Face's, your own: called as before.
        bits: 1 to 8: more change the outputs less and keep more. 4 leaves the accuracy of trained
            networks as it is. None: the plain network again. Another number changes those of a
            reversible model.
        blocks: paths of the containers whose blocks are meant (``["layer3", "encoder.layers"]``);
            None for all.

    Returns:
        ``model``.

    Raises:
        ValueError: ``bits`` is out of range; a path leads to no container; no run was found.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 4)
        >>> net = revzoo.make_reversible(encoder, bits=4)
        >>> net(torch.randn(2, 5, 16)).sum().backward()
    """
    if bits is not None and not (is_count(bits) and bits <= MOST_BITS):
        raise ValueError(f"bits={bits!r}: expected 1 to {MOST_BITS}, or None for the plain network")
    runs = list(_runs(model, blocks))
    if not runs:
        raise ValueError(
            f"{type(model).__name__} has no run of blocks: expected two or more consecutive "
            "modules of one class in an nn.Sequential or nn.ModuleList"
        )
    for run in runs:
        for block in run:
            if NAME in block._modules:
                del block._modules[NAME], block.forward
            if bits is not None:
                step = SideBits(block, bits, last=block is run[-1])
                block.add_module(NAME, step.train(block.training))
                block.forward = step.run
    label_steps(model)
    return model


def _runs(model: nn.Module, blocks: Iterable[str] | None) -> Iterator[Sequence[nn.Module]]:
    containers = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, (nn.Sequential, nn.ModuleList))
    }
    chosen = list(containers) if blocks is None else list(blocks)
    for path in chosen:
        if path not in containers:
            raise ValueError(
                f"blocks: {type(model).__name__} has no nn.Sequential or nn.ModuleList {path!r}"
                f"{did_you_mean(path, containers)}"
            )
        run: list[nn.Module] = []
        for module in (*containers[path], None):
            if run and type(module) is type(run[0]):
                run.append(module)
                continue
            if len(run) > 1:
                yield run
            whole = module is not None and not isinstance(module, (nn.Sequential, nn.ModuleList))
            run = [module] if whole and next(module.parameters(), None) is not None else []
