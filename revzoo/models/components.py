"""Layers of the convolutional networks: convolutions, norms, residual functions, pooling.

The constants are those of A. Gomez, M. Ren, R. Urtasun, R. Grosse, "The Reversible Residual
Network", NeurIPS 2017, arXiv 1707.04585, and its TensorFlow release. This is the one place where
they are converted to torch's conventions.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional

from revzoo._checks import check_choice, check_counts, check_probability
from revzoo.core.invertible import Step, calls_only_forward
from revzoo.layers.streams import narrowed
from revzoo.models.lean import Lean, run

# TensorFlow: running = decay * running + (1 - decay) * batch with decay 0.99;
# torch: running = (1 - momentum) * running + momentum * batch. So momentum = 1 - decay.
MOMENTUM = 0.01
# The release passes it to its batch normalisation (ResNetModel._batch_norm).
EPSILON = 1e-3
# Channels per group. Wu and He 2018 (arXiv 1803.08494) report about the same accuracy for 16
# channels per group as for 32 groups, which would be single channels in a CIFAR network.
GROUP_SIZE = 16
# The cut-off of initial weights, in standard deviations (tf.truncated_normal_initializer).
TRUNCATION = 2.0

NormKind = Literal["batch", "group", "none"]
ACTIVATIONS: Mapping[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "hardswish": nn.Hardswish,
    "tanh": nn.Tanh,
}


def check_stages(row: Any, *names: str) -> None:
    """Check that the fields ``names`` of a row are counts, one for each stage; make them tuples.

    Raises:
        ValueError: a field is no sequence of counts, or they differ in length.
    """
    for name in names:
        # configurations give lists; the class is frozen, and rows must be hashable
        object.__setattr__(row, name, check_counts(name, getattr(row, name)))
    if len({len(getattr(row, name)) for name in names}) > 1:
        got = ", ".join(f"{name}={getattr(row, name)}" for name in names)
        raise ValueError(f"{got}: expected one value of each per stage")


class SamePadding(nn.Module):
    """Pads ``(B, C, H, W)`` as TensorFlow's "SAME", for the layer without padding that follows.

    The layer then gives ``(ceil(H/stride), ceil(W/stride))``. An odd number of pixels is padded as
    ``n // 2`` before and the rest after the image. So a kernel of 3 with stride 2 pads an even side
    only after the image, where torch's padding of 1 shifts its places by one pixel.
    ``value`` fills the padding: ``-inf`` before a max pool.
    """

    def __init__(self, kernel_size: int, *, stride: int, value: float = 0.0) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = stride
        self.value = value

    def forward(self, x: Tensor) -> Tensor:
        pads: list[int] = []
        for side in (x.shape[3], x.shape[2]):  # torch's order: the last dimension first
            places = -(-side // self.stride)  # rounded up
            missing = max((places - 1) * self.stride + self.kernel_size - side, 0)
            pads += (missing // 2, missing - missing // 2)
        return functional.pad(x, pads, value=self.value)

    def extra_repr(self) -> str:
        return f"{self.kernel_size}, stride={self.stride}"


def conv2d(
    in_channels: int,
    *,
    out_channels: int,
    kernel_size: int,
    stride: int = 1,
    padding: int | None = None,
) -> nn.Conv2d:
    """Convolution ``(B, in, H, W) -> (B, out, ceil(H/stride), ceil(W/stride))``; odd kernels.

    It has no bias, since a batch normalisation follows, directly or in the next unit.
    Weights are drawn from a normal distribution, truncated at two standard deviations, with
    ``std = sqrt(2 / (k * k * out_channels))`` before truncation (He et al. 2015, arXiv 1502.01852,
    fan-out form), as in the release. ``torch.nn.init.kaiming_normal_`` does not truncate.

    For stride 2 and an even size, the release pads one pixel less before the image: pass
    ``padding=0`` and put :class:`SamePadding` in front.
    """
    padding = kernel_size // 2 if padding is None else padding
    layer = nn.Conv2d(
        in_channels, out_channels, kernel_size, stride=stride, padding=padding, bias=False
    )
    # fan-out keeps the size of gradients; fan-in, torch's default, the size of activations
    std = math.sqrt(2.0 / (kernel_size * kernel_size * out_channels))
    nn.init.trunc_normal_(layer.weight, std=std, a=-TRUNCATION * std, b=TRUNCATION * std)
    return layer


def adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Adapt a convolution's weights ``(out, C, h, w)`` to ``channels`` input channels.

    By timm's rules: for one channel their sum, otherwise repeated and scaled, so that the sum over
    channels stays about the same.
    """
    old = weight.shape[1]
    if channels == 1:
        return weight.sum(dim=1, keepdim=True)
    repeated = weight.repeat(1, -(-channels // old), 1, 1)[:, :channels]  # rounded up, cut off
    return repeated * (old / channels)


@dataclass(frozen=True, slots=True)
class NormAct:
    """The normalisation and activation of a network; makes the layers.

    Attributes:
        norm: ``"batch"``, ``"group"`` (groups of 16 channels, or of the largest power of two that
            divides them) or ``"none"``.
        activation: a name in :data:`ACTIVATIONS`.
        momentum: of batch normalisation, in torch's convention.
        epsilon: added to the variance.

    Raises:
        ValueError: unknown normalisation or activation.
    """

    norm: NormKind = "batch"
    activation: str = "relu"
    momentum: float = MOMENTUM
    epsilon: float = EPSILON

    def __post_init__(self) -> None:
        check_choice("norm", self.norm, get_args(NormKind))
        check_choice("activation", self.activation, ACTIVATIONS)

    def normalise(self, channels: int) -> nn.Module:
        """Normalisation of ``(B, channels, H, W)``."""
        if self.norm == "batch":
            return nn.BatchNorm2d(channels, eps=self.epsilon, momentum=self.momentum)
        if self.norm == "group":
            return nn.GroupNorm(channels // math.gcd(channels, GROUP_SIZE), channels, self.epsilon)
        return nn.Identity()

    def activate(self) -> nn.Module:
        """The activation, out of place: its input may be a stream."""
        return ACTIVATIONS[self.activation]()


RELEASE = NormAct()
"""Batch normalisation and ReLU with the constants of the RevNet release."""


class PlainStem(Step):
    """The first layers of a network, one after the other, on one stream."""

    streams = 1

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return run(self.children(), x)  # keeps less, see lean.py


def drop_path_rates(rate: float, depth: int) -> list[float]:
    """The probabilities of ``depth`` units, from 0 for the first to ``rate`` for the last."""
    check_probability("drop_path_rate", rate)
    return [rate * i / max(1, depth - 1) for i in range(depth)]


def stochastic_depth(rate: float) -> nn.Module:
    """Stochastic depth: in training, drops the whole value of a branch for random images.

    Huang et al. 2016, arXiv 1603.09382; a kept value is divided by the probability of keeping it.
    If the value is dropped, the coupling's stream passes unchanged, so the inverse works as usual,
    and a replay draws the same images. On a grid, the value is rounded after the division.
    """
    if not rate:
        return nn.Identity()
    # imported only when needed: torchvision imports torch's compiler, which takes seconds
    from torchvision.ops import StochasticDepth

    return StochasticDepth(rate, mode="row")


class Branch(Lean):
    """A residual function F or G, in pre-activation order (He et al. 2016, arXiv 1603.05027).

        [BN-ReLU] conv - BN-ReLU - conv - ... - BN-ReLU - [dropout] - conv - [drop path]

    It maps ``(B, in, H, W)`` to ``(B, out, ceil(H/stride), ceil(W/stride))``. It has no skip
    connection: the coupling or unit around it adds. It computes in autocast's type if autocast is
    on, and does not change its input, which is a stream. Dropout is between the last two
    convolutions (as in Wide ResNets, arXiv 1605.07146). Dropout and drop path have no parameters,
    and convolutions are numbered from 1: the ``state_dict`` keys are always the same.

    Args:
        in_channels, out_channels: of the whole function.
        kernels: side of each convolution's kernel.
        inner: channels between the convolutions; None for ``out_channels``.
        stride, strided: of one convolution, and its index.
        activate_first: False omits the leading BN-ReLU, for the first branch after a stem that ends
            in BN-ReLU.
        dropout, drop_path: probabilities of zeroing an activation, and the whole value of an image.
        dropout_at_conv: dropout before the last BN-ReLU, not after it.
        same: pad the strided convolution with :class:`SamePadding`.
        norm_act: makes the normalisations and activations.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        out_channels: int,
        kernels: tuple[int, ...] = (3, 3),
        inner: int | None = None,
        stride: int = 1,
        strided: int = 0,
        activate_first: bool = True,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        dropout_at_conv: bool = False,
        same: bool = False,
        norm_act: NormAct = RELEASE,
    ) -> None:
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        last = len(kernels) - 1
        width = in_channels
        for i, kernel in enumerate(kernels):
            if i or activate_first:
                layers[f"norm{i + 1}"] = norm_act.normalise(width)
                layers[f"relu{i + 1}"] = norm_act.activate()
            if dropout and i == last and not dropout_at_conv:
                layers[f"dropout{i + 1}"] = nn.Dropout(dropout)
            before, width = width, out_channels if i == last or inner is None else inner
            step = stride if i == strided else 1
            pads = same and step > 1 and kernel > 1
            if pads:
                layers[f"pad{i + 1}"] = SamePadding(kernel, stride=step)
            layers[f"conv{i + 1}"] = conv2d(
                before,
                out_channels=width,
                kernel_size=kernel,
                stride=step,
                padding=0 if pads else None,
            )
            if dropout and i == last - 1 and dropout_at_conv:
                layers[f"dropout{i + 1}"] = nn.Dropout(dropout)
        if drop_path:
            layers["drop_path"] = stochastic_depth(drop_path)
        super().__init__(layers)

    @property
    def narrows(self) -> bool:
        """Whether a replay may give ``forward`` a stream that is in autocast's type already."""
        # a hook would see other types; without the cast, a first layer would change a leaf in place
        return calls_only_forward(self) and not any(getattr(m, "inplace", False) for m in self)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(narrowed(x))


# by timm's names (R. Wightman); over the dimensions of all places
POOLS: dict[str, Callable[[Tensor, tuple[int, ...]], Tensor]] = {
    "avg": lambda x, places: x.mean(places),
    "max": lambda x, places: x.amax(places),
    "avgmax": lambda x, places: 0.5 * (x.mean(places) + x.amax(places)),
    "catavgmax": lambda x, places: torch.cat((x.mean(places), x.amax(places)), dim=1),
    "": lambda x, places: x,  # returns the map or the tokens
}


class GlobalPool(nn.Module):
    """``(B, C, H, W)`` or ``(B, N, C)`` to ``(B, C * widening)``.

    Args:
        kind: ``"avg"``, ``"max"``, ``"avgmax"`` (half of their sum), ``"catavgmax"`` (both, side by
            side: twice the channels), or empty for none.
        places: the dimensions to pool over: ``(2, 3)`` of maps, ``(1,)`` of tokens.
    """

    def __init__(self, kind: str, *, places: tuple[int, ...]) -> None:
        super().__init__()
        check_choice("global_pool", kind, POOLS)
        self.kind = kind
        self.places = places

    @property
    def widening(self) -> int:
        """Output channels divided by input channels."""
        return 2 if self.kind == "catavgmax" else 1

    def forward(self, x: Tensor) -> Tensor:
        return POOLS[self.kind](x, self.places)

    def extra_repr(self) -> str:
        return f"{self.kind!r}, places={self.places}"
