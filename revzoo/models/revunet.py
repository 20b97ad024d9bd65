"""The reversible 3D U-Net: a plain U-Net whose levels are chains of reversible blocks.

    encoder   x[l+1] = conv1(maxpool(y[l]))            y[l] = blocks(x[l])
    decoder   y[l]  += up(conv1(z[l+1]))               z[l] = blocks(y[l])

R. Bruegger, C. F. Baumgartner, E. Konukoglu, "A Partially Reversible U-Net for Memory-Efficient
Volumetric Image Segmentation", MICCAI 2019, arXiv 1906.06148. Layers, epsilons and initial values
follow ``experiments/noNewReversible.py`` of its release (RobinBruegger/PartiallyReversibleUnet,
BSD-3), before the sigmoid at its end. A block is that of Gomez et al. 2017, arXiv 1707.04585, with
F and G = GN - leaky ReLU - conv.

    volume -> conv -> [ encoder, decoder ] -> [dropout] -> conv1 -> map of classes

In the release only the blocks are reversible: it stores the output of each level. Here the streams
are all levels. Pooling appends a level, and its inverse drops it; upsampling adds a function of one
level to the level above, which is a coupling. So everything between the first and the last
convolution comes back from the last state, and mode ``exact`` works as usual. That state holds the
coarser levels, too: with the published widths 1.33 times the values of the finest one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from torch import Tensor, nn

from revzoo._checks import check_choice, check_count
from revzoo.core.invertible import Step
from revzoo.layers.pyramid import LevelCoupling, Rearranged
from revzoo.layers.streams import Merge, halves
from revzoo.models.components import check_stages
from revzoo.models.dense import DenseNetwork, layer_for
from revzoo.models.revcol import FirstLevel

SLOPE = 0.01  # of the leaky ReLUs, torch's default
UPSAMPLINGS = {1: "linear", 2: "bilinear", 3: "trilinear"}
MERGE = Merge()


@dataclass(frozen=True, slots=True, kw_only=True)
class RevUNetVariant:
    """One row of the table of reversible U-Nets.

    Attributes:
        dims: 1 for signals, 2 for images, 3 for volumes.
        channels: of each level, the finest first; even.
        units: number of reversible blocks of each level, in the encoder and in the decoder.
        groups: of the normalisations; divides half of each number of channels.
        image_size: side of an image, for audits and commands; other sizes work, too.

    Raises:
        ValueError: a field is out of range, or the sequences differ in length.
    """

    dims: int = 3
    channels: tuple[int, ...]
    units: tuple[int, ...]
    groups: int
    image_size: int = field(default=128, compare=False)

    def __post_init__(self) -> None:
        check_choice("dims", self.dims, (1, 2, 3))
        check_stages(self, "channels", "units")
        check_count("groups", self.groups)
        check_count("image_size", self.image_size)
        if any(c % (2 * self.groups) for c in self.channels):
            raise ValueError(
                f"channels={self.channels}: expected multiples of {2 * self.groups}, twice "
                f"groups={self.groups}"
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each axis."""
        return (2,) * self.dims

    @property
    def size_multiples(self) -> tuple[int, ...]:
        """Each size of an image must be a multiple of its number."""
        return (2 ** (len(self.channels) - 1),) * self.dims


# The release crops volumes to 128 x 128 x 128.
REVUNETS: dict[str, RevUNetVariant] = {
    "revunet3d": RevUNetVariant(
        channels=(60, 120, 240, 360, 480), units=(1, 1, 1, 1, 1), groups=30
    ),
}


class RevUNet(DenseNetwork):
    """Reversible U-Net, ``(B, in_chans, *sizes) -> (B, num_classes, *sizes)``.

    Sizes must be multiples of :attr:`RevUNetVariant.size_multiples`. The feature maps are those of
    the encoder, from the finest level to the coarsest, then of the decoder, back to the finest.

    Example:
        >>> from revzoo.models.revunet import REVUNETS, RevUNet
        >>> model = RevUNet(REVUNETS["revunet3d"], num_classes=3, in_chans=4)
        >>> model(torch.zeros(1, 4, 16, 16, 32)).shape
        torch.Size([1, 3, 16, 16, 32])
    """

    stem_bias = False

    def build_stages(self, variant: RevUNetVariant) -> Iterator[dict[str, Step]]:
        return _stages(variant)

    def map_at(self, stage: int) -> tuple[int, ...]:
        level = self.levels[stage]
        return (level, level + 1) if stage < len(self.levels) - 1 else (level,)

    def encode(self, x: Tensor) -> Tensor:
        return self._last_streams(x)[0]

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module or tensor in the release's file, and the one here, of the same shape."""
        yield from (("firstConv", "stem.steps.0.conv"), ("lastConv", "fc"))
        last = len(self.variant.channels) - 1
        for level, units in enumerate(self.variant.units):
            down, up = f"stages.{level}.steps", f"stages.{2 * last - level}.steps"
            above = f"stages.{2 * last - level + 1}.steps"
            yield f"encoders.{level}.conv", f"{down}.down.branch.conv"
            yield f"decoders.{last - level}.conv", f"{above}.up.branch.conv"
            sides = (
                (f"encoders.{level}", f"{down}.encoder"),
                (f"decoders.{last - level}", f"{up}.decoder"),
            )
            for (theirs, ours), i, (at, block) in product(
                sides, range(units), enumerate(("f", "g"))
            ):
                module = f"{theirs}.reversibleBlocks.reversible_blocks.{i}.{block}_block"
                for layer, name in (("gn", 0), ("conv", 2)):
                    yield f"{module}.{layer}", f"{ours}{2 * i + at}.branch.{name}"


def _stages(variant: RevUNetVariant) -> Iterator[dict[str, Step]]:
    """The named steps of each stage: the levels of the encoder, then those of the decoder.

    The streams are the levels above, the halves of the present one, and the levels below.
    """
    channels, last = variant.channels, len(variant.channels) - 1
    dims, conv = variant.dims, layer_for(variant.dims, "Conv")

    def residual(width: int) -> nn.Module:
        """F and G of a block."""
        return nn.Sequential(
            nn.GroupNorm(variant.groups, width),
            nn.LeakyReLU(SLOPE, inplace=True),
            conv(width, width, 3, padding=1, bias=False),
        )

    def couplings(level: int, name: str, streams: int) -> dict[str, Step]:
        steps: dict[str, Step] = {}
        for j in range(2 * variant.units[level]):
            target, source = (level, level + 1) if j % 2 == 0 else (level + 1, level)
            steps[f"{name}{j}"] = LevelCoupling(
                residual(channels[level] // 2), target=target, source=source, streams=streams
            )
        return steps

    def split(level: int, streams: int) -> Step:
        return Rearranged(halves, MERGE.forward, at=level, streams=streams, takes=1, gives=2)

    def merge(level: int, streams: int) -> Step:
        return Rearranged(MERGE.forward, halves, at=level, streams=streams, takes=2, gives=1)

    for level in range(last + 1):
        steps: dict[str, Step] = {}
        if level:
            narrow = conv(channels[level - 1], channels[level], 1)
            down = nn.Sequential(OrderedDict(pool=layer_for(dims, "MaxPool")(2), conv=narrow))
            steps["merge"] = merge(level - 1, level + 1)
            steps["down"] = FirstLevel(down, level=level - 1)
        steps["split"] = split(level, level + 1)
        steps |= couplings(level, "encoder", level + 2)
        if level == last:
            steps |= couplings(level, "decoder", level + 2)
            if not level:
                steps["end"] = merge(0, 2)
        yield steps
    for level in reversed(range(last)):
        narrow = conv(channels[level + 1], channels[level], 1)
        wide = nn.Upsample(scale_factor=2, mode=UPSAMPLINGS[dims])
        up = nn.Sequential(OrderedDict(conv=narrow, up=wide))
        steps = {"merge": merge(level + 1, last + 2)}
        steps["up"] = LevelCoupling(up, target=level, source=level + 1, streams=last + 1)
        steps["split"] = split(level, last + 1)
        steps |= couplings(level, "decoder", last + 2)
        if not level:
            steps["end"] = merge(0, last + 2)
        yield steps
