"""Sequences of layers that keep only the tensors that a gradient needs.

torch's layers keep more: a convolution keeps its input even if its weight is frozen, a batch
normalisation in eval mode even if its affine part is frozen, an average pooling just for its shape.
A leaky ReLU keeps its input although its output has the same signs. Dropout on the CPU keeps a mask
of floats. Here the layers run with the same kernels and the same results; only the gradient of an
ELU, computed from the output, differs by rounding. An activation works in place if nothing else
uses its input.

Layers that are hooked, subclassed or patched run unchanged, since their code may read any tensor.
So do all layers inside ``torch.func`` and ``torch.compile``, which decides itself what to keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo.core.invertible import calls_only_forward
from revzoo.core.saved import keeping_shape_of
from revzoo.core.tensors import runs_eagerly

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Layers whose output is new memory, which their own gradient does not read.
_MAKERS = frozenset((*_CONVS, *_BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, nn.Linear))
_IN_PLACE: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.ReLU: lambda layer, x: functional.relu(x, inplace=True),
    nn.LeakyReLU: lambda layer, x: functional.leaky_relu(x, layer.negative_slope, inplace=True),
    nn.ELU: lambda layer, x: functional.elu(x, layer.alpha, inplace=True),
    nn.Tanh: lambda layer, x: torch.tanh_(x),
}


class Lean(nn.Sequential):
    """``nn.Sequential`` that keeps only the tensors for gradients; same results and keys."""

    def forward(self, x: Tensor) -> Tensor:
        return run(self, x)


def run(layers: Iterable[nn.Module], x: Tensor) -> Tensor:
    """``x`` through ``layers``, one after the other."""
    layers = list(layers)
    if not runs_eagerly():
        for layer in layers:
            x = layer(x)
        return x
    new = False  # whether nothing else reads the memory of x
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        if not calls_only_forward(layer):
            x, new = layer(x), False
        elif new and _works_in_place(layer, following) and not x._is_view():
            x = _IN_PLACE[type(layer)](layer, x)
            new = False  # kept by the gradient
        else:
            x = _run_one(layer, x)
            new = type(layer) in _MAKERS or (new and type(layer) is nn.Identity)
    return x


def _works_in_place(layer: nn.Module, following: nn.Module | None) -> bool:
    if type(layer) not in _IN_PLACE:
        return False
    # out of place, the gradients of these two read the input; in place, the output
    factor = getattr(layer, "negative_slope", getattr(layer, "alpha", None))
    return factor is None or (factor >= 0 and not getattr(following, "inplace", False))


def _run_one(layer: nn.Module, x: Tensor) -> Tensor:
    if type(layer) is nn.Dropout and layer.training and 0 < layer.p < 1:
        return torch.native_dropout(x, layer.p, True)[0]  # the same draws, but a mask of bytes
    if x.requires_grad and _needs_shape_alone(layer):
        with keeping_shape_of(x):
            return layer(x)
    return layer(x)


def _needs_shape_alone(layer: nn.Module) -> bool:
    """Whether the gradient reads only the shape of the layer's input."""
    if type(layer) in _BATCH_NORMS and (layer.training or layer.running_mean is None):
        return False
    if type(layer) not in (*_CONVS, *_BATCH_NORMS, nn.AvgPool2d):
        return False
    # by attribute: a computed weight (of a hypernetwork) is no parameter of the layer
    tensors = (getattr(layer, name, None) for name in ("weight", "bias"))
    return not any(t is not None and t.requires_grad for t in tensors)
