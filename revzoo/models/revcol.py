"""RevCol: columns of ConvNeXt blocks, each of which passes all its levels to the next one.

    column 0         c[l] = F[0, l](c[l-1])                                            c[-1] = stem
    column i         c[l] <- gamma[i, l] c[l] + F[i, l](c[l-1], c[l+1])
    inverse          c[l] = (c[l] - F[i, l](c[l-1], c[l+1])) / gamma[i, l]     top level first

Y. Cai, Y. Zhou, Q. Han, J. Sun, X. Kong, J. Li, X. Zhang, "Reversible Column Networks", ICLR 2023,
arXiv 2212.11696. Layers, epsilons and initial values follow its PyTorch release
(megvii-research/RevCol, Apache-2.0). A level has half the resolution of the one below. It adds the
level below, downsampled by a convolution, and the level above of the previous column, upsampled,
and applies a few blocks of Z. Liu et al., "A ConvNet for the 2020s", arXiv 2201.03545. ``gamma``
has one value for each channel, 0.5 at first.

    image -> stem -> columns -> last level of the last column -> pool -> LN -> [dropout] -> linear

``revcol_huge`` has one more connection: level 0 also reads the last level of the column before,
upsampled by 8.

The streams are the stem's output, which each column reads, and the levels. One step replaces one
level, so a replay records the blocks of one level. Column 0 adds streams; to undo it, drop them.

In training, the release also classifies and decodes the image after every quarter of the columns,
and adds these losses; this file omits them. Where ``|gamma|`` is below 1e-3, the release changes
the parameter, also in evaluation mode; a gamma of 0 stays 0 and divides by zero. We compute with
1e-3 there and leave the parameter, whose gradient passes.

In mode ``invert`` a column divides by gamma, so rounding errors grow from column to column: the
guard raises where gammas are small, or columns many (8 at first). The release avoids that by
keeping the output of each column. Mode ``exact`` keeps the bits that the products drop, see
:mod:`revzoo.layers.scaled_words`: 1 bit for each value of a level and column where ``|gamma|`` is
0.5 to 1. It computes the same network, on the grid.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_count
from revzoo.core.invertible import Invertible, State, Step, as_state
from revzoo.core.replay import Recorder
from revzoo.core.sums import add, put_on_grid_of
from revzoo.core.words import Fixed, words_in
from revzoo.layers.scaled_words import SMALLEST, divide, multiply
from revzoo.models.components import PlainStem, check_stages, drop_path_rates, stochastic_depth
from revzoo.models.network import ConvolutionalClassifier, FeatureInfo

# the release's values
EPSILON = 1e-6
STD = 0.02  # of convolutions and linear layers
LAYER_SCALE = 1e-6
FIRST_GAMMA = 0.5
STEM_STRIDE = 4
EXPANSION = 4  # inner width of a block over its width
# tensors of the release that have no use in classification
UNUSED = ("decoder_blocks.", "cls_blocks.0.", "cls_blocks.1.", "cls_blocks.2.", "subnet0.alpha")


@dataclass(frozen=True, slots=True, kw_only=True)
class RevColVariant:
    """One row of the table of reversible column networks.

    Attributes:
        columns: number of columns.
        widths: channels of each level.
        units: number of blocks of each level.
        kernel_size: side of the depthwise convolutions, odd.
        top_to_bottom: whether level 0 also reads the last level of the column before.
        image_size: side in pixels of the publication's images; other sizes work, too.

    Raises:
        ValueError: a field is out of range or the sequences differ in length.
    """

    columns: int
    widths: tuple[int, ...]
    units: tuple[int, ...]
    kernel_size: int = 3
    top_to_bottom: bool = False
    image_size: int = field(default=224, compare=False)

    def __post_init__(self) -> None:
        check_stages(self, "widths", "units")
        for name in ("columns", "kernel_size", "image_size"):
            check_count(name, getattr(self, name))
        if self.kernel_size % 2 == 0:
            raise ValueError(
                f"kernel_size={self.kernel_size}: expected an odd number, which keeps the size"
            )

    @property
    def reductions(self) -> tuple[int, ...]:
        """Image side over map side, of each level."""
        return tuple(STEM_STRIDE * 2**level for level in range(len(self.widths)))

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of it."""
        return self.reductions[-1]


def _row(columns: int, width: int, units: tuple[int, ...], **options: Any) -> RevColVariant:
    widths = tuple(width * 2**level for level in range(4))
    return RevColVariant(columns=columns, widths=widths, units=units, **options)


# The paper trains them with drop_path_rate 0.1, 0.3, 0.4, 0.5 and 0.5.
REVCOLS: dict[str, RevColVariant] = {
    "revcol_tiny": _row(4, 64, (2, 2, 4, 2)),
    "revcol_small": _row(8, 64, (2, 2, 4, 2)),
    "revcol_base": _row(16, 72, (1, 1, 3, 2)),
    "revcol_large": _row(8, 128, (1, 2, 6, 2)),
    "revcol_xlarge": _row(8, 224, (1, 2, 6, 2)),
    "revcol_huge": _row(8, 360, (1, 2, 6, 2), top_to_bottom=True),
}


class ChannelNorm(nn.LayerNorm):
    """Layer normalisation of each pixel of ``(B, C, H, W)`` over the channels."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ConvNeXtBlock(nn.Module):
    """``x + [drop path] gamma (depthwise conv - LN - linear - GELU - linear)(x)``, same shape."""

    def __init__(self, width: int, *, kernel_size: int, drop_path: float) -> None:
        super().__init__()
        side = kernel_size
        self.dwconv = nn.Conv2d(width, width, side, padding=side // 2, groups=width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.pwconv1 = nn.Linear(width, EXPANSION * width)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(EXPANSION * width, width)
        self.gamma = nn.Parameter(torch.full((width,), LAYER_SCALE))
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + self.drop_path(y.permute(0, 3, 1, 2))


class UpsampleLevel(nn.Module):
    """``(B, C, H, W) -> (B, width, scale H, scale W)``: linear, LN, nearest upsampling."""

    def __init__(self, channels: int, *, width: int, scale: int = 2) -> None:
        super().__init__()
        self.scale = scale
        self.project = nn.Linear(channels, width)
        self.norm = nn.LayerNorm(width, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.project(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return functional.interpolate(y, scale_factor=self.scale, mode="nearest")


class LevelBranch(nn.Module):
    """F of one level: ``(below (B, C', 2 H, 2 W), above (B, C'', H/2, W/2)) -> (B, C, H, W)``.

    Level 0 reads the stem's output, of its own shape, and with ``top_to_bottom`` the last level.
    Column 0 and the last level read no level above.
    """

    def __init__(
        self, variant: RevColVariant, level: int, *, first: bool, drop_paths: Sequence[float]
    ) -> None:
        super().__init__()
        widths, width = variant.widths, variant.widths[level]
        self.down: nn.Module = nn.Identity()
        if level:
            conv = nn.Conv2d(widths[level - 1], width, 2, stride=2)
            self.down = nn.Sequential(conv, ChannelNorm(width))
        self.up: UpsampleLevel | None = None
        if not first and level + 1 < len(widths):
            self.up = UpsampleLevel(widths[level + 1], width=width)
        self.up2: UpsampleLevel | None = None  # the release's name
        if variant.top_to_bottom and level == 0 and self.up is not None:
            self.up2 = UpsampleLevel(widths[-1], width=width, scale=2 ** (len(widths) - 1))
        self.blocks = nn.Sequential(
            *(
                ConvNeXtBlock(width, kernel_size=variant.kernel_size, drop_path=rate)
                for rate in drop_paths
            )
        )

    def forward(
        self, below: Tensor, above: Tensor | None = None, top: Tensor | None = None
    ) -> Tensor:
        x: Tensor = self.down(below)
        if self.up is not None:
            x = self.up(above) + x
        if self.up2 is not None:
            x = x + self.up2(top)
        return self.blocks(x)


class FirstLevel(Invertible):
    """A level of column 0: ``(stem, c0, ..., c[l-1]) -> (stem, c0, ..., c[l-1], F(c[l-1]))``."""

    exact = True
    sums = True

    def __init__(self, branch: nn.Module, *, level: int) -> None:
        super().__init__()
        self.branch = branch
        self.streams = level + 1

    @property
    def outputs(self) -> int:
        return self.streams + 1

    def forward(self, *state: Tensor, **context: Any) -> State:
        x = state[-1]
        value: Tensor = self.branch(x)
        if (fixed := words_in(self, x)) is not None:
            return (*state, put_on_grid_of(fixed, value, self))
        return (*state, value.to(x.dtype))

    def inverse(self, *state: Tensor, **context: Any) -> State:
        return state[:-1]

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        inputs = outputs[:-1]
        if not record.records:
            return inputs, ()
        leaves = [record.leaf(i, t) for i, t in enumerate(inputs)]
        # not on the grid: the gradient of the rounding is the identity
        return inputs, (*leaves, self.branch(leaves[-1]).to(leaves[-1].dtype))


class Level(Invertible):
    """A level of a later column: replaces ``c[l]`` by ``gamma c[l] + F(c[l-1], c[l+1])``.

    Outside of a backward pass, mode ``exact`` has no side bits: :meth:`inverse` computes in
    floating point.
    """

    exact = True
    sums = True

    def __init__(self, branch: LevelBranch, *, level: int, levels: int, width: int) -> None:
        super().__init__()
        self.branch = branch
        self.at = level + 1  # its stream; the stem's output is stream 0
        self.streams = levels + 1
        self.gamma = nn.Parameter(torch.full((1, width, 1, 1), FIRST_GAMMA))

    def forward(self, *state: Tensor, **context: Any) -> State:
        value, c = self._value(state), state[self.at]
        gamma = self._gamma()
        scaled = gamma * c
        if (fixed := words_in(self, c)) is None:
            return self._with(state, scaled + value.to(c.dtype))
        return self._with(state, add(scaled, value, self._times(fixed, gamma, scaled), self))

    def inverse(self, *state: Tensor, **context: Any) -> State:
        value, y = self._value(state), state[self.at]
        return self._with(state, (y - value.to(y.dtype)) / self._gamma())

    def replay(
        self, outputs: Any, record: Recorder, context: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Any]]:
        leaves = [t if i == self.at else record.leaf(i, t) for i, t in enumerate(outputs)]
        value, gamma, y = self._value(leaves), self._gamma(), outputs[self.at]
        before: Tensor | Fixed
        with torch.no_grad():
            if (fixed := words_in(self, y)) is None:
                before = (y - value.to(y.dtype)) / gamma
            else:
                scaled = fixed.minus(value, fixed.down)
                before = scaled.with_words(divide(scaled.words, gamma, record.saved))
        inputs = self._with(outputs, before)
        if not record.records:
            return inputs, ()
        leaf = record.leaf(self.at, before)
        return inputs, self._with(leaves, gamma * leaf + value.to(leaf.dtype))

    def _value(self, state: Sequence[Tensor]) -> Tensor:
        above = state[self.at + 1] if self.at + 1 < len(state) else None
        return self.branch(state[self.at - 1], above, state[-1])

    def _with(self, state: Sequence[Any], c: Any) -> tuple[Any, ...]:
        """The ``state`` with another stream of this level."""
        return (*state[: self.at], c, *state[self.at + 1 :])

    def _gamma(self) -> Tensor:
        """``gamma``, at least 1e-3 away from 0; the gradient passes."""
        gamma = self.gamma
        kept = torch.where(gamma < 0, -1, 1) * gamma.abs().clamp(min=SMALLEST)
        return gamma + (kept - gamma).detach()

    def _times(self, fixed: Fixed, gamma: Tensor, scaled: Tensor) -> Fixed:
        """The words of ``gamma c``; keeps the bits that they drop. ``scaled`` are its floats."""
        words, shrinks = multiply(fixed.words, gamma)
        product = fixed.with_words(words)
        if not shrinks:  # the product may leave the range
            product.measure(scaled.new_zeros(()), math.inf, scaled, scaled, self)
        return product


class RevCol(ConvolutionalClassifier):
    """Reversible column network, ``(B, in_chans, H, W) -> (B, num_classes)``.

    Height and width must be multiples of 32. The feature maps are the levels of the last column.
    The head normalises after pooling, so ``norm`` of :meth:`forward_intermediates` changes nothing.

    Example:
        >>> from revzoo.models.revcol import REVCOLS, RevCol
        >>> RevCol(REVCOLS["revcol_tiny"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "exact"
    size_reason: ClassVar[str] = "halves the size from level to level"
    input_layer = "stem.steps.0.conv"

    def __init__(
        self,
        variant: RevColVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        self.num_features = variant.widths[-1]
        width = variant.widths[0]
        patches = nn.Conv2d(in_chans, width, STEM_STRIDE, stride=STEM_STRIDE)
        stem = PlainStem(conv=patches, norm=ChannelNorm(width))
        columns = range(variant.columns)
        self._build(variant, [stem], (_column(variant, i == 0, drop_path_rate) for i in columns))
        self.apply(_initialise)
        self.norm = nn.LayerNorm(self.num_features, eps=EPSILON)
        self._assemble(num_classes, drop_rate, memory, global_pool)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The levels of the last column."""
        last = f"stages.{self.variant.columns - 1}.steps"
        sizes = zip(self.variant.widths, self.variant.reductions, strict=True)
        return tuple(FeatureInfo(c, r, f"{last}.{i}") for i, (c, r) in enumerate(sizes))

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        return z  # see forward_head

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        # groups of num_features channels: catavgmax gives two
        pooled = self.pool(features).unflatten(1, (-1, self.num_features)).movedim(2, -1)
        pooled = self.drop(self.norm(pooled).movedim(-1, 2).flatten(1, 2))
        return pooled if pre_logits else self.get_classifier()(pooled)

    def encode(self, x: Tensor) -> Tensor:
        return self._last_streams(x)[-1]

    def stage_states(self, x: Tensor) -> Iterator[State]:
        self._check_images(x)
        state = as_state(self.stem(x))
        _, *columns, last = self._sequences()
        for column in columns:
            state = as_state(column(*state))
        for at, step in enumerate(last, start=1):
            state = as_state(step(*state))
            yield (state[at],)

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module or tensor in the release's file, and the one here, of the same shape.

        Networks trained with losses after earlier columns, on ImageNet-1k or 22k, have their
        classifier in ``cls_blocks.3``, those fine-tuned from 22k in ``cls``.
        """
        yield from (("stem.0", "stem.steps.0.conv"), ("stem.1", "stem.steps.0.norm"))
        for head in ("cls_blocks.3", "cls"):
            yield from ((f"{head}.classifier.0", "norm"), (f"{head}.classifier.1", "fc"))
        for i, level in itertools.product(
            range(self.variant.columns), range(len(self.variant.widths))
        ):
            theirs, ours = f"subnet{i}.level{level}", f"stages.{i}.steps.{level}"
            yield f"subnet{i}.alpha{level}", f"{ours}.gamma"
            for layer in ("0", "1"):
                yield f"{theirs}.fusion.down.{layer}", f"{ours}.branch.down.{layer}"
            for up, (layer, name) in itertools.product(
                ("up", "up2"), (("0", "project"), ("1", "norm"))
            ):
                path = f"{theirs}.fusion.{up}.channel_reschedule.{layer}"
                yield path, f"{ours}.branch.{up}.{name}"
            for j in range(self.variant.units[level]):
                block = f"{ours}.branch.blocks.{j}"
                yield f"{theirs}.blocks.{j}.gamma", f"{block}.gamma"
                for layer in ("dwconv", "norm", "pwconv1", "pwconv2"):
                    yield f"{theirs}.blocks.{j}.{layer}", f"{block}.{layer}"

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        # the classifiers after earlier columns, and the gamma of column 0, which multiplies nothing
        kept = {key: t for key, t in tensors.items() if not key.startswith(UNUSED)}
        return super().adapt_state_dict(kept)

    def keep_stages(self, count: int) -> None:
        # a level reads the one above of the column before: one more level for each column back,
        # or all of them
        _, first, *columns = self._sequences()
        every = len(first) if self.variant.top_to_bottom else 1
        for back, column in enumerate(reversed([first, *columns])):
            column.steps = column.steps[: count + back * every]
        for step in (step for column in columns for step in column):
            step.streams = 1 + len(first)
        super().keep_stages(len(self.stages))


def _column(variant: RevColVariant, first: bool, drop_path_rate: float) -> Iterator[Step]:
    rates = iter(drop_path_rates(drop_path_rate, sum(variant.units)))  # the same in each column
    levels = len(variant.widths)
    for level, (width, units) in enumerate(zip(variant.widths, variant.units, strict=True)):
        drop_paths = [next(rates) for _ in range(units)]
        branch = LevelBranch(variant, level, first=first, drop_paths=drop_paths)
        if first:
            yield FirstLevel(branch, level=level)
        else:
            yield Level(branch, level=level, levels=levels, width=width)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        # as in the release; it cuts off at -2 and 2, which is 100 standard deviations
        nn.init.trunc_normal_(module.weight, std=STD)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
