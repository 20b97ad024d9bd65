"""Every invertible layer without a branch, with the shape of one stream that it is tried on."""

import torch

from revzoo import (
    ActNorm,
    ChannelPermutation,
    HaarSqueeze,
    InjectiveLinear,
    InvertibleBatchNorm,
    InvertibleConv1x1,
    InvertibleFlatten,
    InvertibleLeakyReLU,
    InvertibleLinear,
    PatchConv,
    Reversed,
    SpatialPadding,
    Squeeze,
)

IMAGE, TOKENS = (2, 4, 4), (3, 4)  # channels 2 + 2, features 4 + 4
SIGNAL, VOLUME = (2, 6), (2, 2, 4, 6)
LAYERS = {
    "squeeze": (lambda: Squeeze(2), IMAGE),
    "haar": (HaarSqueeze, IMAGE),
    "haar, bands together": (lambda: HaarSqueeze(order="irevnet"), IMAGE),
    "permutation": (lambda: ChannelPermutation(4, seed=3), IMAGE),
    "permutation of tokens": (lambda: ChannelPermutation(8, order="reverse", dim=-1), TOKENS),
    "conv1x1, plu": (lambda: InvertibleConv1x1(4), IMAGE),
    "conv1x1, orthogonal": (lambda: InvertibleConv1x1(4, matrix="orthogonal"), IMAGE),
    "linear, plu": (lambda: InvertibleLinear(8), TOKENS),
    "linear, orthogonal": (lambda: InvertibleLinear(8, matrix="orthogonal"), TOKENS),
    "actnorm": (lambda: ActNorm(4), IMAGE),
    "actnorm of tokens": (lambda: ActNorm(8, dim=-1), TOKENS),
    "batchnorm": (lambda: InvertibleBatchNorm(4), IMAGE),
    "batchnorm of tokens": (lambda: InvertibleBatchNorm(8, dim=-1), TOKENS),
    "flatten": (lambda: InvertibleFlatten(IMAGE), IMAGE),
    "leaky relu": (lambda: InvertibleLeakyReLU(0.2), IMAGE),
    "squeeze of signals": (lambda: Squeeze((3,)), SIGNAL),
    "squeeze of volumes": (lambda: Squeeze((1, 2, 3), order="irevnet"), VOLUME),
    "squeeze of rows": (lambda: Squeeze((2, 1)), IMAGE),
    "flatten, from 2": (lambda: InvertibleFlatten(IMAGE, start_dim=2), IMAGE),
    "flatten, 1 to 2": (lambda: InvertibleFlatten(IMAGE, end_dim=2), IMAGE),
    "batchnorm of the batch": (lambda: InvertibleBatchNorm(4, statistics="batch"), IMAGE),
    "linear with bias": (lambda: InjectiveLinear(8, 8, matrix="plu"), TOKENS),
    "linear, wider": (lambda: InjectiveLinear(8, 12), TOKENS),
    "linear, wider, plu": (lambda: InjectiveLinear(4, 6, matrix="plu", dim=1, bias=False), IMAGE),
    "patches": (lambda: PatchConv(4, 20, 2), IMAGE),
    "patches, square": (lambda: PatchConv(4, 8, (2,), matrix="plu"), SIGNAL),
    "frame of zeros": (lambda: SpatialPadding((1, 0, 2, 1)), IMAGE),
    "frame, reflected": (lambda: SpatialPadding(1, mode="reflect"), IMAGE),
    "frame, replicated": (lambda: SpatialPadding(2, mode="replicate"), IMAGE),
    "frame, circular": (lambda: SpatialPadding((1, 2), mode="circular"), SIGNAL),
    "reversed conv1x1": (lambda: Reversed(InvertibleConv1x1(4)), IMAGE),
    "reversed actnorm": (lambda: Reversed(ActNorm(4)), IMAGE),
}
MOVES = ("squeeze", "permutation", "flatten", "frame")  # so begin the names of exact layers
EXACT = {name for name in LAYERS if name.startswith(MOVES)}
INJECTIVE = {name for name in LAYERS if name.startswith(("frame", "linear, wider"))} | {"patches"}


def build(name):
    """The layer in float64, with parameters and buffers far from their initial values."""
    torch.manual_seed(0)
    layer = LAYERS[name][0]().double()
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.1 * torch.randn_like(p)
        for m in layer.modules():
            if isinstance(m, ActNorm):
                m.initialised.fill_(True)
            if isinstance(m, InvertibleBatchNorm):
                m.running_mean.normal_()
                m.running_var.uniform_(0.5, 2)
    return layer


def inputs(name, *, batch=3, seed=1):
    """Two streams in float64."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch, *LAYERS[name][1])
    return tuple(torch.randn(shape, dtype=torch.float64, generator=generator).unbind())
