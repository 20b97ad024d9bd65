"""One row of a model table: widths, depths and strides of a staged network.

A variant is pure data, so a table of variants can be compared with the paper's table.
:meth:`Variant.stages` derives one :class:`UnitPlan` per residual unit, from which a network class
builds the unit. Here are the rules that all networks of the release share (where width and stride
change, which branch skips its activation). Channels count all streams together.
"""

from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from revzoo._checks import check_choice, check_count, check_counts
from revzoo.models.components.branch import BOTTLENECK_EXPANSION, BRANCHES, BranchKind
from revzoo.models.components.droppath import drop_path_rates
from revzoo.models.components.norm import EPSILON, MOMENTUM, RELEASE, NormAct, NormKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Convention:
    """Differences between implementations of the same networks.

    Attributes:
        memcnn: build units as MemCNN does: shortcuts are a 1x1 convolution and a normalisation, for
            both kinds of branch; a RevNet unit that changes shape is one residual unit on all
            channels; a bottleneck's 3x3 convolution has the stride, not its first 1x1; and G of the
            first unit also lacks the leading activation.
        momentum: of batch normalisation, in torch's convention.
        epsilon: of the normalisation.
    """

    memcnn: bool = False
    momentum: float = MOMENTUM
    epsilon: float = EPSILON


# gomez: the TensorFlow release of arXiv 1707.04585. memcnn: van de Leemput et al., "MemCNN: A
# Python/PyTorch package for creating memory-efficient invertible neural networks", JOSS 2019, doi
# 10.21105/joss.01576: its CIFAR configurations. memcnn_fix: with its option batch_norm_fix.
CONVENTIONS: dict[str, Convention] = {
    "gomez": Convention(),
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
    convention: Convention = CONVENTIONS["gomez"]
    norm_act: NormAct = RELEASE
    drop_path: float = 0.0

    @property
    def keeps_shape(self) -> bool:
        """Whether output and input have the same shape, which an inverse requires."""
        return self.stride == 1 and self.in_channels == self.out_channels

    def per_stream(self, streams: int) -> "UnitPlan":
        """The same plan with the channels of one of ``streams`` equal streams.

        Raises:
            ValueError: the channels do not divide evenly.
        """
        for channels in (self.in_channels, self.out_channels):
            if channels % streams:
                raise ValueError(
                    f"channels={channels}: expected a multiple of {streams}, for {streams} equal "
                    "streams; choose such stem_width and widths"
                )
        return replace(
            self,
            in_channels=self.in_channels // streams,
            out_channels=self.out_channels // streams,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """Widths, depths and strides of a staged network.

    Attributes:
        stem_width: channels after the stem.
        widths: channels of each stage, before a bottleneck multiplies them by 4.
        units: number of residual units of each stage.
        strides: stride of the first unit of each stage.
        branch: kind of residual function, ``"basic"`` or ``"bottleneck"``.
        downsampling_stem: True for a 7x7 stride-2 convolution and a 3x3 stride-2 max pool
            (ImageNet), False for one 3x3 convolution (CIFAR).
        norm: ``"batch"``, ``"group"`` or ``"none"``, see
            :class:`~revzoo.models.components.norm.NormAct`.
        activation: a name in :data:`~revzoo.models.components.norm.ACTIVATIONS`.
        convention: a name in :data:`CONVENTIONS`.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    stem_width: int
    widths: tuple[int, ...]
    units: tuple[int, ...]
    strides: tuple[int, ...] = (1, 2, 2)
    branch: BranchKind = "basic"
    downsampling_stem: bool = False
    norm: NormKind = "batch"
    activation: str = "relu"
    convention: str = "gomez"

    def __post_init__(self) -> None:
        for field in ("widths", "units", "strides"):
            # configurations give lists; the class is frozen, and rows are compared as tuples
            object.__setattr__(self, field, check_counts(field, getattr(self, field)))
        check_count("stem_width", self.stem_width)
        if not len(self.widths) == len(self.units) == len(self.strides):
            raise ValueError(
                f"widths={self.widths}, units={self.units}, strides={self.strides}: expected one "
                "value of each per stage"
            )
        check_choice("branch", self.branch, BRANCHES)
        check_choice("convention", self.convention, CONVENTIONS)
        NormAct(self.norm, self.activation)  # refuses unknown names

    @property
    def norm_act(self) -> NormAct:
        """Normalisation and activation, with the constants of the convention."""
        constants = CONVENTIONS[self.convention]
        return NormAct(self.norm, self.activation, constants.momentum, constants.epsilon)

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Channels at the end of each stage, all streams together."""
        expansion = BOTTLENECK_EXPANSION if self.branch == "bottleneck" else 1
        return tuple(width * expansion for width in self.widths)

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of this number.

        The basic shortcut average-pools without padding, which fits the branch's padded strided
        convolution on even sizes only; a strided 1x1 convolution fits any size.
        """
        if self.branch == "bottleneck" or CONVENTIONS[self.convention].memcnn:
            return 1
        return self.reductions[-1]

    @property
    def reductions(self) -> tuple[int, ...]:
        """Image side over map side, after each stage."""
        stem = 4 if self.downsampling_stem else 1
        return tuple(stem * product for product in accumulate(self.strides, mul))

    def stages(self, *, dropout: float = 0.0, drop_path_rate: float = 0.0) -> list[list[UnitPlan]]:
        """One list of unit plans per stage; the first unit of a stage changes width and stride.

        The probability of dropping a branch rises linearly to ``drop_path_rate``.
        """
        plans: list[list[UnitPlan]] = []
        shared = dropout, CONVENTIONS[self.convention], self.norm_act
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
