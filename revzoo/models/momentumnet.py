"""Momentum ResNets: residual networks with a velocity, which makes their blocks invertible.

    v <- gamma v + (1 - gamma) F(x),   x <- x + v          v = 0 at the start of each stage

M. Sander, P. Ablin, M. Blondel, G. Peyré, "Momentum Residual Neural Networks", ICML 2021, arXiv
2102.07870. Layers, epsilons and initial values follow its PyTorch release (michaelsdr/momentumnet,
MIT). A network has the parameters of torchvision's ResNet of the same depth; with the stem for
CIFAR, of 3x3 without pooling, or for ImageNet.

    image -> stem -> stages: transition, momentum blocks -> x -> average pool -> [dropout] -> linear

    F           basic: two 3x3 convolutions; bottleneck: 1x1, 3x3 with the stride, 1x1; each with
                BN, and ReLU between them
    transition  y = ReLU(s(x) + F(x));  s: the identity, or 1x1 convolution - BN

The streams are x and v. The transition of a stage drops v, so it has no inverse, nor has the stem.
They store their input and are recomputed from it. Features and maps are x alone.

For each value the release keeps the bits that the products with gamma drop in one integer of 64
bits (Maclaurin et al. 2015, arXiv 1502.03492), which overflows after about 300 blocks with gamma
0.9, unnoticed. Its backward pass counts each batch twice in the running statistics.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from revzoo.core.invertible import State, Step
from revzoo.layers.momentum import MomentumBlock
from revzoo.models.components import PlainStem
from revzoo.models.lean import Lean
from revzoo.models.network import ConvolutionalClassifier, FeatureInfo, feature_infos
from revzoo.models.revnet import ResidualRow


@dataclass(frozen=True, slots=True, kw_only=True)
class MomentumNetVariant(ResidualRow):
    """One row of the table of Momentum ResNets. Numbers of channels leave out the velocity's.

    Attributes:
        gamma: the momentum, at least 0.001 and below 1.
    """

    widths: tuple[int, ...] = (64, 128, 256, 512)
    strides: tuple[int, ...] = (1, 2, 2, 2)
    gamma: float = 0.9

    @property
    def size_multiple(self) -> int:
        """Images of any size fit: all convolutions are padded."""
        return 1


# The networks of the release, for CIFAR. The paper trains 18 and 101 on CIFAR-10 and CIFAR-100.
MOMENTUMNETS: dict[str, MomentumNetVariant] = {
    "momentumnet18": MomentumNetVariant(units=(2, 2, 2, 2)),
    "momentumnet34": MomentumNetVariant(units=(3, 4, 6, 3)),
    "momentumnet101": MomentumNetVariant(units=(3, 4, 23, 3), branch="bottleneck"),
    "momentumnet152": MomentumNetVariant(units=(3, 8, 36, 3), branch="bottleneck"),
}


class MomentumTransition(Step):
    """The first block of a stage: ``x`` or ``(x, v)`` to ``(y, 0)``, ``y = ReLU(s(x) + F(x))``."""

    outputs = 2

    def __init__(self, branch: nn.Module, *, shortcut: nn.Module, streams: int) -> None:
        super().__init__()
        self.branch, self.shortcut, self.streams = branch, shortcut, streams

    def forward(self, x: Tensor, *v: Tensor) -> State:
        y = torch.relu_(self.shortcut(x) + self.branch(x))
        return y, torch.zeros_like(y)


class MomentumNet(ConvolutionalClassifier):
    """Momentum ResNet, ``(B, in_chans, H, W) -> (B, num_classes)``; any image size.

    Example:
        >>> from revzoo.models.momentumnet import MOMENTUMNETS, MomentumNet
        >>> MomentumNet(MOMENTUMNETS["momentumnet18"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "exact"
    size_reason: ClassVar[str] = "halves the size from stage to stage"
    input_layer = "stem.steps.0.conv"

    def __init__(
        self,
        variant: MomentumNetVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        self.num_features = variant.stage_channels[-1]
        width, large = variant.widths[0], variant.downsampling_stem
        stem = PlainStem(
            conv=_conv(in_chans, width, *((7, 2) if large else (3, 1))),
            norm=nn.BatchNorm2d(width),
            relu=nn.ReLU(),
            pool=nn.MaxPool2d(3, stride=2, padding=1) if large else nn.Identity(),
        )
        inputs = (width, *variant.stage_channels[:-1])
        stages = (_stage(variant, i, channels) for i, channels in enumerate(inputs))
        self._build(variant, [stem], stages)
        self._assemble(num_classes, drop_rate, memory, global_pool)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The maps x after each stage."""
        return feature_infos(self.variant.stage_channels, self.variant.reductions)

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        return z  # each branch ends in a normalisation

    def encode(self, x: Tensor) -> Tensor:
        return self._last_streams(x)[0]

    def stage_states(self, x: Tensor) -> Iterator[State]:
        for state in super().stage_states(x):
            yield state[:1]

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module in the release's networks, and the one here."""
        yield from (("conv1", "stem.steps.0.conv"), ("bn1", "stem.steps.0.norm"), ("fc", "fc"))
        for stage, units in enumerate(self.variant.units):
            theirs, ours = f"layer{stage + 1}", f"stages.{stage}.steps"
            for i, name in (("0", "conv"), ("1", "norm")):
                yield f"{theirs}.0.downsample.{i}", f"{ours}.0.shortcut.{name}"
            for j in range(units):
                unit = f"{theirs}.1.network.{j - 1}" if j else f"{theirs}.0"
                for layer in range(1, 4):
                    yield f"{unit}.conv{layer}", f"{ours}.{j}.branch.conv{layer}"
                    yield f"{unit}.bn{layer}", f"{ours}.{j}.branch.norm{layer}"


def _stage(variant: MomentumNetVariant, index: int, in_channels: int) -> Iterator[Step]:
    inner, out = variant.widths[index], variant.stage_channels[index]
    stride, basic = variant.strides[index], variant.branch == "basic"

    def branch(channels: int, stride: int) -> nn.Module:
        kernels = ((3, stride), (3, 1)) if basic else ((1, 1), (3, stride), (1, 1))
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for i, (kernel, step) in enumerate(kernels, start=1):
            last = i == len(kernels)
            width = out if last else inner
            layers[f"conv{i}"] = _conv(channels, width, kernel, step)
            layers[f"norm{i}"] = nn.BatchNorm2d(width)
            if not last:
                layers[f"relu{i}"] = nn.ReLU()
            channels = width
        return Lean(layers)

    shortcut: nn.Module = nn.Identity()
    if stride > 1 or in_channels != out:
        conv = _conv(in_channels, out, 1, stride)
        shortcut = Lean(OrderedDict(conv=conv, norm=nn.BatchNorm2d(out)))
    first = branch(in_channels, stride)
    yield MomentumTransition(first, shortcut=shortcut, streams=2 if index else 1)
    for _ in range(1, variant.units[index]):
        yield MomentumBlock(branch(out, 1), variant.gamma)


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int) -> nn.Conv2d:
    """Padded convolution without bias; He et al. 2015, arXiv 1502.01852, as in the release."""
    layer = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False
    )
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
