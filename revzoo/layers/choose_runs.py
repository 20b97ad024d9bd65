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
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from revzoo.core.invertible import evaluation_mode, kind_of
from revzoo.core.twins import Fakes, fake_twin, images_for, returns_arguments
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
) -> tuple[dict[int, int], dict[nn.Module, _Shapes]]:
    """Bytes that the forward pass keeps in each run, and the shapes of blocks before and after.

    Each part of a run is inverted, its only block recomputed; with 0 bits, each block is in a
    checkpoint of torch. The input of a run counts if it is kept, also by a layer before it.
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
    count = _Count()
    shapes: dict[nn.Module, _Shapes] = {}

    def enter(run: int) -> Any:
        def hook(_: nn.Module, args: Any) -> None:
            count.run = run
            count.add(args)

        return hook

    def leave(block: nn.Module) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            count.run = None
            x = next(iter((*args, *kwargs.values())), None)
            y = output[0] if isinstance(output, (tuple, list)) and output else output
            if isinstance(x, Tensor) and isinstance(y, Tensor):
                shapes[block] = x.shape, y.shape

        return hook

    for index, parts in enumerate(runs):
        for block in itertools.chain(*parts):
            blocks[block].register_forward_pre_hook(enter(index))
            blocks[block].register_forward_hook(leave(block), with_kwargs=True)
    # two images: BatchNorm refuses one image of one pixel in training
    images = images_for(twin, (max(2, input_shape[0]), *input_shape[1:]))
    fakes: Fakes = images.fake_mode  # type: ignore[attr-defined]
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), fakes:
        fakes.watcher = count
        try:
            outputs = twin(images)
        finally:
            fakes.watcher = None
    kept = count.kept()
    del outputs  # until here it holds the graph
    return kept, shapes


class _Count:
    """Watches the storages that each run creates or gets, see :class:`~revzoo.core.twins.Fakes`."""

    def __init__(self) -> None:
        self.run: int | None = None
        self._storages: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def __call__(self, call: Any, func: Any, args: Any, kwargs: Any) -> Any:
        outputs = call(*args, **kwargs)
        if not returns_arguments(func):
            self.add(outputs)
        return outputs

    def add(self, tensors: Any) -> None:
        """Watch the storages of these tensors."""
        if self.run is None:
            return
        for t in tree_iter(tensors):
            if not isinstance(t, Tensor):
                continue
            storage = t.untyped_storage()
            known = self._storages.get(storage._cdata)
            # the address of a freed storage comes again
            if known is None or known[0]() is None:
                row = weakref.ref(storage), self.run, storage.nbytes()
                self._storages[storage._cdata] = row

    def kept(self) -> dict[int, int]:
        """Bytes alive now, by run."""
        found: dict[int, int] = defaultdict(int)
        for storage, run, size in self._storages.values():
            found[run] += size if storage() is not None else 0
        return found


def chosen_bits(
    model: nn.Module, runs: Sequence[Sequence[nn.Module]], images: Tensor | Sequence[int]
) -> list[int]:
    """The fewest bits of each run with which the outputs change by at most 0.5 %.

    Measured in evaluation mode, against the plain ``model``. Errors of runs add up like those of
    independent numbers, so each run may cause 0.5 % over the root of their number; then all runs
    are measured together.

    Args:
        model: plain.
        runs: of its blocks.
        images: a batch, or the shape of a random one.

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
