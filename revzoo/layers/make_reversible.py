"""Finds the runs of blocks in a model and makes them reversible, in place.

The method and the step beside each block are in :mod:`revzoo.layers.side_bits`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from revzoo._checks import check_callable, check_module, did_you_mean, is_count
from revzoo.core.invertible import Step, evaluation_mode, kind_of, label_steps, name_of
from revzoo.core.kernels import fraction_bits
from revzoo.core.tensors import has_values
from revzoo.layers.choose_runs import chosen_bits, paying_runs
from revzoo.layers.side_bits import MAX_BITS, NAME, Forward, SideBits, attach, detach, step_of


def make_reversible(
    model: nn.Module,
    bits: int | Literal["auto"] | None = 4,
    *,
    blocks: Iterable[str] | None = None,
    input_shape: Sequence[int] | None = None,
    checkpoint: bool = False,
    images: Tensor | None = None,
) -> nn.Module:
    """Make the runs of blocks of ``model`` reversible, in place.

    A run is two or more consecutive modules of one class in an ``nn.Sequential`` or
    ``nn.ModuleList``, or numbered attributes (``b1``, ``b2``) with parameters of equal shapes. If
    the modules of a run contain runs (stages of blocks), we use the inner runs if their modules
    have equal shapes and the outer ones do not. Blocks that contain :class:`revzoo.Residual`
    modules are split into these. Training keeps ``bits`` bits per element and block, and the last
    state of each run; :func:`revzoo.set_memory` selects other modes. The ``state_dict`` keeps its
    keys and shapes, so weights load before or after. :func:`reversible_blocks` and
    :func:`revzoo.audit` list the reversible blocks.

    Args:
        model: from torchvision, timm, Hugging Face, or your own; its interface does not change.
        bits: 1 to 8; more bits change the outputs less and need more memory. 4 keeps the accuracy
            of trained networks. ``"auto"``: for each run, the fewest with which the outputs of a
            batch change by at most 0.5 %; a run that changes them more with 8 bits stays plain.
            None restores the plain network. May change on a reversible model.
        blocks: paths of the modules that contain the blocks (``["layer3", "encoder.layers"]``);
            None for all.
        input_shape: of a batch, such as ``(1, 3, 224, 224)``: convert only the runs that keep at
            least 10 % less at this size than with a checkpoint of each block, and in them two or
            more neighbours of one shape. The others stay plain, bit for bit. None converts all, and
            recomputes blocks without such neighbours from their input.
        checkpoint: with ``input_shape``, recompute the other blocks from their input.
        images: a batch for ``bits="auto"``; None for random ones of ``input_shape``.

    Returns:
        ``model``; :func:`revzoo.conversion` tells what it keeps now.

    Raises:
        TypeError: ``model`` is not a module; ``blocks`` is a string.
        ValueError: ``bits`` is out of range; a path leads to no module; there is no run; the blocks
            are compiled by torch.jit.script, or a torch.fx graph does not call them; a block's
            ``forward`` was replaced after an earlier call; a block has an attribute ``reversible``;
            the model does not take ``input_shape``. The model does not change.

    Example:
        >>> encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 4)
        >>> net = revzoo.make_reversible(encoder, bits=4)
        >>> net(torch.randn(2, 5, 16)).sum().backward()
    """
    check_module("model", model)
    if bits not in (None, "auto"):
        _check_bits(bits)
    if images is not None and input_shape is None:
        input_shape = images.shape
    if bits == "auto" and input_shape is None:
        raise ValueError(
            'bits="auto" compares the outputs of a batch: give images, or input_shape such as '
            "(2, 3, 224, 224)"
        )
    if isinstance(blocks, str):
        raise TypeError(f"blocks={blocks!r}: expected a list of paths, blocks=[{blocks!r}]")
    paths = None if blocks is None else list(blocks)
    runs = _runs(model, paths)
    if not runs and bits is not None:
        where = kind_of(model) if paths is None else f"blocks={paths}"
        raise ValueError(
            f"{where} has no run of blocks: expected revzoo.Residual modules, or "
            "two or more consecutive modules of one class in an nn.Sequential or nn.ModuleList, "
            "or modules named b1, b2, ... of one class, whose parameters have equal shapes"
        )
    among = [*model.modules()] if paths is None else [*itertools.chain(*runs)]
    earlier = [step for block in among if (step := step_of(block)) is not None]
    # all checks first, so that an error changes nothing
    for step in earlier:
        block = step.subject
        forward = vars(block).get("forward")
        if not isinstance(forward, Forward) or forward.step is not step:
            raise ValueError(
                f"{name_of(step)}: {type(block).__name__}.forward was replaced after "
                "make_reversible; undo that before you call make_reversible again"
            )
    counts: list[int] = []
    if bits is not None:
        found = {*itertools.chain(*runs)}
        _check_graphs(model, found)
        for block in found:
            _check_block(block)
        most = MAX_BITS if bits == "auto" else int(bits)
        if input_shape is not None:
            runs = paying_runs(model, runs, most, input_shape, checkpoint=checkpoint)
        counts = [most] * len(runs)
    for step in earlier:
        detach(step)
    if bits == "auto":
        batch: Any = input_shape if images is None else images
        counts = chosen_bits(model, runs, batch)
        # a run that changes the outputs too much: plain, or each block recomputed
        parts = [
            (part, count or MAX_BITS)
            for run, count in zip(runs, counts, strict=True)
            for part in ([run] if count else [[block] for block in run if checkpoint])
        ]
        runs, counts = [part for part, _ in parts], [count for _, count in parts]
    if bits is not None:
        attach(runs, counts)
    label_steps(model)
    return model


def _check_block(block: nn.Module) -> None:
    """Raise a ValueError if a module cannot become a reversible block."""
    if isinstance(block, torch.jit.ScriptModule):
        raise ValueError(
            f"{block.original_name} is compiled by torch.jit.script: expected blocks "
            "in Python; torch.compile and torch.export take a reversible network"
        )
    if hasattr(block, NAME) and step_of(block) is None:
        raise ValueError(
            f"{type(block).__name__} has an attribute {NAME!r}, under which make_reversible adds "
            "its step: rename it, or choose other blocks with make_reversible(blocks=...)"
        )


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


def _runs(model: nn.Module, paths: list[str] | None = None) -> list[list[nn.Module]]:
    """The runs of blocks in the modules at ``paths``, or in the whole model."""
    # explicit Residual modules first: the user has marked the branches
    if paths is None:
        return [*filter(None, [_residuals_in(model)]), *_runs_in(model)]
    runs: list[list[nn.Module]] = []
    for module in (_module_at(model, path) for path in paths):
        residuals = _residuals_in(module)
        runs += [residuals] if residuals else _groups(module)
    return runs


def _module_at(model: nn.Module, path: str) -> nn.Module:
    modules = dict(model.named_modules())
    if path not in modules:
        known = [name for name, module in modules.items() if _is_list(module)]
        raise ValueError(
            f"blocks: {kind_of(model)} has no module {path!r}: expected the path of a module that "
            f"contains blocks{did_you_mean(path, known)}"
        )
    return modules[path]


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, (nn.Sequential, nn.ModuleList))


def _residuals_in(module: nn.Module) -> list[nn.Module]:
    """The outermost ``Residual`` modules in their order: one run, or an empty list."""

    def outermost(m: nn.Module) -> Iterator[nn.Module]:
        if isinstance(m, Residual):
            yield m
        elif not _inverts(m):
            yield from itertools.chain(*map(outermost, m.children()))

    return list(dict.fromkeys(outermost(module)))


def _runs_in(module: nn.Module) -> Iterator[list[nn.Module]]:
    """The runs in ``module``, none inside another; without runs of ``Residual`` modules."""
    if _inverts(module) or isinstance(module, Residual):
        return
    taken: list[nn.Module] = []
    for group in _groups(module):
        if any(map(_residuals_in, group)):
            continue
        if not _is_list(module) and not any(itertools.starmap(_alike_built, pairwise(group))):
            continue  # e.g. branches of a block: no list shows that one follows the other
        inside = [run for block in group for run in _runs_in(block)]
        if any(map(_has_twins, inside)) and not _has_twins(group):  # the group holds stages
            yield from inside
        else:
            yield group
        taken += group
    for child in module.children():
        if not any(child is block for block in taken):
            yield from _runs_in(child)


def _groups(module: nn.Module) -> Iterator[list[nn.Module]]:
    """Two or more consecutive children of one class."""
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
    shapes, others = ([None if is_lazy(p) else p.shape for p in m.parameters()] for m in (a, b))
    return shapes == others


class Residual(nn.Module):
    """``x + fn(x)``; any shape, which ``fn`` must keep.

    :func:`make_reversible` splits a block whose branches are :class:`Residual` modules: attention
    and MLP of a transformer become two steps. The backward pass replays one branch at a time, so
    its peak is lower; each branch keeps its own side bits.

    Args:
        fn: a module, or a method of the block that holds the weights, which keeps their keys in the
            ``state_dict``. It returns a tensor, or a tuple that begins with one; further arguments
            pass through.

    Raises:
        TypeError: ``fn`` is not callable, or returns something else.
        ValueError: ``fn`` returns a tensor of a different shape than ``x``.

    Example:
        >>> class Block(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.norm = nn.LayerNorm(16)
        ...         self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        ...         self.first = revzoo.Residual(self.attend)
        ...         mlp = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        ...         self.second = revzoo.Residual(mlp)
        ...
        ...     def attend(self, x):
        ...         x = self.norm(x)
        ...         return self.attention(x, x, x, need_weights=False)[0]
        ...
        ...     def forward(self, x):
        ...         return self.second(self.first(x))
        >>> net = revzoo.make_reversible(nn.Sequential(Block(), Block()), bits=4)
        >>> net(torch.randn(2, 5, 16)).sum().backward()
        >>> [row.path for row in revzoo.reversible_blocks(net)]
        ['0.first', '0.second', '1.first', '1.second']
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        check_callable("fn", fn)
        self.fn = fn

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """``x + fn(x, *args, **kwargs)``; if ``fn`` returns a tuple, adds to its first tensor."""
        value = self.fn(x, *args, **kwargs)
        first, *rest = value if isinstance(value, tuple) and value else (value,)
        if not isinstance(first, Tensor):
            raise TypeError(
                f"the branch of Residual returned {type(value).__name__}: expected a tensor, or a "
                "tuple that begins with one"
            )
        if first.shape != x.shape:
            raise ValueError(
                f"the branch of Residual returned shape {tuple(first.shape)} for an input of "
                f"{tuple(x.shape)}: expected the same shape, since both are added"
            )
        return (x + first, *rest) if isinstance(value, tuple) else x + first


class BlockRow(NamedTuple):
    """A block that :func:`make_reversible` has wrapped.

    Attributes:
        path: its path in the model.
        bits: bits kept per value if the block joins a run.
        role: ``"joins"`` a run; ``"starts"`` one, or is recomputed from its input if no block
            follows; ``"ends"`` one, because its output changes shape or type, or leaves the range
            of the grid; ``"alone"``, which both starts and ends; ``"not called"`` before the first
            call. Audits and plans call copies.
        grid: fractional bits of the integers in the last call; None in floating point, before the
            first call, or if the values that entered the run were not finite.
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
    rows = []
    for path, step in model.named_modules():
        if isinstance(step, SideBits):
            role, grid = "not called", None
            if (call := step.last_call) is not None:
                role = (("alone", "starts"), ("ends", "joins"))[call.joined][call.continues]
                if call.scale is not None and has_values(call.scale.down):
                    grid = fraction_bits(call.scale)
            rows.append(BlockRow(path.rpartition(".")[0], step.bits, role, grid))
    return rows


def set_bits(model: nn.Module, bits: Any) -> None:
    """Change the bits of a reversible model, whose runs stay.

    Raises:
        ValueError: ``bits`` is not 1 to 8.
    """
    _check_bits(bits)
    for step in model.modules():
        if isinstance(step, SideBits):
            step.bits = int(bits)


def _check_bits(bits: Any) -> None:
    if not is_count(bits) or bits > MAX_BITS:
        raise ValueError(
            f'bits={bits!r}: expected 1 to {MAX_BITS}, "auto", or None for the plain network'
        )


def described_runs(model: nn.Module) -> list[str]:
    """The runs that :func:`make_reversible` has made, to make them again: ``"PATH:BITS ..."``."""
    runs, words = [], []
    for path, block in model.named_modules():
        if (step := step_of(block)) is not None:
            words.append(f"{path}:{step.bits}")
            if step.last:
                runs.append(" ".join(words))
                words = []
    return [*runs, *filter(None, [" ".join(words)])]


def make_runs(model: nn.Module, runs: Iterable[str]) -> nn.Module:
    """Make exactly these runs of a plain ``model`` reversible, see :func:`described_runs`.

    Raises:
        ValueError: a run has another form, or names no module.
    """
    modules = dict(model.named_modules())
    for run in runs:
        pairs = [word.rpartition(":")[::2] for word in run.split()]
        for path, bits in pairs:
            if path not in modules or bits not in map(str, range(1, MAX_BITS + 1)):
                raise ValueError(
                    f"reversible_runs: {run!r:.80}: expected words PATH:BITS, the path of a block "
                    f"of {kind_of(model)} and 1 to {MAX_BITS} bits"
                )
        steps = attach([[modules[path] for path, _ in pairs]], [1])
        for step, (_, bits) in zip(steps, pairs, strict=True):
            step.bits = int(bits)
    label_steps(model)
    return model


def recalibrate_batch_norm(model: nn.Module, batches: Iterable[Tensor | Sequence[Any]]) -> None:
    """Replace the running statistics of torch's BatchNorms in ``model`` by averages over batches.

    A changed network (made reversible, pruned, given other weights) has other statistics than it
    was trained with. ``torch.optim.swa_utils.update_bn`` also switches dropout on. Here everything
    else runs as in evaluation; weights, modes and momenta do not change. An error restores the
    statistics. An :class:`~revzoo.InvertibleBatchNorm` keeps its own.

    Args:
        model: called with each batch.
        batches: images ``(B, C, H, W)``, normalised; a few hundred images are enough. If a batch
            is a tuple or list, as from a loader of images and labels, its first item is used.

    Raises:
        ValueError: there is no batch.

    Example:
        >>> net = revzoo.make_reversible(revzoo.create_model("resnet32"), bits=2)
        >>> revzoo.recalibrate_batch_norm(net, [torch.randn(8, 3, 32, 32) for _ in range(2)])
        >>> int(net.stem[0].norm.num_batches_tracked)
        2
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    before = [{k: b.clone() for k, b in norm.named_buffers(recurse=False)} for norm in norms]
    count = 0
    try:
        # no dropout or stochastic depth, as in evaluation
        with evaluation_mode(model), torch.no_grad():
            for norm in norms:
                norm.train()
                norm.reset_running_stats()
                norm.momentum = None  # the average over all batches
            for batch in batches:
                model(batch if isinstance(batch, Tensor) else batch[0])
                count += 1
        if not count:
            raise ValueError("batches is empty: expected at least one batch of images")
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for name, value in buffers.items():
                getattr(norm, name).copy_(value)
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
