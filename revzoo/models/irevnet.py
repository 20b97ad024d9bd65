"""i-RevNets: networks that are invertible from the image to the last feature map.

    (x1, x2) -> (psi(x2), psi(x1) + F(x2))      psi: squeeze, at the first block of a stage

J.-H. Jacobsen, A. Smeulders, E. Oyallon, "i-RevNet: Deep Invertible Networks", ICLR 2018, arXiv
1802.07088, and its PyTorch release. Channel orders, constants and places of dropout follow the
release, so its weights fit (see :func:`revzoo.load_published`). A *bijective* network derives its
widths from the image's channels. An *injective* network is wider: it appends channels of zeros.

F is three 3x3 convolutions, the first with the stride. We write a block that squeezes as a squeeze
of both streams and a coupling whose branch undoes the squeeze::

    (u1, u2) = (psi(x1), psi(x2)),   (u1, u2) -> (u2, u1 + F(psi^-1(u2)))

So one kind of coupling, with one replay rule, serves all blocks.

The release averages over a window of fixed size, the size of the last map of its training images.
We average over the whole map: equal for these images, and defined for all sizes. The inverse of the
padding keeps the wrong channels in the release (29 of 32 for CIFAR); ours strips the zeros.
"""

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import ClassVar

from torch import Tensor, nn

from revzoo._checks import check_count, check_probability
from revzoo.core.invertible import Step
from revzoo.layers.coupling import AdditiveCoupling
from revzoo.layers.padding import RECOMPUTED, ChannelPadding, PaddedCoupling
from revzoo.layers.rearrange import Squeeze, unsqueezed
from revzoo.layers.streams import Merge, Split
from revzoo.models.components import (
    Branch,
    NormAct,
    NormKind,
    check_stages,
    drop_path_rates,
)
from revzoo.models.network import ConvolutionalClassifier, FeatureInfo, feature_infos

# BatchNorm in the release: torch's defaults, except momentum 0.9 (torch's convention) in the head,
# so the head's running statistics follow the last few batches.
MOMENTUM = 0.1
HEAD_MOMENTUM = 0.9
EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class IRevNetVariant:
    """One row of the table of i-RevNets.

    Attributes:
        units: number of blocks of each stage.
        strides: stride of the first block of each stage, 1 or 2.
        channels: channels *per stream* of each stage: four times the previous number for stride 2,
            at least the previous number for stride 1 (zeros are appended). None for the bijective
            network, whose numbers follow from the image's channels.
        squeeze: factor of the squeeze before the first block; 1 for none.
        bottleneck: output width of a branch over its inner width.
        dropout: probability of dropping a value of a branch's second convolution.
        norm: ``"batch"``, ``"group"`` or ``"none"``, see
            :class:`~revzoo.models.components.NormAct`.
        activation: a name in :data:`~revzoo.models.components.ACTIVATIONS`.
        image_size: side in pixels of the publication's images; other sizes work, too.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    units: tuple[int, ...]
    strides: tuple[int, ...]
    channels: tuple[int, ...] | None = None
    squeeze: int = 1
    bottleneck: int = 4
    dropout: float = 0.0
    norm: NormKind = "batch"
    activation: str = "relu"
    image_size: int = field(default=32, compare=False)

    def __post_init__(self) -> None:
        bijective = self.channels is None
        check_stages(self, "units", "strides", *(() if bijective else ("channels",)))
        for name in ("squeeze", "image_size", "bottleneck"):
            check_count(name, getattr(self, name))
        check_probability("dropout", self.dropout)
        NormAct(self.norm, self.activation)  # refuses unknown names
        if not set(self.strides) <= {1, 2}:
            raise ValueError(f"strides={self.strides}: expected 1 (none) or 2 (a squeeze)")

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of it, for the squeezes."""
        return self.squeeze * math.prod(self.strides)

    def norm_act(self, momentum: float) -> NormAct:
        """Normalisation (with ``momentum``) and activation."""
        return NormAct(self.norm, self.activation, momentum, EPSILON)

    def widths(self, in_chans: int) -> list[tuple[int, int]]:
        """Channels of both streams before and after each stage's zero padding, squeezes included.

        Raises:
            ValueError: the channels do not fit the image, or the stage before.
        """
        widths = []
        width = in_chans * self.squeeze**2
        for stage, stride in enumerate(self.strides):
            width *= stride**2  # the squeeze of the first block
            after = width if self.channels is None else 2 * self.channels[stage]
            if after < width or (stride > 1 and after != width):
                raise ValueError(
                    f"channels={self.channels}: stage {stage} receives {width} channels (images of "
                    f"{in_chans}, squeezed), so it cannot have 2x{after // 2}: "
                    "expected four times the channels for stride 2, at least as many for stride 1; "
                    "channels=None derives them from the image"
                )
            if after // stride**2 % 2:  # only the first stage can start from an odd number
                raise ValueError(
                    f"images of {in_chans} channels, squeezed by {self.squeeze}, give "
                    f"{after // stride**2} channels, which cannot be split in two streams: use "
                    "squeeze=2, or a first stage of stride 1 with channels=(...), which appends "
                    "zeros"
                )
            if after // 2 < self.bottleneck:
                raise ValueError(
                    f"bottleneck={self.bottleneck}: expected at most {after // 2}, the channels of "
                    f"a stream in stage {stage}"
                )
            widths.append((width, after))
            width = after
        return widths


# The release's networks, named after their depth: three convolutions per block, one linear layer.
# 163: CIFAR, injective. 301: ImageNet, bijective, (b) in the paper. 13: ours, for 8x8 digits.
IREVNETS: dict[str, IRevNetVariant] = {
    "irevnet163": IRevNetVariant(
        units=(18, 18, 18), strides=(1, 2, 2), channels=(16, 64, 256), dropout=0.1
    ),
    # Not published: irevnet163 with a quarter of its blocks, for trainings on a CPU.
    "irevnet43": IRevNetVariant(units=(5, 5, 4), strides=(1, 2, 2), channels=(16, 64, 256)),
    "irevnet301": IRevNetVariant(
        units=(6, 16, 72, 6), strides=(2, 2, 2, 2), squeeze=2, image_size=224
    ),
    "irevnet13": IRevNetVariant(units=(2, 2), strides=(1, 2), channels=(16, 64), image_size=8),
}

# Layers of a block in the release, by their index in its Sequential; the gaps are ReLUs and
# dropout, without tensors. The very first block has no leading BN-ReLU.
FIRST_BLOCK = {"conv1": 0, "norm2": 1, "conv2": 3, "norm3": 5, "conv3": 7}
OTHER_BLOCKS = {"norm1": 0, "conv1": 2, "norm2": 3, "conv2": 5, "norm3": 7, "conv3": 9}


class IRevNet(ConvolutionalClassifier):
    """i-RevNet, ``(B, in_chans, H, W) -> (B, num_classes)``; every step has an inverse.

    Height and width must be multiples of the product of all squeezes (4 for CIFAR, 32 for
    ImageNet).

    Example:
        >>> from revzoo.models.irevnet import IREVNETS, IRevNet
        >>> model = IRevNet(IREVNETS["irevnet13"], in_chans=1, memory="exact").eval()
        >>> x = torch.randint(256, (2, 1, 8, 8)) / 256
        >>> torch.equal(model.inverse(model.encode(x)), x)
        True
    """

    default_memory: ClassVar[str] = "exact"
    size_reason: ClassVar[str] = "squeezes them"

    def __init__(
        self,
        variant: IRevNetVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        widths = variant.widths(in_chans)
        self.num_features = widths[-1][1]
        stem: list[Step] = [Split()]
        if (added := widths[0][1] - widths[0][0]) > 0:
            stem.insert(0, ChannelPadding(added))
        if variant.squeeze > 1:
            stem.insert(0, Squeeze(variant.squeeze, order="irevnet", streams=1))
        self._build(variant, stem, _stages(variant, widths, drop_path_rate))
        norm_act = variant.norm_act(HEAD_MOMENTUM)
        self._append_head(norm_act, num_classes, drop_rate, memory, global_pool)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """Each stage's last map, streams merged."""
        widths = (after for _, after in self.variant.widths(self.in_chans))
        squeezes = accumulate(self.variant.strides, mul, initial=self.variant.squeeze)
        return feature_infos(widths, list(squeezes)[1:])

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module of the release, and the one here."""
        branches = (name for name, m in self.named_modules() if isinstance(m, Branch))
        for block, branch in enumerate(branches):
            for layer, place in (OTHER_BLOCKS if block else FIRST_BLOCK).items():
                yield f"stack.{block}.bottleneck_block.{place}", f"{branch}.{layer}"
        yield from (("bn1", "norm"), ("linear", "fc"))

    def forward_with_representation(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and the representation of :meth:`encode`: the release's ``forward``."""
        z = self.encode(x)
        return self.forward_head(self.normed(z, last=True)), z


def _stages(
    variant: IRevNetVariant, widths: list[tuple[int, int]], drop_path_rate: float
) -> Iterator[list[Step]]:
    rates = iter(drop_path_rates(drop_path_rate, sum(variant.units)))
    since_padding = RECOMPUTED  # blocks since the last zero padding; none yet
    for index, (before, width) in enumerate(widths):
        stream, steps = width // 2, list[Step]()
        if width > before:
            since_padding = 0
            if index > 0:  # the stem pads for the first stage
                steps += (Merge(), ChannelPadding(width - before), Split())
        if variant.strides[index] > 1:
            steps.append(Squeeze(2, order="irevnet"))
        for block in range(variant.units[index]):
            stride = variant.strides[index] if block == 0 else 1
            branch: nn.Module = Branch(
                stream // stride**2,
                out_channels=stream,
                kernels=(3, 3, 3),
                inner=stream // variant.bottleneck,
                stride=stride,
                activate_first=bool(index or block),  # the first block reads the image itself
                dropout=variant.dropout,
                dropout_at_conv=True,  # as in the release
                drop_path=next(rates),
                norm_act=variant.norm_act(MOMENTUM),
            )
            if stride > 1:
                branch = nn.Sequential(OrderedDict(unsqueeze=_Unsqueezed(), branch=branch))
            # streams that are still partly zero take less memory, see revzoo.layers.padding
            if since_padding < RECOMPUTED:
                filled = max(0, before - stream) if since_padding == 0 else None
                steps.append(PaddedCoupling(branch, filled=filled))
            else:
                steps.append(AdditiveCoupling(branch))
            since_padding += 1
        yield steps


class _Unsqueezed(nn.Module):
    """The stream before its squeeze."""

    def forward(self, x: Tensor) -> Tensor:
        return unsqueezed(x, (2, 2), order="irevnet")
