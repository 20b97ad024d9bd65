"""i-ResNets: residual networks on all channels, invertible since their branches are contractions.

    y = x + F(s x + b),  Lip(F) < 1          s, b: ActNorm

J. Behrmann, W. Grathwohl, R. Chen, D. Duvenaud, J.-H. Jacobsen, "Invertible Residual Networks",
ICML 2019, arXiv 1811.00995. Layers, constants and initial values follow its PyTorch release
(jhjacobsen/invertible-resnet, MIT), ``iresnet64`` its script for CIFAR-10 (7 blocks a stage; one
power iteration in each pass).

    image -> zero channels -> stages: [squeeze], blocks -> BN - ReLU - average pool - linear
    F         [ELU -] 3x3 convolution - ELU - 1x1 convolution - ELU - 3x3 convolution

Every step has an inverse, a fixed-point iteration in each block. So training in mode ``invert``
evaluates a block 10 times or more, and raises where that does not converge; the default is
``recompute``. There is no mode ``exact``. ``model.stages`` are flows with ``log_det``.

As in the release, the first block after a squeeze finds its singular values on maps of twice the
size, which bounds them on its own, and divisors of 3x3 convolutions are 1e-5 larger.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

import torch
from torch import Tensor, nn

from revzoo._checks import check_count
from revzoo.core.invertible import Step
from revzoo.layers.contractive import ContractiveBlock, ContractiveConv2d
from revzoo.layers.norm_act import ActNorm
from revzoo.layers.padding import ChannelPadding, ReadsZeros
from revzoo.layers.rearrange import Squeeze
from revzoo.models.components import NormAct, check_stages
from revzoo.models.network import ConvolutionalClassifier, FeatureInfo, feature_infos

# The release's. A channel of the zeros that pad the image has no spread: its scale is 1 / 0.003.
ACTNORM_EPSILON = 1e-5**0.5
HEAD = NormAct(momentum=0.9, epsilon=1e-5)
MARGIN = 1e-5
# tensors of the release without use here: left singular vectors and values, and a prior
UNUSED = ("weight_u", "weight_sigma", "prior_mu", "prior_logstd")


@dataclass(frozen=True, slots=True, kw_only=True)
class IResNetVariant:
    """One row of the table of i-ResNets.

    Attributes:
        units: number of blocks of each stage.
        inner: channels inside the branches of each stage.
        strides: 2 for a squeeze at the start of a stage, 1 for none.
        padding: channels of zeros that are appended to the image.
        coefficient: largest singular value of a convolution, above 0 and below 1.
        image_size: side in pixels of the publication's images; other sizes work, too.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    units: tuple[int, ...]
    inner: tuple[int, ...]
    strides: tuple[int, ...] = (1, 2, 2)
    padding: int = 13
    coefficient: float = 0.9
    image_size: int = field(default=32, compare=False)

    def __post_init__(self) -> None:
        check_stages(self, "units", "inner", "strides")
        for name in ("padding", "image_size"):
            check_count(name, getattr(self, name))
        if not set(self.strides) <= {1, 2}:
            raise ValueError(f"strides={self.strides}: expected 1 (none) or 2 (a squeeze)")

    @property
    def reductions(self) -> tuple[int, ...]:
        """Image side over map side, after each stage."""
        return tuple(accumulate(self.strides, mul))

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of it, for the squeezes."""
        return math.prod(self.strides)

    def widths(self, in_chans: int) -> tuple[int, ...]:
        """Channels of each stage: a squeeze has four times as many."""
        return tuple((in_chans + self.padding) * r**2 for r in self.reductions)


IRESNETS: dict[str, IResNetVariant] = {
    "iresnet64": IResNetVariant(units=(7, 7, 7), inner=(32, 64, 128)),
}


class PaddedActNorm(ReadsZeros, ActNorm):
    """The first ActNorm, which reads the channels of zeros."""


class PaddedBlock(ReadsZeros, ContractiveBlock):
    """The first block; after it, every channel depends on the image."""


class IResNet(ConvolutionalClassifier):
    """i-ResNet, ``(B, in_chans, H, W) -> (B, num_classes)``; every step has an inverse.

    Height and width must be multiples of 4. The first training batch sets the ActNorms.

    Example:
        >>> from revzoo.models.iresnet import IRESNETS, IResNet
        >>> IResNet(IRESNETS["iresnet64"])(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "recompute"
    streams: ClassVar[int] = 1
    size_reason: ClassVar[str] = "squeezes them"

    def __init__(
        self,
        variant: IResNetVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        widths = variant.widths(in_chans)
        self.num_features = widths[-1]
        padding = ChannelPadding(variant.padding)
        stages = (_stage(variant, i, width) for i, width in enumerate(widths))
        self._build(variant, [padding], stages)
        self._append_head(HEAD, num_classes, drop_rate, memory, global_pool)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The map after each stage."""
        return feature_infos(self.variant.widths(self.in_chans), self.variant.reductions)

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module or tensor of the release, and the one here."""
        yield from (("bn1", "norm"), ("logits", "fc"))
        norms = (name for name, m in self.named_modules() if isinstance(m, ActNorm))
        blocks = (name for name, m in self.named_modules() if isinstance(m, ContractiveBlock))
        for i, (norm, block) in enumerate(zip(norms, blocks, strict=True)):
            for name in ("log_scale", "shift"):
                yield f"stack.{i}.actnorm._{name}", f"{norm}.{name}"
            for layer in range(6):
                theirs, ours = f"stack.{i}.bottleneck_block.{layer}", f"{block}.branch.{layer}"
                yield from ((theirs, ours), (f"{theirs}.weight_orig", f"{ours}.weight"))
                yield f"{theirs}.weight_v", f"{ours}.vector"

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        kept = {key: t for key, t in tensors.items() if not key.endswith(UNUSED)}
        adapted = dict(super().adapt_state_dict(kept))
        if not any(key.endswith("weight_v") for key in tensors):  # ours, or parameters alone
            return adapted
        for name, buffer in self.named_buffers():
            if name.endswith("initialised"):
                adapted[name] = torch.tensor(True)
            elif name.endswith("vector") and (flat := adapted.get(name)) is not None:
                if flat.numel() == buffer.numel():
                    adapted[name] = flat.view_as(buffer)
                elif flat.numel() == buffer.shape[1]:  # of a 1x1 convolution: of one pixel
                    pixels = buffer[0, 0].numel()
                    adapted[name] = (flat.view(1, -1, 1, 1) / pixels**0.5).expand_as(buffer)
        return adapted


def _stage(variant: IResNetVariant, index: int, width: int) -> Iterator[Step]:
    if variant.strides[index] > 1:
        yield Squeeze(2, order="irevnet", streams=1)
    inner = variant.inner[index]

    def conv(channels: int, outputs: int, kernel_size: int) -> nn.Module:
        return ContractiveConv2d(
            channels,
            outputs,
            kernel_size,
            size=(side, side),
            coefficient=variant.coefficient,
            margin=MARGIN if kernel_size > 1 else 0.0,
        )

    for block in range(variant.units[index]):
        # before the squeeze in a stage's first block, see the top of this file
        reduction = variant.reductions[index] if block else (1, *variant.reductions)[index]
        side = -(-variant.image_size // reduction)
        layers = (conv(width, inner, 3), nn.ELU(), conv(inner, inner, 1), nn.ELU())
        first = not (index or block)  # it reads the image itself
        norm, residual = (PaddedActNorm, PaddedBlock) if first else (ActNorm, ContractiveBlock)
        before = () if first else (nn.ELU(),)
        yield norm(width, streams=1, epsilon=ACTNORM_EPSILON)
        yield residual(nn.Sequential(*before, *layers, conv(inner, width, 3)))
