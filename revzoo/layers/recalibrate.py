"""Recomputes BatchNorm's running statistics from a few batches.

A changed network (made reversible, pruned, given other weights) has different statistics from the
ones it was trained with. ``torch.optim.swa_utils.update_bn`` also switches dropout on, and takes
all batches of a loader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from revzoo.core.evaluation import evaluation_mode


def recalibrate_batch_norm(model: nn.Module, batches: Iterable[Tensor | Sequence[Any]]) -> None:
    """Replace the running statistics of torch's BatchNorms in ``model`` by averages over batches.

    Everything else runs as in evaluation; weights, modes and momenta do not change. An error
    restores the statistics. An :class:`~revzoo.InvertibleBatchNorm` keeps its own.

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
