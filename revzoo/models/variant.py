"""One row of a model table: widths, depths and strides of a staged network.

A variant is pure data, so a table of them can be read next to the paper's. :meth:`Variant.stages`
turns it into one :class:`UnitPlan` per residual unit, which a network class builds from; the rules
that all networks of the release share (where a stage changes width and stride, which branch skips
its activation) are written once, here. Channels count all streams together.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from revzoo.layers.branch import BOTTLENECK_EXPANSION, BRANCHES, BranchKind
from revzoo.layers.droppath import drop_path_rates
from revzoo.models.checks import check_count, is_count


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """What one residual unit is built from; channels count all streams together."""

    in_channels: int
    out_channels: int
    stride: int
    branch: BranchKind
    activate_first: bool
    dropout: float
    drop_path: float = 0.0

    @property
    def keeps_shape(self) -> bool:
        """Whether the unit's output has the shape of its input, as an invertible one must."""
        return self.stride == 1 and self.in_channels == self.out_channels

    def per_stream(self, streams: int) -> "UnitPlan":
        """The same plan with the channels of one of ``streams`` equal streams.

        Raises:
            ValueError: the channels do not divide evenly.
        """
        for channels in (self.in_channels, self.out_channels):
            if channels % streams:
                raise ValueError(
                    f"{channels} channels cannot be split into {streams} equal streams; choose "
                    f"stem_width and widths that are multiples of {streams}."
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
        downsampling_stem: 7x7 stride-2 convolution and 3x3 stride-2 max pool (ImageNet) where true,
            one 3x3 convolution (CIFAR) where false.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    stem_width: int
    widths: tuple[int, ...]
    units: tuple[int, ...]
    strides: tuple[int, ...] = (1, 2, 2)
    branch: BranchKind = "basic"
    downsampling_stem: bool = False

    def __post_init__(self) -> None:
        for field in ("widths", "units", "strides"):
            object.__setattr__(self, field, _positive_tuple(field, getattr(self, field)))
        check_count("stem_width", self.stem_width)
        lengths = len(self.widths), len(self.units), len(self.strides)
        if len(set(lengths)) != 1:
            raise ValueError(
                f"widths, units and strides have {lengths[0]}, {lengths[1]} and {lengths[2]} "
                "values; give one of each per stage."
            )
        if self.branch not in BRANCHES:
            raise ValueError(
                f"branch={self.branch!r} is not a kind of residual function; choose one of "
                f"{', '.join(map(repr, BRANCHES))}."
            )

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Channels at the end of each stage, all streams together."""
        expansion = BOTTLENECK_EXPANSION if self.branch == "bottleneck" else 1
        return tuple(width * expansion for width in self.widths)

    @property
    def size_multiple(self) -> int:
        """What height and width of an image must be multiples of.

        The basic shortcut average-pools without padding, which fits the branch's padded strided
        convolution on even sizes only; a strided 1x1 convolution fits any size.
        """
        if self.branch == "bottleneck":
            return 1
        return self.reductions[-1]

    @property
    def reductions(self) -> tuple[int, ...]:
        """How many times smaller than the image the maps of each stage are."""
        stem = 4 if self.downsampling_stem else 1
        return tuple(stem * product for product in accumulate(self.strides, mul))

    def stages(self, *, dropout: float = 0.0, drop_path_rate: float = 0.0) -> list[list[UnitPlan]]:
        """One list of unit plans per stage; the first unit of a stage changes width and stride.

        The probability of dropping a branch's value rises linearly to ``drop_path_rate``.
        """
        plans: list[list[UnitPlan]] = []
        channels = self.stem_width
        rates = iter(drop_path_rates(drop_path_rate, sum(self.units)))
        for width, units, stride in zip(self.stage_channels, self.units, self.strides, strict=True):
            # The stem ends in BN-ReLU, so the very first branch would repeat it.
            first = UnitPlan(channels, width, stride, self.branch, bool(plans), dropout)
            rest = UnitPlan(width, width, 1, self.branch, True, dropout)
            stage = [first] + [rest] * (units - 1)
            plans.append([replace(plan, drop_path=next(rates)) for plan in stage])
            channels = width
        return plans


def _positive_tuple(name: str, values: Iterable[int] | int) -> tuple[int, ...]:
    # Any iterable: configuration files give lists, or list types of their own.
    numbers = tuple(values) if isinstance(values, Iterable) else ()
    if not numbers or not all(map(is_count, numbers)):
        raise ValueError(f"{name} got {values!r}; expected one positive whole number per stage.")
    return numbers
