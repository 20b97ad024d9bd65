"""Reversible multiscale vision transformers: pooling attention, and four resolutions of tokens.

    block         y1 = x1 + Attention(LN(x2)),  y2 = x2 + MLP(LN(y1))
    transition    x  = [x1, x2],                u  = x + Fuse(x)
                  v  = Pool(u) + Attention(LN(u)),  y1 = y2 = v + MLP(LN(v))

K. Mangalam, H. Fan, Y. Li, C.-Y. Wu, B. Xiong, C. Feichtenhofer, J. Malik, "Reversible Vision
Transformers", CVPR 2022, arXiv 2302.04869: Rev-MViT-B for images. Layers, epsilons and initial
values follow its PyTorch release (facebookresearch/SlowFast, Apache-2.0), with its configuration
``ImageNet/REV_MVIT_B_16_CONV``. The attention is that of H. Fan et al., "Multiscale Vision
Transformers", ICCV 2021, arXiv 2104.11227.

    image -> overlapping patches -> stages -> streams side by side -> LN -> average -> linear

A stage begins with a transition, except the first one, and has blocks after it. The transition
halves the sides of the map of tokens. The width of a stream doubles, since both streams form one,
which is then copied. A transition has no inverse: modes that invert recompute it from its input. It
is two steps, so the backward pass records one half at a time: in training, the counted peak is 30
MiB an image, not 42.

    Attention   LN - queries, keys, values - pool each - softmax(q k^T / sqrt(d)) v - linear
    Pool        depthwise 3x3 convolution, LN; the heads share its weights
    Fuse        linear - GELU - linear

Keys and values are pooled everywhere, by 4 in the first stage, 2 in the second and 1 after that;
queries only in a transition, by 2, where the same layers also pool the shortcut.

In training, the release drops random values at three places differently. It seeds torch's global
generator in each block. A block draws the images whose attention it drops, and drops their MLP too;
here each branch draws its own, as in a RevViT. And a transition of the release sets dropped images
to zero, behind the shortcut, so their features are lost; here it drops its branches.

Shapes: B batch, N tokens, D width of a token in one stream.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_counts
from revzoo.core.invertible import State, Step
from revzoo.layers.sequence import ReversibleBlock
from revzoo.models.components import drop_path_rates, stochastic_depth
from revzoo.models.lean import Lean, run
from revzoo.models.network import FeatureInfo, feature_infos
from revzoo.models.revvit import EPSILON, MLP, STD, TokenNetwork, TokenRow

# the release's values
PATCH_KERNEL, PATCH_STRIDE = 7, 4
POOL_KERNEL = 3
FIRST_KEY_STRIDE = 4  # of the pools of keys and values; each transition halves it
FUSE_RATIO = 2  # hidden width of Fuse over its width
BIAS = 0.02  # initial, of linear layers and normalisations


@dataclass(frozen=True, slots=True, kw_only=True)
class RevMViTVariant(TokenRow):
    """One row of the table of reversible multiscale vision transformers.

    Width and heads double with each stage; ``img_size`` is a multiple of ``size_multiple``.

    Attributes:
        units: number of blocks of each stage; in later stages, the first is the transition.
    """

    units: tuple[int, ...]
    heads: int = 1

    def __post_init__(self) -> None:
        TokenRow.__post_init__(self)
        # configurations give lists; the class is frozen, and rows must be hashable
        object.__setattr__(self, "units", check_counts("units", self.units))
        if self.img_size % self.size_multiple:
            raise ValueError(
                f"img_size={self.img_size}: expected a multiple of {self.size_multiple}, since "
                f"{len(self.units)} stages halve the map of patches; resize the images"
            )

    @property
    def reductions(self) -> tuple[int, ...]:
        """Image side over map side, of each stage."""
        return tuple(PATCH_STRIDE * 2**stage for stage in range(len(self.units)))

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of a token in one stream, of each stage."""
        return tuple(self.width * 2**stage for stage in range(len(self.units)))

    @property
    def size_multiple(self) -> int:
        """The side of an image must be a multiple of it."""
        return self.reductions[-1]


# The paper trains it with drop_path_rate 0.1.
REVMVITS: dict[str, RevMViTVariant] = {
    "revmvit_base": RevMViTVariant(width=96, units=(1, 2, 11, 2)),
}


class HeadPool(nn.Module):
    """``(B, N, C) -> (B, heads, N', C / heads)``: pools the map of tokens of each head.

    The tokens are ``side * side``; ``N'`` is ``ceil(side / stride) ** 2``.
    """

    def __init__(self, width: int, *, heads: int, side: int, stride: int) -> None:
        super().__init__()
        self.heads, self.side = heads, side
        depth = width // heads
        self.conv = nn.Conv2d(
            depth,
            depth,
            POOL_KERNEL,
            stride=stride,
            padding=POOL_KERNEL // 2,
            groups=depth,
            bias=False,
        )
        self.norm = nn.LayerNorm(depth, eps=EPSILON)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, width = x.shape
        depth = width // self.heads
        # heads as images, so that they share the weights
        maps = x.transpose(1, 2).reshape(batch * self.heads, depth, self.side, self.side)
        pooled: Tensor = self.norm(self.conv(maps).flatten(2).transpose(1, 2))
        return pooled.reshape(batch, self.heads, -1, depth)


class PoolingAttention(nn.Module):
    """Attention of pooled heads, ``(B, N, width) -> (B, N', width)``, normalisation first.

    ``N'`` is ``N`` if ``stride`` is 1, otherwise the number of pooled queries. The tokens are
    ``side * side``.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        side: int,
        stride: int,
        key_stride: int,
        dropout: float,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.q, self.k, self.v, self.proj = (nn.Linear(width, width) for _ in range(4))
        pool: dict[str, Any] = {"heads": heads, "side": side}
        self.pool_q = HeadPool(width, stride=stride, **pool) if stride > 1 else None
        self.pool_k, self.pool_v = (HeadPool(width, stride=key_stride, **pool) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q = self.q(y)
        if self.pool_q is not None:
            q = self.pool_q(q)
        else:
            q = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.pool_k(self.k(y)), self.pool_v(self.v(y))
        mixed = functional.scaled_dot_product_attention(q, k, v)  # (B, heads, N', width / heads)
        mixed = mixed.transpose(1, 2).flatten(2)
        return self.drop_path(run((self.proj, self.drop), mixed))


class FuseStreams(Step):
    """``x = [x1, x2] -> x + Fuse(x)``: two streams ``(B, N, width / 2)`` to ``(B, N, width)``."""

    streams = 2
    outputs = 1

    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = FUSE_RATIO * width
        self.branch = Lean(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, *state: Tensor) -> Tensor:
        x = torch.cat(state, dim=-1)
        return x + self.branch(x)


class StageTransition(Step):
    """``(B, N, D)`` to two equal streams ``(B, N / 4, D)``.

    ``attention`` pools its queries; the shortcut goes through the same layers.
    """

    streams = 1
    outputs = 2

    def __init__(self, attention: PoolingAttention, *, mlp: MLP) -> None:
        super().__init__()
        self.attention = attention
        self.mlp = mlp

    def forward(self, x: Tensor) -> State:
        assert self.attention.pool_q is not None
        y = self.attention.pool_q(x).transpose(1, 2).flatten(2) + self.attention(x)
        y = y + self.mlp(y)
        return y, y  # one tensor twice: steps do not change their inputs


class RevMViT(TokenNetwork):
    """Reversible multiscale ViT, ``(B, in_chans, img_size, img_size) -> (B, num_classes)``.

    The blocks are invertible, the patch embedding and the transitions are not, so :meth:`inverse`
    raises. There is a feature map for each stage.

    Example:
        >>> from revzoo.models.revmvit import RevMViT, RevMViTVariant
        >>> row = RevMViTVariant(width=8, units=(1, 2), img_size=32)
        >>> RevMViT(row)(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    @staticmethod
    def patch_conv(variant: RevMViTVariant, in_chans: int) -> nn.Conv2d:
        side = PATCH_KERNEL
        return nn.Conv2d(in_chans, variant.width, side, stride=PATCH_STRIDE, padding=side // 2)

    def build_stages(self, variant: RevMViTVariant) -> Iterator[Iterable[Step]]:
        rates = iter(drop_path_rates(variant.drop_path_rate, sum(variant.units)))
        for stage, units in enumerate(variant.units):
            yield _steps(variant, stage, [next(rates) for _ in range(units)])

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            # as in the release; it cuts off at -2 and 2, which is 100 standard deviations
            nn.init.trunc_normal_(module.weight, std=STD)
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            nn.init.constant_(module.bias, BIAS)

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        return self.norm(z) if last else z

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        channels = (self.streams * width for width in self.variant.widths)
        return feature_infos(channels, self.variant.reductions)

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Pairs: a module or tensor of PySlowFast's Rev-MViT, and the one here."""
        yield from (("patch_embed.proj", "stem.steps.0.conv"), ("head.projection", "fc"))
        yield "pos_embed", "stem.steps.0.positions"

        def paths(kind: type[nn.Module]) -> list[str]:
            return [path for path, module in self.named_modules() if isinstance(module, kind)]

        for i, ours in zip(accumulate(self.variant.units), paths(FuseStreams), strict=False):
            for layer, place in (("fc1", "0"), ("fc2", "2")):
                theirs = f"rev_backbone.layers.{i}.pre_q_fuse.fuse_fn.{layer}"
                yield theirs, f"{ours}.branch.{place}"
        branches = zip(paths(PoolingAttention), paths(MLP), strict=True)
        for i, (attention, mlp) in enumerate(branches):
            theirs = f"rev_backbone.layers.{i}"
            yield f"{theirs}.F.norm", f"{attention}.norm"
            yield f"{theirs}.F.attn.proj", f"{attention}.proj"
            for name in "qkv":
                yield f"{theirs}.F.attn.{name}", f"{attention}.{name}"
                yield f"{theirs}.F.attn.pool_{name}", f"{attention}.pool_{name}.conv"
                yield f"{theirs}.F.attn.norm_{name}", f"{attention}.pool_{name}.norm"
            yield f"{theirs}.G.norm", f"{mlp}.norm"
            for name in ("fc1", "fc2"):
                yield f"{theirs}.G.mlp.{name}", f"{mlp}.{name}"

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        adapted = super().adapt_state_dict(tensors)
        # the release pools by convolutions of videos, 1x3x3
        return {key: t.squeeze(2) if t.dim() == 5 else t for key, t in adapted.items()}


def _steps(variant: RevMViTVariant, stage: int, rates: list[float]) -> Iterator[Step]:
    width, heads = variant.widths[stage], variant.heads * 2**stage
    side = variant.img_size // variant.reductions[stage]
    if stage:
        yield FuseStreams(width)
    for unit, rate in enumerate(rates):
        stride = 2 if stage and not unit else 1
        drops = {"dropout": variant.dropout, "drop_path": rate}
        attention = PoolingAttention(
            width,
            heads=heads,
            side=stride * side,  # before the pool
            stride=stride,
            key_stride=max(FIRST_KEY_STRIDE >> stage, 1),
            **drops,
        )
        hidden = variant.mlp_ratio * width
        mlp = MLP(width, hidden=hidden, activation=variant.activation, **drops)
        if stride > 1:
            yield StageTransition(attention, mlp=mlp)
        else:
            yield ReversibleBlock(attention, mlp)
