"""iUNets: U-Nets that are bijective between their first and last convolution, in 1 to 3 dimensions.

    x -> couplings -> mix -> (skip, squeeze and rotate the rest) -> next level
    y <- couplings <- mix <- coupling <- (skip, unsqueeze the rotated) <- next level

C. Etmann, R. Ke, C.-B. Schoenlieb, "iUNets: learnable invertible up- and downsampling for
large-scale inverse problems", MLSP 2020, arXiv 2005.05220. Layers, epsilons and initial values
follow the release (cetmann/iunets, MIT). A level has half the resolution of the one above. Some
channels of a level skip the levels below; the others are downsampled by a squeeze and a learned
rotation of each channel's block, which begins as a Haar wavelet. Before the split and after the
first coupling behind it, a learned rotation mixes the channels. A coupling is

    (x1, x2) -> (x2, x1 + F(x2)),   F = conv - IN - leaky ReLU - conv - IN - leaky ReLU

    image -> conv -> [ iUNet: stages ] -> [dropout] -> conv -> map of classes

The streams are the parts that skip, from level 0 on, and the two halves at the present level. The
first and last convolution are those of the release's examples. The release's network alone is
:attr:`IUNet.trunk`, which has an inverse.

Every step but the first convolution has an inverse, and mode ``exact`` undoes all of them bit for
bit: rotations are products of couplings, see :mod:`revzoo.layers.orthogonal`. The release stores
the activations of its learned down- and upsampling. Its own gradient of the Cayley transform is
wrong, so its rotations are not trained by the loss; ours is autograd's.

The release pads images that do not fit, and changes ``channels`` to the nearest that do; here both
are errors. It has Householder reflections, too, but uses only one of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice, check_count, counts_of
from revzoo.core.invertible import State, Step, label_steps
from revzoo.layers.orthogonal import ROTATIONS, OrthogonalMix, Rotation
from revzoo.layers.pyramid import LevelCoupling, Rearranged
from revzoo.layers.rearrange import Squeeze
from revzoo.layers.sequence import ReversibleSequence
from revzoo.layers.streams import halves
from revzoo.models.components import check_stages
from revzoo.models.dense import DenseNetwork, layer_for

SLOPE = 0.01  # of the leaky ReLUs, torch's default


@dataclass(frozen=True, slots=True, kw_only=True)
class IUNetVariant:
    """One row of the table of iUNets.

    Attributes:
        dims: 1 for signals, 2 for images, 3 for volumes.
        channels: of each level, the finest first. With m positions in a block of the squeeze, c
            channels give ``m (c - skipped)``, so not all numbers are possible.
        units: number of couplings of each level, in the encoder and in the decoder.
        stride: of each downsampling; or one for each axis, such as ``(1, 2, 2)``.
        convolutions: of a coupling's F.
        rotation: ``"cayley"``, or ``"exp"`` for the matrix exponential, which does not fit mode
            ``exact``.
        image_size: side of an image, for audits and commands; other sizes work, too.

    Raises:
        ValueError: a field is out of range, the sequences differ in length, or the channels do not
            fit.
    """

    dims: int
    channels: tuple[int, ...]
    units: tuple[int, ...]
    stride: int | tuple[int, ...] = 2
    convolutions: int = 2
    rotation: Rotation = "cayley"
    image_size: int = field(compare=False)

    def __post_init__(self) -> None:
        check_choice("dims", self.dims, (1, 2, 3))
        check_stages(self, "channels", "units")
        check_count("convolutions", self.convolutions)
        check_count("image_size", self.image_size)
        check_choice("rotation", self.rotation, ROTATIONS)
        if not isinstance(self.stride, int):  # configurations give lists
            object.__setattr__(self, "stride", counts_of(self.stride, repeat=0))
        if len(self.strides) != self.dims or math.prod(self.strides) < 2:
            raise ValueError(
                f"stride={self.stride}: expected a whole number of at least 2, or {self.dims} of "
                "at least 1, not all 1"
            )
        fitting = [self.channels[0]]
        for wanted in self.channels[1:]:
            fitting.append(self._block * (fitting[-1] - self._skipped(fitting[-1], wanted)))
        if self.channels != tuple(fitting) or min(fitting) < 2:
            raise ValueError(
                f"channels={self.channels}: expected at least 2, and {self._block} times a part of "
                f"the level above; the nearest that fit: {tuple(fitting)}"
            )

    @property
    def strides(self) -> tuple[int, ...]:
        """The stride of each axis."""
        return (self.stride,) * self.dims if isinstance(self.stride, int) else self.stride

    @property
    def _block(self) -> int:
        return math.prod(self.strides)

    def _skipped(self, channels: int, wanted: int) -> int:
        """Channels that skip the next level, which shall have ``wanted``."""
        return max(1, round(channels * (self._block - wanted / channels) / self._block))

    @property
    def skipped(self) -> tuple[int, ...]:
        """Channels of each level but the last that skip the levels below."""
        return tuple(map(self._skipped, self.channels, self.channels[1:]))

    @property
    def size_multiples(self) -> tuple[int, ...]:
        """Each size of an image must be a multiple of its number."""
        return tuple(b ** (len(self.channels) - 1) for b in self.strides)


# The release publishes no weights. iunet2d: its first example. The others: ours.
IUNETS: dict[str, IUNetVariant] = {
    "iunet1d": IUNetVariant(
        dims=1, channels=(64, 96, 128, 192), units=(2, 2, 2, 2), image_size=1024
    ),
    "iunet2d": IUNetVariant(
        dims=2, channels=(64, 128, 256, 384), units=(2, 2, 2, 2), image_size=256
    ),
    "iunet3d": IUNetVariant(dims=3, channels=(32, 64, 128, 256), units=(2, 2, 2, 2), image_size=64),
}

Move = Callable[..., Tensor | State]


def _split(odd: bool, x: Tensor) -> State:
    """The halves of a map; after an ``odd`` number of couplings the second is the first stream."""
    half = x.shape[1] // 2
    x1, x2 = halves(x, 1, (x.shape[1] - half, half) if odd else (half, x.shape[1] - half))
    return (x2, x1) if odd else (x1, x2)


def _join(odd: bool, x1: Tensor, x2: Tensor) -> Tensor:
    """The inverse of :func:`_split`."""
    return torch.cat((x2, x1) if odd else (x1, x2), dim=1)


def _slice(squeeze: Squeeze, skipped: int, odd: bool, x1: Tensor, x2: Tensor) -> State:
    """The first ``skipped`` channels of a level, and the squeezed others."""
    x = _join(odd, x1, x2)
    skip, rest = halves(x, 1, (skipped, x.shape[1] - skipped))
    return skip, squeeze.transform(rest)


def _unslice(squeeze: Squeeze, skipped: int, odd: bool, skip: Tensor, z: Tensor) -> State:
    """The inverse of :func:`_slice`."""
    return _split(odd, torch.cat((skip, squeeze.restore(z)), dim=1))


def _turn(before: bool, after: bool, x1: Tensor, x2: Tensor) -> State:
    """The halves in the order of :func:`_split` with ``after``, given that with ``before``."""
    return _split(after, _join(before, x1, x2))


def _branch(variant: IUNetVariant, before: int, after: int) -> nn.Sequential:
    """F of a coupling, from ``before`` channels to ``after``."""
    layers: list[nn.Module] = []
    for i in range(variant.convolutions):
        first = before if i == 0 else max(before, after)
        last = after if i == variant.convolutions - 1 else max(before, after)
        conv = layer_for(variant.dims, "Conv")(first, last, 3, padding=1, bias=False)
        nn.init.kaiming_uniform_(conv.weight, a=SLOPE, mode="fan_out", nonlinearity="leaky_relu")
        norm = layer_for(variant.dims, "InstanceNorm")(last, affine=True)
        layers += (conv, norm, nn.LeakyReLU(SLOPE, inplace=True))
    return nn.Sequential(*layers)


def haar(strides: Sequence[int], rotation: Rotation) -> Tensor:
    """The release's first weight ``(m, m)`` of a rotation: a Haar wavelet for strides of 2."""
    weight = torch.zeros(math.prod(strides), math.prod(strides))
    p = {"cayley": (-1 - math.sqrt(2), 0.5, -math.sqrt(0.5))}.get(rotation, (math.pi / 4,) * 3)
    if {*strides} != {2}:
        return weight  # the identity
    if len(strides) == 2:
        weight[0, 2:], weight[1, 2:] = p[1], -p[1]
        return weight
    for i, bit in product(range(len(weight)), (1, 2, 4)[: len(strides)]):
        if not i & bit:
            weight[i, i | bit] = p[len(strides) - 1]
    if len(strides) == 3 and rotation == "cayley":
        for i, sign in enumerate((1, -1, -1, 1)):
            weight[i, 7 - i] = sign * (1 + p[2])
    return weight


class IUNet(DenseNetwork):
    """iUNet, ``(B, in_chans, *sizes) -> (B, num_classes, *sizes)``.

    Sizes must be multiples of :attr:`IUNetVariant.size_multiples`. The feature maps are those of
    the encoder, from the finest level to the coarsest, then of the decoder, back to the finest.

    Example:
        >>> from revzoo.models.iunet import IUNETS, IUNet
        >>> model = IUNet(IUNETS["iunet2d"], num_classes=5)
        >>> model(torch.zeros(1, 3, 16, 32)).shape
        torch.Size([1, 5, 16, 32])
        >>> y = model.trunk(torch.zeros(1, 64, 16, 32))
        >>> model.trunk.inverse(y).shape
        torch.Size([1, 64, 16, 32])
    """

    streams = 1
    head_kernel = 3

    def build_stages(self, variant: IUNetVariant) -> Iterator[dict[str, Step]]:
        if variant.rotation != "cayley":  # exact does not fit it
            self.default_memory = "invert"  # type: ignore[misc]
        return _stages(variant)

    @property
    def trunk(self) -> ReversibleSequence:
        """The bijective part, with an ``inverse``; its layers are the network's.

        It maps ``(B, channels[0], *sizes)`` to the same shape.
        """
        trunk = ReversibleSequence(
            [step for stage in self._sequences()[1:] for step in stage], memory=None
        )
        label_steps(self)  # the sequence has named the steps after itself
        return trunk

    def map_at(self, stage: int) -> tuple[int, ...]:
        last = stage == len(self.levels) - 1
        return (0,) if last else _order(self.variant, self.levels[stage])

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module or tensor in the release's file, and the one here, of the same shape.

        The file is of the release's example, ``nn.Sequential(conv, iunet, conv)``.
        """
        yield from (("0", "stem.steps.0.conv"), ("2", "fc"))
        last = len(self.variant.channels) - 1
        for level, units in enumerate(self.variant.units):
            down, up = f"stages.{level}.steps", f"stages.{2 * last - level}.steps"
            mixes = level < last
            # the mix follows the last coupling of the encoder, and the first of the decoder
            for j in range(units):
                theirs = {
                    f"1.encoder_modules.{level}.{j}": f"{down}.encoder{j}",
                    f"1.decoder_modules.{level}.{j + (mixes and j > 0)}": f"{up}.decoder{j}",
                }
                layers = [3 * i + k for i in range(self.variant.convolutions) for k in (0, 1)]
                for (module, ours), layer in product(theirs.items(), layers):
                    yield f"{module}._fn.F.seq.{layer}", f"{ours}.branch.{layer}"
            if mixes:
                yield f"1.encoder_modules.{level}.{units}._fn.weight", f"{down}.mix.weight"
                yield f"1.decoder_modules.{level}.1._fn.weight", f"{up}.mix.weight"
                below = f"stages.{level + 1}.steps.down.weight"
                yield f"1.downsampling_layers.{level}._fn.weight", below
                yield f"1.upsampling_layers.{level}._fn.weight", f"{up}.up.weight"

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # the release's blocks hold each layer under two names
        return super().adapt_state_dict({k: t for k, t in tensors.items() if ".F.F." not in k})


def _order(variant: IUNetVariant, level: int) -> tuple[int, int]:
    """The streams of the halves of a level, after its couplings, in the order of the channels."""
    return (level + 1, level) if variant.units[level] % 2 else (level, level + 1)


def _stages(variant: IUNetVariant) -> Iterator[dict[str, Step]]:
    """The named steps of each stage: the levels of the encoder, then those of the decoder."""
    last = len(variant.channels) - 1
    squeeze = Squeeze(variant.strides, streams=1)

    def odd(level: int) -> bool:
        return variant.units[level] % 2 > 0

    def couplings(level: int, name: str) -> dict[str, Step]:
        sizes = {level: variant.channels[level] // 2}
        sizes[level + 1] = variant.channels[level] - sizes[level]
        steps: dict[str, Step] = {}
        for j in range(variant.units[level]):
            # the halves stay in place: each coupling adds to the other one
            target, source = (level, level + 1) if j % 2 == 0 else (level + 1, level)
            steps[f"{name}{j}"] = LevelCoupling(
                _branch(variant, sizes[source], sizes[target]),
                target=target,
                source=source,
                streams=level + 2,
            )
        return steps

    def mix(level: int, takes: tuple[int, int]) -> Step:
        weight = torch.zeros(variant.channels[level], variant.channels[level])
        return OrthogonalMix(weight, streams=level + 2, takes=takes, rotation=variant.rotation)

    def resample(level: int, *, back: bool) -> Step:
        """Between this level and the one above."""
        first = haar(variant.strides, variant.rotation)
        weight = first.repeat(variant.channels[level] // len(first), 1, 1)
        return OrthogonalMix(
            weight, streams=level + 1, takes=(level,), back=back, rotation=variant.rotation
        )

    there: Move
    back: Move

    def moved(level: int, there: Move, back: Move, *, takes: int, gives: int) -> Step:
        streams = level + takes
        return Rearranged(there, back, at=level, streams=streams, takes=takes, gives=gives)

    for level in range(last + 1):
        steps: dict[str, Step] = {}
        if level:
            above = squeeze, variant.skipped[level - 1], odd(level - 1)
            there, back = partial(_slice, *above), partial(_unslice, *above)
            steps["slice"] = moved(level - 1, there, back, takes=2, gives=2)
            steps["down"] = resample(level, back=False)
        steps["split"] = moved(
            level, partial(_split, False), partial(_join, False), takes=1, gives=2
        )
        steps |= couplings(level, "encoder")
        if level < last:
            steps["mix"] = mix(level, _order(variant, level))
        else:
            if odd(level):
                there, back = partial(_turn, True, False), partial(_turn, False, True)
                steps["turn"] = moved(level, there, back, takes=2, gives=2)
            steps |= couplings(level, "decoder")
            if not level:
                steps["end"] = _ending(variant)
        yield steps
    for level in reversed(range(last)):
        below = odd(level + 1)
        there, back = partial(_join, below), partial(_split, below)
        steps = {"join": moved(level + 1, there, back, takes=2, gives=1)}
        steps["up"] = resample(level + 1, back=True)
        present = squeeze, variant.skipped[level], False
        there, back = partial(_unslice, *present), partial(_slice, *present)
        steps["unslice"] = moved(level, there, back, takes=2, gives=2)
        for i, (name, step) in enumerate(couplings(level, "decoder").items()):
            steps[name] = step
            if i == 0:  # one coupling has swapped the halves
                steps["mix"] = mix(level, (level + 1, level))
        if not level:
            steps["end"] = _ending(variant)
        yield steps


def _ending(variant: IUNetVariant) -> Step:
    """The last step, which joins the halves of level 0."""
    odd = variant.units[0] % 2 > 0
    there, back = partial(_join, odd), partial(_split, odd)
    return Rearranged(there, back, at=0, streams=2, takes=2, gives=1)
