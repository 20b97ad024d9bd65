"""RevNets, and the pre-activation ResNets that are their baselines.

    RevNet    y1 = x1 + F(x2),  y2 = x2 + G(y1)      x2 = y2 - G(y1),  x1 = y1 - F(x2)
    ResNet    y = s(x) + F(x)

A. Gomez, M. Ren, R. Urtasun, R. Grosse, "The Reversible Residual Network: Backpropagation Without
Storing Activations", NeurIPS 2017, arXiv 1707.04585, and its TensorFlow release. F and G are
branches of a ResNet, each on half of the channels, so a RevNet unit is as deep as two residual
units, and each variant has about as many parameters as its baseline. The ResNets are those of K.
He, X. Zhang, S. Ren, J. Sun, "Identity Mappings in Deep Residual Networks", ECCV 2016, arXiv
1603.05027. torchvision's ``resnet50`` is the post-activation network of arXiv 1512.03385: another
architecture, whose weights do not fit here.

    image -> stem -> stages of units -> BN - ReLU -> average pool -> [dropout] -> linear

Units that change width or resolution (the first of a stage, except where the stem's output already
has the stage's shape) have no inverse, nor has the stem. They store their input and are recomputed
from it:

    ResidualUnit    y  = s(x)   + F(x)                              one stream
    MergedUnit      y  = s(x)   + F(x),  x and y of all channels    two streams, merged and split
    Transition      y1 = s1(x1) + F(x2),  y2 = s2(x2) + G(y1)       two streams

A shortcut ``s`` is the identity if the unit keeps the shape. Otherwise it is

    basic       average pool by the stride, then zero channels, half before and half after
    bottleneck  1x1 convolution with the stride, without normalisation
    MemCNN's    1x1 convolution with the stride, then normalisation

Shapes: B batch, C channels of all streams together, H, W height and width.
"""

import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from revzoo._checks import check_choice, check_count, check_probability
from revzoo.core.invertible import State, Step
from revzoo.layers.sequence import ReversibleBlock
from revzoo.layers.streams import halves
from revzoo.models.components import (
    EPSILON,
    MOMENTUM,
    RELEASE,
    Branch,
    NormAct,
    NormKind,
    PlainStem,
    SamePadding,
    check_stages,
    conv2d,
    drop_path_rates,
)
from revzoo.models.lean import Lean, run
from revzoo.models.network import ConvolutionalClassifier, FeatureInfo, feature_infos
from revzoo.weights.errors import ArchitectureMismatchError

BranchKind = Literal["basic", "bottleneck"]
# Width of a bottleneck's output over its inner convolutions' (He et al. 2015, 1512.03385).
BOTTLENECK_EXPANSION = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Differences between implementations of the same networks.

    Attributes:
        memcnn: build units as MemCNN does: shortcuts are a 1x1 convolution and a normalisation, for
            both kinds of branch; a RevNet unit that changes shape is one residual unit on all
            channels; a bottleneck's 3x3 convolution has the stride, not its first 1x1; and G of the
            first unit also lacks the leading activation.
        same: pad strided convolutions and the max pool as TensorFlow does, see
            :class:`~revzoo.models.components.SamePadding`.
        momentum: of batch normalisation, in torch's convention.
        epsilon: of the normalisation.
    """

    memcnn: bool = False
    same: bool = False
    momentum: float = MOMENTUM
    epsilon: float = EPSILON


# gomez: the TensorFlow release of arXiv 1707.04585, with torch's padding; gomez_same: also with its
# padding, for its weights. memcnn: van de Leemput et al., "MemCNN: A Python/PyTorch package for
# creating memory-efficient invertible neural networks", JOSS 2019, doi 10.21105/joss.01576: its
# CIFAR configurations. memcnn_fix: with its option batch_norm_fix.
CONVENTIONS: dict[str, Convention] = {
    "gomez": Convention(),
    "gomez_same": Convention(same=True),
    "memcnn": Convention(memcnn=True, momentum=0.1, epsilon=1e-5),
    "memcnn_fix": Convention(memcnn=True, momentum=0.99, epsilon=1e-3),
}


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """The plan of one residual unit; channels count all streams together."""

    in_channels: int
    out_channels: int
    stride: int
    branch: BranchKind
    activate_first: bool
    dropout: float
    memcnn: bool = False
    norm_act: NormAct = RELEASE
    same: bool = False
    drop_path: float = 0.0

    @property
    def keeps_shape(self) -> bool:
        """Whether output and input have the same shape, which an inverse requires."""
        return self.stride == 1 and self.in_channels == self.out_channels


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidualRow:
    """Widths, depths and strides of a residual network. Channels count all streams together.

    Attributes:
        widths: channels of each stage, before a bottleneck multiplies them by 4.
        units: number of residual units of each stage.
        strides: stride of the first unit of each stage.
        branch: kind of residual function, ``"basic"`` or ``"bottleneck"``.
        downsampling_stem: True for a 7x7 stride-2 convolution and a 3x3 stride-2 max pool
            (ImageNet), False for one 3x3 convolution (CIFAR).
    """

    widths: tuple[int, ...]
    units: tuple[int, ...]
    strides: tuple[int, ...] = (1, 2, 2)
    branch: BranchKind = "basic"
    downsampling_stem: bool = False

    def __post_init__(self) -> None:
        check_stages(self, "widths", "units", "strides")
        check_choice("branch", self.branch, get_args(BranchKind))

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Channels at the end of each stage, all streams together."""
        expansion = BOTTLENECK_EXPANSION if self.branch == "bottleneck" else 1
        return tuple(width * expansion for width in self.widths)

    @property
    def reductions(self) -> tuple[int, ...]:
        """Image side over map side, after each stage."""
        stem = 4 if self.downsampling_stem else 1
        return tuple(stem * product for product in accumulate(self.strides, mul))

    @property
    def image_size(self) -> int:
        """224 for the ImageNet stem, 32 for the CIFAR stem."""
        return 224 if self.downsampling_stem else 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(ResidualRow):
    """One row of the tables of RevNets and ResNets.

    Attributes:
        stem_width: channels after the stem.
        norm: ``"batch"``, ``"group"`` or ``"none"``, see
            :class:`~revzoo.models.components.NormAct`.
        activation: a name in :data:`~revzoo.models.components.ACTIVATIONS`.
        convention: a name in :data:`CONVENTIONS`.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    stem_width: int
    norm: NormKind = "batch"
    activation: str = "relu"
    convention: str = "gomez"

    def __post_init__(self) -> None:
        ResidualRow.__post_init__(self)
        check_count("stem_width", self.stem_width)
        check_choice("convention", self.convention, CONVENTIONS)
        NormAct(self.norm, self.activation)  # refuses unknown names

    @property
    def norm_act(self) -> NormAct:
        """Normalisation and activation, with the constants of the convention."""
        constants = CONVENTIONS[self.convention]
        return NormAct(self.norm, self.activation, constants.momentum, constants.epsilon)

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of this number.

        The basic shortcut average-pools without padding, which fits the branch's padded strided
        convolution on even sizes only; a strided 1x1 convolution fits any size.
        """
        if self.branch == "bottleneck" or CONVENTIONS[self.convention].memcnn:
            return 1
        return self.reductions[-1]

    def stages(self, *, dropout: float = 0.0, drop_path_rate: float = 0.0) -> list[list[UnitPlan]]:
        """One list of unit plans per stage; the first unit of a stage changes width and stride.

        The probability of dropping a branch rises linearly to ``drop_path_rate``.
        """
        plans: list[list[UnitPlan]] = []
        convention = CONVENTIONS[self.convention]
        shared = dropout, convention.memcnn, self.norm_act, convention.same
        channels = self.stem_width
        rates = iter(drop_path_rates(drop_path_rate, sum(self.units)))
        for width, units, stride in zip(self.stage_channels, self.units, self.strides, strict=True):
            # bool(plans): the stem ends in BN-ReLU, so the first branch of all skips it
            first = UnitPlan(channels, width, stride, self.branch, bool(plans), *shared)
            rest = UnitPlan(width, width, 1, self.branch, True, *shared)
            stage = [first] + [rest] * (units - 1)
            plans.append([replace(plan, drop_path=next(rates)) for plan in stage])
            channels = width
        return plans


def _imagenet(stem_width: int, widths: tuple[int, ...], units: tuple[int, ...]) -> Variant:
    return Variant(
        stem_width=stem_width,
        widths=widths,
        units=units,
        strides=(1, 2, 2, 2),
        branch="bottleneck",
        downsampling_stem=True,
    )


# The networks of arXiv 1707.04585 (CIFAR and ImageNet) with the numbers of its TensorFlow release.
_REVNET, _WIDTHS = (32, 64, 128), (128, 256, 512, 832)
REVNETS: dict[str, Variant] = {
    "revnet38": Variant(stem_width=32, widths=(32, 64, 112), units=(3, 3, 3)),
    "revnet110": Variant(stem_width=32, widths=_REVNET, units=(9, 9, 9)),
    "revnet164": Variant(stem_width=32, widths=_REVNET, units=(9, 9, 9), branch="bottleneck"),
    "revnet56": _imagenet(128, _WIDTHS, units=(2, 2, 3, 2)),
    "revnet104": _imagenet(128, _WIDTHS, units=(2, 2, 11, 2)),
}
# Their baselines. The names count layers: resnet32 has 15 units of 2 convolutions, the stem and the
# classifier.
_RESNET = (16, 32, 64)
RESNETS: dict[str, Variant] = {
    "resnet32": Variant(stem_width=16, widths=_RESNET, units=(5, 5, 5)),
    "resnet56": Variant(stem_width=16, widths=_RESNET, units=(9, 9, 9)),
    "resnet110": Variant(stem_width=16, widths=_RESNET, units=(18, 18, 18)),
    "resnet164": Variant(stem_width=16, widths=_RESNET, units=(18, 18, 18), branch="bottleneck"),
    "resnet50": _imagenet(64, (64, 128, 256, 512), units=(3, 4, 6, 3)),
    "resnet101": _imagenet(64, (64, 128, 256, 512), units=(3, 4, 23, 3)),
}
for _table, _names in (
    (REVNETS, ("revnet38", "revnet110", "revnet164")),
    (RESNETS, ("resnet32", "resnet110", "resnet164")),
):
    _table |= {f"{name}_memcnn": replace(_table[name], convention="memcnn") for name in _names}


class ResidualUnit(Step):
    """``y = shortcut(x) + branch(x)`` on one stream ``(B, C, H, W)``."""

    streams = 1

    def __init__(self, branch: nn.Module, *, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut

    def forward(self, *state: Tensor) -> Tensor | State:
        (x,) = state
        return run((self.shortcut,), x) + self.branch(x)


class MergedUnit(ResidualUnit):
    """A residual unit on the merged streams, ``(B, C/2, H, W)`` each; splits its output again."""

    streams = 2

    def forward(self, *state: Tensor) -> State:
        y = super().forward(torch.cat(state, dim=1))  # MemCNN's way, see Convention
        assert isinstance(y, Tensor)
        return halves(y)


class Transition(Step):
    """``y1 = s1(x1) + f(x2)``, ``y2 = s2(x2) + g(y1)`` on two streams.

    ``f`` has the stride and changes the width; the shortcuts ``s1`` and ``s2`` have the shape of
    its output.
    """

    streams = 2

    def __init__(
        self, f: nn.Module, *, g: nn.Module, shortcuts: tuple[nn.Module, nn.Module]
    ) -> None:
        super().__init__()
        self.f = f
        self.g = g
        self.shortcut1, self.shortcut2 = shortcuts

    def forward(self, *state: Tensor) -> State:
        x1, x2 = state
        y1 = run((self.shortcut1,), x1) + self.f(x2)
        y2 = run((self.shortcut2,), x2) + self.g(y1)  # y1 as in a coupling, not x1
        return y1, y2


def branch(plan: UnitPlan) -> Branch:
    """The residual function of ``plan``, whose channels are per stream.

    Raises:
        ValueError: the output channels of a bottleneck are not a multiple of 4.
    """
    kernels: tuple[int, ...] = (3, 3)
    inner = plan.out_channels
    if plan.branch == "bottleneck":
        kernels, inner = (1, 3, 1), plan.out_channels // BOTTLENECK_EXPANSION
        if inner < 1 or plan.out_channels % BOTTLENECK_EXPANSION:
            raise ValueError(
                f"out_channels={plan.out_channels}: expected a positive multiple of "
                f"{BOTTLENECK_EXPANSION}, since the inner width of a bottleneck branch is a quarter"
            )
    return Branch(
        plan.in_channels,
        out_channels=plan.out_channels,
        kernels=kernels,
        inner=inner,
        stride=plan.stride,
        strided=int(plan.memcnn and plan.branch == "bottleneck"),
        activate_first=plan.activate_first,
        dropout=plan.dropout,
        drop_path=plan.drop_path,
        same=plan.same,
        norm_act=plan.norm_act,
    )


def shortcut(plan: UnitPlan) -> nn.Module:
    """The shortcut of one stream for ``plan``, whose channels are per stream.

    Raises:
        ValueError: a pooling shortcut has fewer channels out than in.
    """
    width, out, stride = plan.in_channels, plan.out_channels, plan.stride
    if plan.keeps_shape:
        return nn.Identity()
    if plan.branch == "basic" and not plan.memcnn:
        added = out - width
        if added < 0:
            raise ValueError(
                f"out_channels={out}: expected at least in_channels={width}, since a pooling "
                "shortcut adds zero channels; let the widths grow, or use branch='bottleneck'"
            )
        pool = [nn.AvgPool2d(stride)] if stride > 1 else []
        # of channels, height and width, the last dimension first
        return Lean(*pool, nn.ZeroPad3d((0, 0, 0, 0, added // 2, added - added // 2)))
    projection = conv2d(width, out_channels=out, kernel_size=1, stride=stride)
    return Lean(projection, plan.norm_act.normalise(out)) if plan.memcnn else projection


class Stem(PlainStem):
    """The first layers: ``(B, in_chans, H, W)`` -> ``out_streams`` of ``(B, channels / out_streams,
    H, W)``.

        CIFAR       conv3x3 - BN - ReLU
        ImageNet    conv7x7(stride 2) - BN - ReLU - max pool 3x3(stride 2)

    It ends in BN-ReLU, so the first branch omits it. With ``downsample`` it is the ImageNet stem,
    whose output is ``(H/4, W/4)``, rounded up.
    """

    def __init__(
        self,
        in_chans: int,
        *,
        channels: int,
        out_streams: int,
        downsample: bool,
        norm_act: NormAct = RELEASE,
        same: bool = False,
    ) -> None:
        side, stride = (7, 2) if downsample else (3, 1)
        same = same and downsample  # without strides, both paddings are the same
        layers: dict[str, nn.Module] = {"pad": SamePadding(side, stride=stride)} if same else {}
        padding = 0 if same else None
        layers["conv"] = conv2d(
            in_chans, out_channels=channels, kernel_size=side, stride=stride, padding=padding
        )
        layers["norm"], layers["relu"] = norm_act.normalise(channels), norm_act.activate()
        if same:
            pool_pad = SamePadding(3, stride=2, value=-torch.inf)
            layers["pool"] = nn.Sequential(pool_pad, nn.MaxPool2d(3, stride=2))
        elif downsample:
            layers["pool"] = nn.MaxPool2d(3, stride=2, padding=1)
        super().__init__(**layers)
        self.out_streams = out_streams

    def forward(self, x: Tensor) -> Tensor | State:
        y = super().forward(x)
        return y if self.out_streams == 1 else halves(y)


# The places of branches and shortcuts: scopes in the TensorFlow release, names in MemCNN, which
# renamed rev_block to _fn in its version 1.0.
_PLACES: dict[str, tuple[str, tuple[str, ...]]] = {
    "steps.0.branch": ("f/", ("revblock._fn.Fm", "revblock.rev_block.Fm")),
    "steps.1.branch": ("g/", ("revblock._fn.Gm", "revblock.rev_block.Gm")),
    "f": ("f/", ()),
    "g": ("g/", ()),
    "branch": ("", ("basicblock_sub", "bottleneck_sub")),
    "shortcut": ("", ("downsample",)),
    "shortcut1": ("x1_bottleneck/", ()),
    "shortcut2": ("x2_bottleneck/", ()),
}
_LAYER = re.compile(rf"stages\.(\d+)\.steps\.(\d+)\.({'|'.join(_PLACES)})(?:\.(\w+))?")


class StagedNetwork(ConvolutionalClassifier):
    """Stem, stages of residual units, head: ``(B, in_chans, H, W) -> (B, num_classes)``."""

    size_reason: ClassVar[str] = "halves the size with pooling shortcuts"
    input_layer = "stem.steps.0.conv"

    def __init__(
        self,
        variant: Variant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        dropout: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        check_probability("dropout", dropout)
        self.num_features = variant.stage_channels[-1]
        stem = Stem(
            in_chans,
            channels=variant.stem_width,
            out_streams=self.streams,
            downsample=variant.downsampling_stem,
            norm_act=variant.norm_act,
            same=CONVENTIONS[variant.convention].same,
        )
        stages = variant.stages(dropout=dropout, drop_path_rate=drop_path_rate)
        self._build(variant, [stem], (map(self.build_unit, stage) for stage in stages))
        # branches begin with BN-ReLU, so the sum after the last branch still needs BN-ReLU
        self._append_head(variant.norm_act, num_classes, drop_rate, memory, global_pool)

    @staticmethod
    @abstractmethod
    def build_unit(plan: UnitPlan) -> Step:
        """One residual unit; the plan's channels count all streams together."""

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """Each stage's last map, streams merged, before the next BN-ReLU."""
        return feature_infos(self.variant.stage_channels, self.variant.reductions)

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module of the TensorFlow release or of MemCNN, and the one here.

        the release                          MemCNN
        init/init_conv, init/init_bn         conv1, bn1
        unit_S_U/{f,g}/subK/{bn,conv}K       layerS.U.revblock._fn.{F,G}m.{bn,conv}K
        unit_S_U/subK/{bn,conv}K             layerS.U.{basicblock,bottleneck}_sub.{bn,conv}K
        unit_S_U/[{x1,x2}_bottleneck/]project   layerS.U.downsample.{0,1}
        unit_last/final_bn, logit            bn_final, fc
        """
        yield from (("init/init_conv", "stem.steps.0.conv"), ("init/init_bn", "stem.steps.0.norm"))
        yield from (("conv1", "stem.steps.0.conv"), ("bn1", "stem.steps.0.norm"))
        yield from (("unit_last/final_bn", "norm"), ("bn_final", "norm"), ("logit", "fc"))
        for path, _ in self.named_modules():
            if (match := _LAYER.fullmatch(path)) is None:
                continue
            stage, unit, place, layer = int(match[1]) + 1, match[2], match[3], match[4] or ""
            scope, names = _PLACES[place]
            theirs = layer.replace("norm", "bn")
            for name in names:
                yield f"layer{stage}.{unit}.{name}.{theirs}", path
            inside = "project" if place.startswith("shortcut") else f"sub{layer[-1:]}/{theirs}"
            yield f"unit_{stage}_{unit}/{scope}{inside}", path

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if "init/init_conv.weight" in tensors and not CONVENTIONS[self.variant.convention].same:
            raise ArchitectureMismatchError(
                "the weights are of RevNet's TensorFlow release, which pads strided layers in "
                f"another way than convention={self.variant.convention!r}: create the network with "
                "convention='gomez_same', or use revzoo.load_published(FILE, 'revnet')"
            )
        return super().adapt_state_dict(tensors)


class RevNet(StagedNetwork):
    """RevNet, ``(B, in_chans, H, W) -> (B, num_classes)``; two streams, merged before the head.

    Basic variants take sizes that are multiples of 4 (three stages of strides 1, 2, 2), bottlenecks
    any size.

    Example:
        >>> from revzoo.models import REVNETS, RevNet
        >>> RevNet(REVNETS["revnet38"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "exact"
    streams: ClassVar[int] = 2

    @staticmethod
    def build_unit(plan: UnitPlan) -> Step:
        inside, outside = plan.in_channels, plan.out_channels
        if inside % 2 or outside % 2:
            raise ValueError(
                f"a unit from {inside} to {outside} channels: expected even numbers, for two "
                "equal streams; choose such stem_width and widths"
            )
        half = replace(plan, in_channels=inside // 2, out_channels=outside // 2)
        if plan.memcnn and not plan.keeps_shape:
            return MergedUnit(branch(plan), shortcut=shortcut(plan))
        # G reads y1, which already has the output's shape and has not passed the stem's BN-ReLU
        activate_first = plan.activate_first or not plan.memcnn
        after = replace(
            half, in_channels=half.out_channels, stride=1, activate_first=activate_first
        )
        f, g = branch(half), branch(after)
        if plan.keeps_shape:
            return ReversibleBlock(f, g)
        return Transition(f, g=g, shortcuts=(shortcut(half), shortcut(half)))


class ResNet(StagedNetwork):
    """Pre-activation ResNet, ``(B, in_chans, H, W) -> (B, num_classes)``; one stream.

    Its units have no inverse, so the memory modes are ``store`` and ``recompute``;
    :func:`revzoo.create_model` makes them reversible with ``reversible_bits=4``. Sizes of images
    are as for a :class:`RevNet`.

    Example:
        >>> from revzoo.models import RESNETS, ResNet
        >>> ResNet(RESNETS["resnet32"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

    @staticmethod
    def build_unit(plan: UnitPlan) -> Step:
        return ResidualUnit(branch(plan), shortcut=shortcut(plan))
