"""RevBiFPN: a feature pyramid whose levels are the streams of one reversible chain.

V. Chiley, V. Thangarasa, A. Gupta, A. Samar, J. Hestness, D. DeCoste, "RevBiFPN: The Fully
Reversible Bidirectional Feature Pyramid Network", arXiv 2206.14098, and its PyTorch release
(https://github.com/CerebrasResearch/RevBiFPN, BSD-3-Clause), whose layers, constants and channel
orders this file follows, so its weights fit (``published_keys``).

    image -> copies of its channels -> squeeze by 4 -> level 0 -> stages -> neck and head -> linear

Level i of the pyramid has 1/4, 1/8, 1/16 or 1/32 of the image's sides. A stage has three parts::

    blocks   on the halves (a, b) of each level:  b += F(a), then a += G(b)
    down     x_j += D_ij(x_i)      for all i < j, from the finer levels to the coarser
    up       x_j += U_ij(x_i)      for all i > j, from the coarser levels to the finer

The first stages each add a level, which starts at zero, before ``down``; the others keep all. In
the release, ``down`` and ``up`` are a *reversible residual silo*: every D reads x_i as it was
before ``down``. We take the sources from the coarsest for D and from the finest for U, so each is
read before it changes. All parts are therefore couplings of one kind (:class:`LevelCoupling`), and
the backward pass replays one branch at a time.

All branches are MobileNet blocks (arXiv 1801.04381, 1905.02244)::

    [conv 1x1 - BN - act] - depthwise conv - BN - act - [squeeze-excite] - conv 1x1 - BN

A D has the stride 2^(j - i); a U upsamples its value. The neck (a block for each level) and the
head (strided blocks that add the levels up, a 1x1 convolution) have no inverse: modes that invert
recompute them. Every step before them has one, so an image can be recovered from its pyramid.

The release updates the running statistics of batch normalisation twice for each batch, in the
forward pass and in its replay; here a batch counts once. Its head drops pooled features and its
branches drop images in training, with the rates of the table.

Shapes: B batch, C channels of a level, H, W height and width.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice, check_count, check_probability
from revzoo.core.invertible import State, Step, bare
from revzoo.layers.pyramid import (
    ChannelCopies,
    LevelCoupling,
    MergePyramid,
    NewLevel,
    SplitLevels,
)
from revzoo.layers.rearrange import Squeeze
from revzoo.layers.reversed import Reversed
from revzoo.layers.sequence import ReversibleSequence
from revzoo.models.components import NormAct, NormKind, check_stages, stochastic_depth
from revzoo.models.lean import Lean
from revzoo.models.network import (
    ConvolutionalClassifier,
    FeatureInfo,
    feature_infos,
    taken_indices,
)

# Of the release, for levels 0 to 3: kernels of the blocks; kernels of the convolutions that go up
# from a level; widening of depthwise convolutions and hidden share of squeeze-excite, in the stages
# and in neck and head.
KERNELS = (3, 5, 5, 5)
UP_KERNELS = (3, 3, 3, 5)
EXPANSIONS = (1, 1, 2, 2)
SQUEEZES = (0.25, 0.25, 0.125, 0.0)
HEAD_KERNEL = 5
HEAD_EXPANSIONS = (1, 2, 2, 2)
HEAD_SQUEEZES = (0.25, 0.25, 0.125, 0.125)
# BatchNorm of the release, in torch's convention.
MOMENTUM = 0.1
EPSILON = 1e-3
STEM = 4  # factor of the squeeze


@dataclass(frozen=True, slots=True, kw_only=True)
class RevBiFPNVariant:
    """One row of the table of RevBiFPNs.

    Attributes:
        channels: of each level, the finest first; 2 to 4 even numbers, the first a multiple of 16:
            level 0 holds 4x4 pixels of ``channels[0] / 16`` channels, copies of the image's.
        head_channels: of each level after the neck.
        features: channels before the classifier.
        fusions: number of stages after those that add a level.
        blocks: residual blocks of each level in each stage.
        drop_rate: probability of dropping a pooled feature before the classifier.
        drop_path_rate: probability of dropping a branch of the last stage for an image; it rises
            linearly with the stages.
        norm: ``"batch"``, ``"group"`` or ``"none"``, see
            :class:`~revzoo.models.components.NormAct`.
        activation: a name in :data:`~revzoo.models.components.ACTIVATIONS`.
        image_size: side in pixels of the publication's images; other multiples of 32 work, too.

    Raises:
        ValueError: a field is out of range or does not fit another.
    """

    channels: tuple[int, ...]
    head_channels: tuple[int, ...]
    features: int
    fusions: int = 2
    blocks: int = 2
    drop_rate: float = 0.0
    drop_path_rate: float = 0.0
    norm: NormKind = "batch"
    activation: str = "hardswish"
    image_size: int = field(default=224, compare=False)

    def __post_init__(self) -> None:
        check_stages(self, "channels", "head_channels")
        for name in ("features", "image_size"):
            check_count(name, getattr(self, name))
        for name in ("fusions", "blocks"):
            check_count(name, getattr(self, name), least=0)
        for name in ("drop_rate", "drop_path_rate"):
            check_probability(name, getattr(self, name))
        NormAct(self.norm, self.activation)  # refuses unknown names
        even = not any(count % 2 for count in self.channels)
        if not 2 <= len(self.channels) <= len(KERNELS) or self.channels[0] % STEM**2 or not even:
            raise ValueError(
                f"channels={self.channels}: expected 2 to {len(KERNELS)} even numbers, of which "
                f"the first is a multiple of {STEM**2}"
            )

    @property
    def levels(self) -> int:
        """Number of levels of the pyramid."""
        return len(self.channels)

    @property
    def size_multiple(self) -> int:
        """Height and width of an image must be multiples of it: each level halves them."""
        return STEM * 2 ** (self.levels - 1)

    @property
    def norm_act(self) -> NormAct:
        """Normalisation and activation, with the release's constants."""
        return NormAct(self.norm, self.activation, MOMENTUM, EPSILON)


def _row(width: float, fusions: int, image_size: int, **drops: Any) -> RevBiFPNVariant:
    def scaled(*counts: int) -> tuple[int, ...]:
        return tuple(int(width * count) // 16 * 16 for count in counts)

    return RevBiFPNVariant(
        channels=scaled(48, 64, 80, 160),
        head_channels=scaled(48, 64, 128, 320),
        features=scaled(1280)[0],
        fusions=fusions,
        image_size=image_size,
        **drops,
    )


# Table 1 of the paper, with the release's rates: factor of all widths, stages, image size.
REVBIFPNS: dict[str, RevBiFPNVariant] = {
    "revbifpn_s0": _row(1, 2, 224, drop_rate=0.25),
    "revbifpn_s1": _row(4 / 3, 2, 256, drop_rate=0.25),
    "revbifpn_s2": _row(2, 2, 256, drop_rate=0.3),
    "revbifpn_s3": _row(8 / 3, 3, 288, drop_rate=0.3, drop_path_rate=0.05),
    "revbifpn_s4": _row(4, 4, 320, drop_rate=0.4, drop_path_rate=0.1),
    "revbifpn_s5": _row(16 / 3, 4, 352, drop_rate=0.4, drop_path_rate=0.1),
    "revbifpn_s6": _row(20 / 3, 5, 352, drop_rate=0.6, drop_path_rate=0.3),
}


class SqueezeExcite(nn.Module):
    """``x * hardsigmoid(W2 act(W1 mean(x)))``: one factor for each channel (arXiv 1709.01507)."""

    def __init__(self, channels: int, *, hidden: int, act: nn.Module) -> None:
        super().__init__()
        self.reduce = nn.Conv2d(channels, hidden, 1)
        self.act = act
        self.expand = nn.Conv2d(hidden, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3), keepdim=True)
        return x * functional.hardsigmoid(self.expand(self.act(self.reduce(pooled))))


class MBConv(Lean):
    """A MobileNet block, ``(B, in, H, W) -> (B, out, ceil(H / stride), ceil(W / stride))``.

    ``kernel`` and ``stride`` are those of the depthwise convolution, ``expand`` its width over
    ``in_channels``, ``squeeze`` the hidden width of squeeze-excite over them. An ``expand`` of 1
    and a ``squeeze`` of 0 omit these layers. ``upsample`` is a factor of bilinear upsampling.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        kernel: int,
        expand: int,
        squeeze: float,
        norm_act: NormAct,
        stride: int = 1,
        drop_path: float = 0.0,
        upsample: int = 1,
    ) -> None:
        inner = in_channels * expand
        layers = OrderedDict[str, nn.Module]()
        if expand > 1:
            layers["expand_conv"] = nn.Conv2d(in_channels, inner, 1, bias=False)
            layers["expand_norm"] = norm_act.normalise(inner)
            layers["expand_act"] = norm_act.activate()
        layers["depth_conv"] = nn.Conv2d(
            inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False
        )
        layers["depth_norm"] = norm_act.normalise(inner)
        layers["depth_act"] = norm_act.activate()
        if squeeze:
            hidden = max(1, int(in_channels * squeeze))
            layers["excite"] = SqueezeExcite(inner, hidden=hidden, act=norm_act.activate())
        layers["project_conv"] = nn.Conv2d(inner, out_channels, 1, bias=False)
        layers["project_norm"] = norm_act.normalise(out_channels)
        if drop_path:
            layers["drop_path"] = stochastic_depth(drop_path)
        if upsample > 1:
            layers["upsample"] = nn.Upsample(scale_factor=upsample, mode="bilinear")
        super().__init__(layers)


class HeadLevel(Step):
    """``(z, x, ...) -> (last(neck(x) + down(z)), ...)``, ``(x, ...) -> (neck(x), ...)`` at first.

    ``x`` is the next level, ``z`` the result of the finer ones. Only the coarsest level has a
    ``last`` that is not the identity.
    """

    def __init__(self, neck: MBConv, *, down: MBConv | None, last: nn.Module, streams: int) -> None:
        super().__init__()
        self.neck = neck
        self.down = down
        self.last = last
        self.streams = streams

    @property
    def outputs(self) -> int:
        return self.streams - (self.down is not None)

    def forward(self, *state: Tensor) -> Tensor | State:
        if self.down is None:
            x, *rest = state
            return self.neck(x), *rest
        z, x, *rest = state
        return bare((self.last(self.neck(x) + self.down(z)), *rest))


class RevBiFPN(ConvolutionalClassifier):
    """RevBiFPN, ``(B, in_chans, H, W) -> (B, num_classes)``; its streams are the pyramid's levels.

    Height and width must be multiples of 32, for four levels. The maps of
    :meth:`forward_intermediates` and of ``features_only=True`` are the levels before the neck, the
    finest first. :meth:`encode` returns them in one tensor, finer ones squeezed.

    Example:
        >>> from revzoo.models.revbifpn import REVBIFPNS, RevBiFPN
        >>> model = RevBiFPN(REVBIFPNS["revbifpn_s0"])
        >>> maps = model.forward_intermediates(torch.zeros(2, 3, 64, 64), intermediates_only=True)
        >>> [tuple(m.shape) for m in maps]
        [(2, 48, 16, 16), (2, 64, 8, 8), (2, 80, 4, 4), (2, 160, 2, 2)]
    """

    default_memory: ClassVar[str] = "exact"
    size_reason: ClassVar[str] = "halves them from level to level"

    def __init__(
        self,
        variant: RevBiFPNVariant,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        copies = variant.channels[0] // STEM**2
        if in_chans > copies:
            raise ValueError(
                f"in_chans={in_chans}: expected at most {copies}, since level 0 has "
                f"{variant.channels[0]} channels for blocks of {STEM}x{STEM} pixels; choose a "
                f"wider variant, or channels=({in_chans * STEM**2}, ...)"
            )
        self.num_features = variant.features
        squeeze = Squeeze(STEM, order="irevnet", streams=1)
        stem = [squeeze] if in_chans == copies else [ChannelCopies(copies, of=in_chans), squeeze]
        count = variant.levels - 1 + variant.fusions
        self._build(variant, stem, (dict(_stage(variant, i, count)) for i in range(count)))
        self.head = ReversibleSequence(dict(_head(variant)), memory=self.default_memory)
        self.apply(_initialise)
        self._assemble(num_classes, variant.drop_rate, memory, global_pool)
        self._merge = (MergePyramid(variant.channels),)

    @property
    def streams(self) -> int:  # type: ignore[override]
        """The levels of the pyramid."""
        return self.variant.levels

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The levels, which the last stage returns together."""
        reductions = [STEM * 2**i for i in range(self.variant.levels)]
        infos = feature_infos(self.variant.channels, reductions)
        return tuple(info._replace(module=f"stages.{len(self.stages) - 1}") for info in infos)

    @property
    def encoded_channels(self) -> int:
        return sum(c * 4**i for i, c in enumerate(reversed(self.variant.channels)))

    def forward_features(self, x: Tensor) -> Tensor:
        """The result of neck and head, ``(B, num_features, H / 32, W / 32)``."""
        return self.head(*self._last_streams(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The features and levels of the pyramid, see :meth:`ImageNetwork.forward_intermediates`.

        All levels come from one pass, so ``stop_early`` only omits neck and head, and no
        normalisation of the head fits a level.
        """
        check_choice("output_fmt", output_fmt, ("NCHW",))
        taken = taken_indices(indices, self.variant.levels)
        levels = self._last_streams(x)
        maps = [level for i, level in enumerate(levels) if i in taken]
        if intermediates_only:
            return maps
        return (maps[-1] if stop_early else self.head(*levels)), maps

    def keep_maps(self, indices: Sequence[int]) -> None:
        self.keep_stages(len(self.stages))
        *_, last = self._sequences()
        for name, source, target in _silo(self.variant.levels):
            if source > target and target not in indices:
                del last[name]

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module in the release's file, and the one here."""
        levels = self.variant.levels
        for index in range(len(self.stages)):
            before, after = min(index + 1, levels), min(index + 2, levels)
            at, ours = 1 + index * (self.variant.blocks + 1), f"stages.{index}.steps"
            for block in range(self.variant.blocks):
                for i in range(before):
                    for name in "fg":
                        theirs = f"rev_stack.{at + block}.rev_transform_{i}.{name}.xform_0_1"
                        yield from _keys(self, theirs, f"{ours}.block{block}_{i}_{name}.branch")
            silo, last = f"rev_stack.{at + self.variant.blocks}", after - 1
            for name, i, j in _silo(after):
                # it counts the levels from the coarsest for the way up, followed by an upsampling
                theirs = f"f.xform_{i}_{j}" if i < j else f"g.xform_{last - i}_{last - j}.0"
                yield from _keys(self, f"{silo}.{theirs}", f"{ours}.{name}.branch")
        for i in range(levels):
            neck, ours = f"rev_stack.recomp_op.recomp_transform_{i}", f"head.steps.level{i}"
            yield from _keys(self, neck, f"{ours}.neck")
            if i:
                yield from _keys(self, f"head.pyramid_heads.{i - 1}", f"{ours}.down")
        yield "head.final_conv.conv", f"{ours}.last.conv"
        yield "head.final_conv.norm", f"{ours}.last.norm"
        yield "head.fc", "fc"


def _stage(variant: RevBiFPNVariant, index: int, count: int) -> Iterator[tuple[str, Step]]:
    """The named steps of stage ``index`` of ``count``."""
    levels = min(index + 1, variant.levels)
    drop_path = variant.drop_path_rate * (index + 1) / count
    common: Any = {"norm_act": variant.norm_act, "drop_path": drop_path}
    yield "split", SplitLevels(levels)
    for block in range(variant.blocks):
        for i in range(levels):
            half = variant.channels[i] // 2
            kind: Any = {"kernel": KERNELS[i], "expand": EXPANSIONS[i], "squeeze": SQUEEZES[i]}
            for name, target, source in (("f", 2 * i + 1, 2 * i), ("g", 2 * i, 2 * i + 1)):
                branch = MBConv(half, half, **kind, **common)
                step = LevelCoupling(branch, target=target, source=source, streams=2 * levels)
                yield f"block{block}_{i}_{name}", step
    yield "merge", Reversed(SplitLevels(levels))
    grows = levels < variant.levels
    if grows:
        yield "new", NewLevel(variant.channels[levels], levels=levels)
        levels += 1
    for name, source, target in _silo(levels):
        finer = min(source, target)
        stride = 2 ** max(0, target - source)
        branch = MBConv(
            variant.channels[source],
            variant.channels[target],
            kernel=2 * stride - 1 if stride > 1 else UP_KERNELS[source],
            expand=EXPANSIONS[finer],
            squeeze=SQUEEZES[finer],
            stride=stride,
            upsample=2 ** max(0, source - target),
            # a new level consists of these values alone
            **common | ({"drop_path": 0.0} if grows and target == levels - 1 else {}),
        )
        yield name, LevelCoupling(branch, target=target, source=source, streams=levels)


def _silo(levels: int) -> Iterator[tuple[str, int, int]]:
    """Names, sources and targets, in an order that reads each source before it changes."""
    for source in reversed(range(levels)):
        yield from ((f"down_{source}_{j}", source, j) for j in range(source + 1, levels))
    for source in range(levels):
        yield from ((f"up_{source}_{j}", source, j) for j in range(source))


def _head(variant: RevBiFPNVariant) -> Iterator[tuple[str, Step]]:
    """The named steps of neck and head."""
    widths = variant.head_channels
    common: Any = {"kernel": HEAD_KERNEL, "norm_act": variant.norm_act}
    for i in range(variant.levels):
        kinds: list[Any] = [
            {"expand": HEAD_EXPANSIONS[at], "squeeze": HEAD_SQUEEZES[at]} for at in (i, i - 1)
        ]
        neck = MBConv(variant.channels[i], widths[i], **kinds[0], **common)
        down = MBConv(widths[i - 1], widths[i], stride=2, **kinds[1], **common) if i else None
        last: nn.Module = nn.Identity()
        if i == variant.levels - 1:
            conv = nn.Conv2d(widths[i], variant.features, 1, bias=False)
            norm, act = variant.norm_act.normalise(variant.features), variant.norm_act.activate()
            last = Lean(OrderedDict(conv=conv, norm=norm, act=act))
        streams = variant.levels - max(0, i - 1)
        yield f"level{i}", HeadLevel(neck, down=down, last=last, streams=streams)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):  # as in the release; of a depthwise one, over all channels
        nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)


_BLOCK_KEYS = {
    "exp_conv.conv": "expand_conv",
    "exp_conv.norm": "expand_norm",
    "dw_conv.conv": "depth_conv",
    "dw_conv.norm": "depth_norm",
    "se.se.1": "excite.reduce",
    "se.se.3": "excite.expand",
    "project_conv.conv": "project_conv",
    "project_conv.norm": "project_norm",
}


def _keys(model: RevBiFPN, theirs: str, ours: str) -> Iterator[tuple[str, str]]:
    block = {name for name, _ in model.get_submodule(ours).named_modules()}
    return (
        (f"{theirs}.{their}", f"{ours}.{our}") for their, our in _BLOCK_KEYS.items() if our in block
    )
