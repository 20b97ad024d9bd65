"""Reversible vision transformers, and a plain one as their baseline.

    RevViT    y1 = x1 + Attention(LN(x2)),  y2 = x2 + MLP(LN(y1))
    ViT       y = x + Attention(LN(x)),     z = y + MLP(LN(y))

K. Mangalam, H. Fan, Y. Li, C.-Y. Wu, B. Xiong, C. Feichtenhofer, J. Malik, "Reversible Vision
Transformers", CVPR 2022, arXiv 2302.04869: Rev-ViT, with the widths, depths and heads of its
baselines ViT and DeiT. Both streams start as the patch embedding. At the end they are concatenated,
normalised, averaged over the tokens and classified by a linear layer of width 2 D. The plain ViT
here (Dosovitskiy et al. 2021, arXiv 2010.11929) has one stream, so its last layers have width D;
all else is the same.

There is no class token: the head averages all tokens. The average has no parameters, and it uses
the patch tokens of the last layers, which a class token would leave unread.

    Attention   LN - queries, keys, values - softmax(q k^T / sqrt(d)) v - linear - [dropout]
    MLP         LN - linear - activation - [dropout] - linear - [dropout]

Both end in stochastic depth (Huang et al. 2016, arXiv 1603.09382). ``torch.nn.MultiheadAttention``
computes the same attention, but takes three inputs and a mask, which a branch of one stream does
not have.

Shapes: B batch, N patches, D width of a token in one stream.
"""

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice, check_count, check_probability
from revzoo.core.invertible import State, Step, as_state
from revzoo.layers.sequence import ReversibleBlock, ReversibleSequence
from revzoo.models.components import ACTIVATIONS, drop_path_rates, stochastic_depth
from revzoo.models.lean import run
from revzoo.models.network import FeatureInfo, ImageNetwork, ImageSizeError
from revzoo.models.revnet import ResidualUnit

# Standard deviation of the initial weights, truncated at two deviations, as in DeiT (2012.12877).
STD = 0.02
# ViT's layer normalisation (the JAX release of arXiv 2010.11929); torch's default is 1e-5.
EPSILON = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRow:
    """Width and sizes of a vision transformer.

    Attributes:
        width: width D of a token in one stream, in the first stage.
        heads: heads of the attention there, a divisor of ``width``.
        img_size: height and width of the images in pixels; decides the number of position
            embeddings.
        mlp_ratio: hidden width of an MLP over its width.
        activation: of the MLPs, a name in :data:`~revzoo.models.components.ACTIVATIONS`.
        dropout: probability of zeroing a value in a branch.
        drop_path_rate: probability of dropping a branch for an image (stochastic depth) in the last
            block; it rises linearly from 0 at the first.

    Raises:
        ValueError: a field is out of range or does not fit another.
    """

    width: int
    heads: int
    img_size: int = 224
    mlp_ratio: int = 4
    activation: str = "gelu"
    dropout: float = 0.0
    drop_path_rate: float = 0.0

    def __post_init__(self) -> None:
        for field in ("width", "heads", "img_size", "mlp_ratio"):
            check_count(field, getattr(self, field))
        for field in ("dropout", "drop_path_rate"):
            check_probability(field, getattr(self, field))
        check_choice("activation", self.activation, ACTIVATIONS)
        if self.width % self.heads:
            raise ValueError(f"width={self.width}: expected a multiple of heads={self.heads}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RevViTVariant(TokenRow):
    """One row of the table of reversible vision transformers; ``patch_size`` divides ``img_size``.

    Attributes:
        depth: number of blocks; each is an attention and an MLP.
        patch_size: side of a patch in pixels.
    """

    depth: int
    patch_size: int = 16

    def __post_init__(self) -> None:
        TokenRow.__post_init__(self)
        check_count("depth", self.depth)
        check_count("patch_size", self.patch_size)
        if self.img_size % self.patch_size:
            raise ValueError(
                f"img_size={self.img_size}: expected a multiple of patch_size={self.patch_size}; "
                "choose a patch_size that divides it, or resize the images"
            )


# The first three are Rev-ViT-S, -B and -L of the paper; the last is for images of 32x32.
REVVITS: dict[str, RevViTVariant] = {
    "revvit_small": RevViTVariant(width=384, depth=12, heads=6),
    "revvit_base": RevViTVariant(width=768, depth=12, heads=12),
    "revvit_large": RevViTVariant(width=1024, depth=24, heads=16),
    "revvit_cifar": RevViTVariant(width=128, depth=6, heads=4, img_size=32, patch_size=4),
}


# The baseline of revvit_cifar. timm and torchvision have the baselines for images of 224x224.
VITS: dict[str, RevViTVariant] = {"vit_cifar": REVVITS["revvit_cifar"]}


class Attention(nn.Module):
    """Multi-head self-attention on ``(B, N, width)``, normalisation first.

    ``dropout`` is the probability of zeroing a value of the result, ``drop_path`` that of dropping
    the whole result of a sample.
    """

    def __init__(
        self, width: int, *, heads: int, dropout: float = 0.0, drop_path: float = 0.0
    ) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(self.norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, heads, N, D / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        return self.drop_path(run((self.proj, self.drop), mixed))


class MLP(nn.Module):
    """Two linear layers on each token of ``(B, N, width)``, normalisation first.

    ``dropout`` is the probability of zeroing a value after either layer, ``drop_path`` that of
    dropping the whole result of a sample.
    """

    def __init__(
        self,
        width: int,
        *,
        hidden: int,
        activation: str = "gelu",
        dropout: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.fc1 = nn.Linear(width, hidden)
        self.act = ACTIVATIONS[activation]()
        self.fc2 = nn.Linear(hidden, width)
        self.drop = nn.Dropout(dropout)
        self.drop_path = stochastic_depth(drop_path)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.norm, self.fc1, self.act, self.drop, self.fc2, self.drop)
        return self.drop_path(run(layers, x))


class PatchEmbedding(Step):
    """``(B, in_chans, H, W)`` -> ``copies`` equal streams ``(B, N, D)``, the embedded patches.

    ``conv`` maps the image to one pixel for each of the ``patches``.
    """

    streams = 1

    def __init__(self, conv: nn.Conv2d, *, patches: int, copies: int) -> None:
        super().__init__()
        self.copies = copies
        self.conv = conv
        self.positions = nn.Parameter(torch.empty(1, patches, conv.out_channels))
        nn.init.trunc_normal_(self.positions, std=STD)

    def forward(self, x: Tensor) -> State:
        # (B, D, H / P, W / P) -> (B, N, D)
        tokens = self.conv(x).flatten(2).transpose(1, 2) + self.positions
        return (tokens,) * self.copies  # one tensor twice: steps do not change their inputs


class TokenNetwork(ImageNetwork):
    """Transformer for square images of one size, since each patch has a learned position.

    Its streams are tokens ``(B, N, D)``, numbered row by row.

    Args:
        variant: width, depths and sizes. The keywords are those of :func:`revzoo.create_model`.

    Raises:
        ValueError: an argument is out of range.
    """

    default_memory: ClassVar[str] = "exact"
    channel_dim: ClassVar[int] = -1
    input_layer = "stem.steps.0.conv"
    positions = "stem.steps.0.positions"

    def __init__(
        self,
        variant: Any,
        *,
        num_classes: int = 10,
        in_chans: int = 3,
        memory: str | None = None,
        drop_rate: float = 0.0,
        global_pool: str = "avg",
    ) -> None:
        super().__init__(in_chans=in_chans)
        conv = self.patch_conv(variant, in_chans)
        patches = (variant.img_size // conv.stride[0]) ** 2
        embedding = PatchEmbedding(conv, patches=patches, copies=self.streams)
        self._build(variant, [embedding], self.build_stages(variant))
        self.num_features = self.feature_info[-1].num_chs
        self.norm = nn.LayerNorm(self.num_features, eps=EPSILON)
        self.apply(self.initialise)
        self._assemble(num_classes, drop_rate, memory, global_pool)

    @staticmethod
    @abstractmethod
    def patch_conv(variant: Any, in_chans: int) -> nn.Conv2d:
        """The convolution that embeds the patches."""

    @abstractmethod
    def build_stages(self, variant: Any) -> Iterator[Iterable[Step]]:
        """The steps of each stage, built lazily."""

    @staticmethod
    @abstractmethod
    def initialise(module: nn.Module) -> None:
        """Set the initial weights of one layer."""

    @property
    def image_size(self) -> int:
        return int(self.variant.img_size)

    def as_map(self, z: Tensor) -> Tensor:
        side = math.isqrt(z.shape[1])
        # (B, N, C) -> (B, C, side, side)
        return z.transpose(1, 2).reshape(len(z), z.shape[2], side, side)

    def check_size(self, height: int, width: int) -> None:
        if (height, width) != (size := self.image_size, size):  # each patch has a learned position
            other = f"create it with img_size={height} (model.img_size={height})"
            raise ImageSizeError(
                f"images of {height} x {width} pixels: expected {size} x {size}, for which this "
                "model was created",
                f"; resize them (a folder of images: data.image_size={size}), or "
                + (other if height == width else "take another model: this one takes squares only"),
                sizes=(size, size),
            )


class RevViT(TokenNetwork):
    """Reversible ViT, ``(B, in_chans, img_size, img_size) -> (B, num_classes)``; two streams.

    Every block is invertible, but the patch embedding is not. So ``model.stages[0].inverse`` works
    and :meth:`inverse` raises.

    Example:
        >>> from revzoo.models.revvit import REVVITS, RevViT
        >>> RevViT(REVVITS["revvit_cifar"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    @staticmethod
    def patch_conv(variant: RevViTVariant, in_chans: int) -> nn.Conv2d:
        side = variant.patch_size
        return nn.Conv2d(in_chans, variant.width, side, stride=side)  # a linear map of each patch

    def build_stages(self, variant: RevViTVariant) -> Iterator[Iterable[Step]]:
        # one stage: the width is the same throughout, so all blocks form one reversible run
        blocks = []
        for rate in drop_path_rates(variant.drop_path_rate, variant.depth):
            drops = {"dropout": variant.dropout, "drop_path": rate}
            attention = Attention(variant.width, heads=variant.heads, **drops)
            hidden = variant.mlp_ratio * variant.width
            mlp = MLP(variant.width, hidden=hidden, activation=variant.activation, **drops)
            blocks.append(self.build_block(attention, mlp))
        yield blocks

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=STD, a=-2 * STD, b=2 * STD)
            nn.init.zeros_(module.bias)

    @staticmethod
    def build_block(attention: Attention, mlp: MLP) -> Step:
        """The step of one block."""
        return ReversibleBlock(attention, mlp)

    def normed(self, z: Tensor, *, last: bool) -> Tensor:
        return self.norm(z)

    @property
    def feature_info(self) -> tuple[FeatureInfo, ...]:
        """The tokens after each block as one map, as in timm."""
        return tuple(
            FeatureInfo(
                self.streams * self.variant.width, self.variant.patch_size, f"stages.0.steps.{i}"
            )
            for i in range(self.variant.depth)
        )

    def stage_states(self, x: Tensor) -> Iterator[State]:
        self._check_images(x)
        state = as_state(self.stem(x))
        _, blocks = self._sequences()
        for block in blocks:  # after each block, as timm's ViTs do, not only after the one stage
            state = as_state(block(*state))
            yield state

    def keep_stages(self, count: int) -> None:
        _, blocks = self._sequences()
        blocks.steps = blocks.steps[:count]
        super().keep_stages(1)

    def published_keys(self) -> Iterator[tuple[str, str]]:
        """Of PySlowFast's Rev-ViT, whose queries, keys and values are three layers."""
        yield from (("patch_embed.proj", "stem.steps.0.conv"), ("head.projection", "fc"))
        yield "pos_embed", "stem.steps.0.positions"
        for i in range(self.variant.depth):
            theirs, ours = f"rev_backbone.layers.{i}", f"stages.0.steps.{i}.steps"
            yield f"{theirs}.F.norm", f"{ours}.0.branch.norm"
            yield f"{theirs}.F.attn.proj", f"{ours}.0.branch.proj"
            yield f"{theirs}.G.norm", f"{ours}.1.branch.norm"
            yield f"{theirs}.G.mlp.fc1", f"{ours}.1.branch.fc1"
            yield f"{theirs}.G.mlp.fc2", f"{ours}.1.branch.fc2"

    def adapt_state_dict(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        renamed = dict(super().adapt_state_dict(tensors))
        for i, leaf in itertools.product(range(self.variant.depth), ("weight", "bias")):
            three = [f"rev_backbone.layers.{i}.F.attn.{name}.{leaf}" for name in "qkv"]
            if all(key in renamed for key in three):
                merged = torch.cat([renamed.pop(key) for key in three])
                renamed[f"stages.0.steps.{i}.steps.0.branch.qkv.{leaf}"] = merged
        return renamed


class ViT(RevViT):
    """Plain ViT, ``(B, in_chans, img_size, img_size) -> (B, num_classes)``; one stream.

    Its blocks have no inverse, so the memory modes are ``store`` and ``recompute``;
    :func:`revzoo.create_model` makes them reversible with ``reversible_bits=4``.

    Example:
        >>> from revzoo.models.revvit import VITS, ViT
        >>> ViT(VITS["vit_cifar"])(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    default_memory: ClassVar[str] = "store"
    streams: ClassVar[int] = 1
    convertible: ClassVar[bool] = True

    @staticmethod
    def build_block(attention: Attention, mlp: MLP) -> Step:
        # one step for both, so that block i is stages.0.steps.i, as in a RevViT
        units = [ResidualUnit(branch, shortcut=nn.Identity()) for branch in (attention, mlp)]
        return ReversibleSequence(units, memory="store")
