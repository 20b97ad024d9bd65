"""Which runs of blocks :func:`revzoo.make_reversible` inverts, and with how many side bits.

A run pays if it keeps at least 10 % less inverted than with torch's checkpoint of each block. We
count both on a copy with fake tensors. An inverted run keeps its two last states, so short runs
often do not pay. Side bits change the outputs. With ``bits="auto"``, each run gets the fewest bits
that change them by at most 0.5 %.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from revzoo.core.invertible import evaluation_mode, kind_of
from revzoo.core.live import LiveMemory, dense_in
from revzoo.core.twins import Fakes, fake_twin, images_for
from revzoo.layers.side_bits import MAX_BITS, SideBits, attach, detach

LEAST_SAVED = 0.1
"""Part of the bytes that a checkpoint of each block keeps in a run."""
MOST_CHANGE = 0.005
"""Of the outputs with ``bits="auto"``, in the relative 2-norm."""
_Shapes = tuple[torch.Size, torch.Size]


def paying_runs(
    model: nn.Module,
    runs: Sequence[Sequence[nn.Module]],
    bits: int,
    input_shape: Sequence[int],
    *,
    checkpoint: bool,
) -> list[list[nn.Module]]:
    """The parts of ``runs`` to invert; with ``checkpoint``, the other blocks one by one.

    A part is two or more neighbours that keep one shape.

    Raises:
        ValueError: the model does not take ``input_shape``.
    """
    alone = [[[block] for block in run] for run in runs]
    try:
        checkpointed, shapes = _kept(model, alone, 0, input_shape)
        parts = [_of_one_shape(run, shapes) for run in runs]
        kept, _ = _kept(model, parts, bits, input_shape)
    except Exception as error:  # a user's model may fail in any way
        raise ValueError(
            f"{kind_of(model)} does not take input_shape={tuple(input_shape)}: {error}"
        ) from error
    found = []
    for index in range(len(runs)):
        pays = 0 < checkpointed[index] * LEAST_SAVED <= checkpointed[index] - kept[index]
        chosen = parts[index] if pays else alone[index]
        found += [part for part in chosen if len(part) > 1 or checkpoint]
    return found


def _of_one_shape(run: Sequence[nn.Module], shapes: dict[nn.Module, _Shapes]) -> list[Any]:
    # equal keys for neighbours that keep one shape; others have one of their own
    keys = {b: s[0] if (s := shapes.get(b)) and s[0] == s[1] else b for b in run}
    return [[*part] for _, part in itertools.groupby(run, keys.__getitem__)]


def _kept(
    model: nn.Module,
    runs: Sequence[Sequence[Sequence[nn.Module]]],
    bits: int,
    input_shape: Sequence[int],
) -> tuple[Mapping[Any, int], dict[nn.Module, _Shapes]]:
    """Bytes that the forward pass keeps in each run, and the shapes of blocks before and after.

    Each part of a run is inverted, its only block recomputed; with 0 bits, each block is in a
    checkpoint of torch.
    """
    twin = fake_twin(model).requires_grad_(True)  # frozen layers may be trained later
    for step in [m for m in twin.modules() if isinstance(m, SideBits)]:
        detach(step)
    paths = {module: path for path, module in model.named_modules()}
    blocks = {b: twin.get_submodule(paths[b]) for b in itertools.chain(*itertools.chain(*runs))}
    copies = [[blocks[b] for b in part] for parts in runs for part in parts]
    if bits:
        attach(copies, [bits] * len(copies))
    else:
        for block in itertools.chain(*copies):
            block.forward = partial(torch_checkpoint, block.forward, use_reentrant=False)
    groups = {blocks[b]: i for i, parts in enumerate(runs) for b in itertools.chain(*parts)}
    # two images: BatchNorm refuses one image of one pixel in training
    kept, shapes = kept_bytes(twin, groups, (max(2, input_shape[0]), *input_shape[1:]))
    return kept, {block: shapes[copy] for block, copy in blocks.items() if copy in shapes}


def kept_bytes(
    twin: nn.Module, groups: Mapping[nn.Module, Any], input_shape: Sequence[int]
) -> tuple[Mapping[Any, int], dict[nn.Module, _Shapes]]:
    """Bytes that a forward pass keeps for the backward pass, by group of blocks.

    Args:
        twin: see :func:`~revzoo.core.twins.fake_twin`; changes.
        groups: each block's. Bytes outside of blocks are in the group None. The input of a group
            counts in it if it is kept, also by a layer before it.
        input_shape: of the batch.

    Returns:
        The bytes, and the shapes before and after of blocks that take and return a tensor.
    """
    count = _ByGroup()
    shapes: dict[nn.Module, _Shapes] = {}

    def enter(block: nn.Module, args: Any) -> None:
        count.group = groups[block]
        count.take(args)

    def leave(block: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        count.group = None
        x = next(iter((*args, *kwargs.values())), None)
        y = output[0] if isinstance(output, (tuple, list)) and output else output
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            shapes[block] = x.shape, y.shape

    for block in groups:
        block.register_forward_pre_hook(enter)
        block.register_forward_hook(leave, with_kwargs=True)
    images = images_for(twin, input_shape)
    fakes: Fakes = images.fake_mode  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), fakes:
        fakes.watcher = count.run
        try:
            outputs = twin(images)
        finally:
            fakes.watcher = None
    kept = count.kept()
    del outputs  # until here it holds the graph
    return kept, shapes


class _ByGroup(LiveMemory):  # type: ignore[no-untyped-call]
    """Counts the storages that each group of blocks creates or takes."""

    def __init__(self) -> None:
        super().__init__()
        self.group: Any = None  # the one that runs
        self._rows: dict[int, tuple[Any, int]] = {}  # group and bytes of a storage, by address

    def take(self, tensors: Any) -> None:
        """Move storages from outside of groups into the one that runs."""
        for t in dense_in(tensors):
            self._count(t)
            address = t.untyped_storage()._cdata
            group, size = self._rows[address]
            self._rows[address] = (self.group if group is None else group), size

    def kept(self) -> Mapping[Any, int]:
        """Bytes alive now, by group."""
        found: Counter[Any] = Counter()
        for group, size in self._rows.values():
            found[group] += size
        return found

    def _count(self, t: Tensor) -> None:
        super()._count(t)
        storage = t.untyped_storage()
        self._rows.setdefault(storage._cdata, (self.group, storage.nbytes()))

    def _forget(self, address: int, size: int, reference: object) -> None:
        super()._forget(address, size, reference)
        del self._rows[address]


def chosen_bits(
    model: nn.Module, runs: Sequence[Sequence[nn.Module]], images: Tensor | Sequence[int]
) -> list[int]:
    """The fewest bits of each run with which the outputs change by at most 0.5 %.

    Measured in evaluation mode, against the plain ``model``. Errors of runs add up like those of
    independent numbers, so each run may cause 0.5 % over the root of their number; then all runs
    are measured together.

    Returns:
        1 to 8 for each run; 0 if even 8 bits change the outputs too much.
    """
    like = next(model.parameters())
    if like.is_meta:  # no values: the bits come with the weights
        return [MAX_BITS] * len(runs)
    if not isinstance(images, Tensor):
        images = torch.randn(*images, generator=torch.Generator().manual_seed(0))
    images = images.to(like)
    with torch.no_grad(), evaluation_mode(model), torch.random.fork_rng(devices=[]):
        plain = _outputs(model, images)

        def change(found: Sequence[int]) -> float:
            """Of the outputs, with these bits of the runs; 0 for a plain run."""
            pairs = [(run, bits) for run, bits in zip(runs, found, strict=True) if bits]
            steps = attach([run for run, _ in pairs], [bits for _, bits in pairs])
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of coarse grids: they count as a change
                    _outputs(model, images)  # adapts the grids to the values
                    return _distance(_outputs(model, images), plain)
            finally:
                for step in steps:
                    detach(step)

        found = [0] * len(runs)
        errors = [0.0] * len(runs)  # with the most bits
        share = MOST_CHANGE / math.sqrt(max(1, len(runs)))
        for i in range(len(runs)):
            for bits in range(MAX_BITS, 0, -1):
                error = change([bits if j == i else 0 for j in range(len(runs))])
                if not error <= (MOST_CHANGE if bits == MAX_BITS else share):  # also for NaN
                    break
                errors[i] = error if bits == MAX_BITS else errors[i]
                found[i] = bits
        while any(found) and not change(found) <= MOST_CHANGE:
            if min(bits for bits in found if bits) < MAX_BITS:
                found = [min(bits + 1, MAX_BITS) if bits else 0 for bits in found]
            else:
                found[max((i for i, b in enumerate(found) if b), key=errors.__getitem__)] = 0
    return found


def _outputs(model: nn.Module, images: Tensor) -> list[Tensor]:
    return [t for t in tree_iter(model(images)) if isinstance(t, Tensor) and t.is_floating_point()]


def _distance(found: Iterable[Tensor], plain: Iterable[Tensor]) -> float:
    """Relative, in the 2-norm over all tensors."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, plain, strict=True)]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    return math.sqrt(squares / max(sum(float(b.square().sum()) for _, b in pairs), 1e-30))
