"""torch's layers and functions, for counts of what they keep.

Each row makes a module that maps one floating-point tensor to a tensor, and gives the input's
shape. A layer keeps less if its input requires no gradient, so most come after a learned layer or
scale.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

TOKENS, IMAGES, VOLUMES = (8, 32, 64), (4, 16, 16, 16), (2, 4, 8, 8, 8)


class Row(NamedTuple):
    """A module and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    fakes: bool = True  # whether it runs on fake tensors


class Called(nn.Module):
    """A layer, called by a function of the layer and the input."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Any:
        return self.call(self.layer, x)


class Scaled(nn.Module):
    """A function of the input, times a learned scale."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(())), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale)


def after_conv(*layers: nn.Module) -> nn.Module:
    """The layers after a convolution of images."""
    return nn.Sequential(nn.Conv2d(16, 16, 1), *layers)


def after_linear(*layers: nn.Module) -> nn.Module:
    """The layers after a linear map of tokens."""
    return nn.Sequential(nn.Linear(64, 64), *layers)


def first(layer: Any, x: Tensor) -> Any:
    """The first output of a layer."""
    return layer(x)[0]


def recurrent(kind: type[nn.Module], **options: Any) -> Row:
    """A recurrent layer of 64 features."""
    return Row(lambda: Called(kind(64, 64, batch_first=True, **options), first), TOKENS)


def attention(*, masked: bool = False, **options: Any) -> Row:
    """Attention of four heads."""

    def call(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        mask = torch.zeros(32, 32) if masked else None
        mixed = functional.scaled_dot_product_attention(heads, heads, heads, mask, **options)
        return mixed.transpose(1, 2).flatten(2)

    return Row(lambda: Scaled(call), TOKENS)


def indices(x: Tensor, count: int) -> Tensor:
    """Whole numbers below ``count``."""
    return (100 * x.detach().abs()).long() % count


def embedded(kind: type[nn.Module], **options: Any) -> Row:
    """An embedding of 100 words, in batches of 32."""
    return Row(
        lambda: Called(kind(100, 64, **options), lambda layer, x: layer(indices(x, 100))), (8, 32)
    )


def image_function(function: Callable[[Tensor], Tensor]) -> Row:
    """A function of images."""
    return Row(lambda: Scaled(function), IMAGES)


def token_function(function: Callable[[Tensor], Tensor], *, fakes: bool = True) -> Row:
    """A function of tokens."""
    return Row(lambda: Scaled(function), TOKENS, fakes)


def sampled(layer: Any, x: Tensor) -> Tensor:
    """The input, sampled on a grid that the layer chooses."""
    grid = functional.affine_grid(
        layer(x.mean((2, 3))).view(-1, 2, 3), list(x.shape), align_corners=False
    )
    return functional.grid_sample(x, grid, align_corners=False)


def ctc(layer: Any, x: Tensor) -> Tensor:
    """The loss of a transcription of 10 letters."""
    letters = layer(x).transpose(0, 1).log_softmax(-1)
    lengths = torch.full((8,), 32), torch.full((8,), 10)
    return functional.ctc_loss(letters, torch.ones(8, 10, dtype=torch.long), *lengths)


def packed(layer: Any, x: Tensor) -> Tensor:
    """Sequences of different lengths."""
    lengths = torch.arange(32, 0, -4)
    return layer(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True))[0].data


TORCH_LAYERS: dict[str, Row] = {
    "lstm": recurrent(nn.LSTM),
    "lstm, 2 layers, both ways": recurrent(
        nn.LSTM, num_layers=2, bidirectional=True, dropout=0.1, bias=False
    ),
    "lstm, projected": recurrent(nn.LSTM, proj_size=16),
    "lstm, float64": Row(lambda: Called(nn.LSTM(64, 64).double(), first), TOKENS),
    "lstm, bfloat16": Row(lambda: Called(nn.LSTM(64, 64).bfloat16(), first), TOKENS),
    "lstm of packed sequences": Row(lambda: Called(nn.LSTM(64, 64), packed), TOKENS, False),
    "lstm cell": Row(lambda: Called(nn.LSTMCell(64, 64), first), (32, 64)),
    "gru": recurrent(nn.GRU, num_layers=2),
    "gru cell": Row(lambda: nn.GRUCell(64, 64), (32, 64)),
    "rnn": recurrent(nn.RNN),
    "multi-head attention": Row(
        lambda: Called(nn.MultiheadAttention(64, 4, batch_first=True), lambda m, x: m(x, x, x)[0]),
        TOKENS,
    ),
    "encoder layer": Row(lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), TOKENS),
    "decoder layer": Row(
        lambda: Called(nn.TransformerDecoderLayer(64, 4, 128), lambda m, x: m(x, x)), TOKENS
    ),
    "attention": attention(),
    "attention, causal": attention(is_causal=True),
    "attention, dropout": attention(dropout_p=0.1),
    "attention, mask": attention(masked=True),
    "embedding": embedded(nn.Embedding),
    "embedding, bounded norms": embedded(nn.Embedding, max_norm=1.0),
    "embedding bag, sum": embedded(nn.EmbeddingBag, mode="sum"),
    "embedding bag, mean": embedded(nn.EmbeddingBag, mode="mean"),
    "embedding bag, max": embedded(nn.EmbeddingBag, mode="max"),
    "ctc loss": Row(lambda: Called(nn.Linear(64, 20), ctc), TOKENS, False),
    "conv1d": Row(lambda: nn.Sequential(nn.Conv1d(32, 16, 3), nn.ReLU()), TOKENS),
    "conv2d": Row(lambda: after_conv(nn.Conv2d(16, 32, 3, padding=1, bias=False)), IMAGES),
    "conv2d, depthwise": Row(lambda: after_conv(nn.Conv2d(16, 16, 3, groups=16)), IMAGES),
    "conv2d, dilated": Row(lambda: after_conv(nn.Conv2d(16, 16, 3, dilation=2)), IMAGES),
    "conv2d, float64": Row(lambda: after_conv(nn.Conv2d(16, 32, 3)).double(), IMAGES),
    "conv2d, bfloat16": Row(lambda: after_conv(nn.Conv2d(16, 32, 3)).bfloat16(), IMAGES),
    "conv2d, channels last": Row(
        lambda: after_conv(nn.Conv2d(16, 32, 3)).to(memory_format=torch.channels_last), IMAGES
    ),
    "conv2d, reflected": Row(
        lambda: after_conv(nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect")), IMAGES
    ),
    "conv3d": Row(lambda: nn.Sequential(nn.Conv3d(4, 8, 3), nn.ReLU()), VOLUMES),
    "transposed conv2d": Row(lambda: after_conv(nn.ConvTranspose2d(16, 8, 2, 2)), IMAGES),
    "max pool": Row(lambda: after_conv(nn.MaxPool2d(3, 2, 1, ceil_mode=True)), IMAGES),
    "max pool, 1d": Row(lambda: nn.Sequential(nn.Conv1d(32, 16, 1), nn.MaxPool1d(2)), TOKENS),
    "max pool, 3d": Row(lambda: nn.Sequential(nn.Conv3d(4, 8, 1), nn.MaxPool3d(2)), VOLUMES),
    "max unpool": image_function(
        lambda x: functional.max_unpool2d(*functional.max_pool2d(x, 2, return_indices=True), 2)
    ),
    "fractional max pool": Row(
        lambda: after_conv(nn.FractionalMaxPool2d(3, output_ratio=0.5)), IMAGES
    ),
    "adaptive max pool": Row(lambda: after_conv(nn.AdaptiveMaxPool2d(4)), IMAGES),
    "adaptive average pool": Row(lambda: after_conv(nn.AdaptiveAvgPool2d(4)), IMAGES),
    "average pool": Row(lambda: after_conv(nn.AvgPool2d(2)), IMAGES),
    "power-average pool": Row(lambda: after_conv(nn.LPPool2d(2, 2)), IMAGES),
    "batchnorm": Row(lambda: after_conv(nn.BatchNorm2d(16)), IMAGES),
    "batchnorm, channels last": Row(
        lambda: after_conv(nn.BatchNorm2d(16)).to(memory_format=torch.channels_last), IMAGES
    ),
    "batchnorm, in eval mode": Row(lambda: after_conv(nn.BatchNorm2d(16).eval()), IMAGES),
    "batchnorm, bfloat16": Row(lambda: after_conv(nn.BatchNorm2d(16)).bfloat16(), IMAGES),
    "groupnorm": Row(lambda: after_conv(nn.GroupNorm(4, 16)), IMAGES),
    "layernorm": Row(lambda: after_linear(nn.LayerNorm(64)), TOKENS),
    "layernorm, bfloat16": Row(lambda: after_linear(nn.LayerNorm(64)).bfloat16(), TOKENS),
    "instancenorm": Row(lambda: after_conv(nn.InstanceNorm2d(16, affine=True)), IMAGES),
    "rmsnorm": Row(lambda: after_linear(nn.RMSNorm(64)), TOKENS),
    "local response norm": Row(lambda: after_conv(nn.LocalResponseNorm(5)), IMAGES),
    "dropout": Row(lambda: after_linear(nn.Dropout(0.1)), TOKENS),
    "dropout of channels": Row(lambda: after_conv(nn.Dropout2d(0.1)), IMAGES),
    "alpha dropout": Row(lambda: after_linear(nn.AlphaDropout(0.1)), TOKENS),
    "gelu": Row(lambda: after_linear(nn.GELU()), TOKENS),
    "glu": Row(lambda: after_linear(nn.GLU()), TOKENS),
    "log sigmoid": Row(lambda: after_linear(nn.LogSigmoid()), TOKENS),
    "prelu": Row(lambda: after_conv(nn.PReLU(16)), IMAGES),
    "rrelu": Row(lambda: after_linear(nn.RReLU()), TOKENS),
    "softmax": Row(lambda: after_linear(nn.Softmax(-1)), TOKENS),
    "bilinear": Row(lambda: Called(nn.Bilinear(64, 64, 8), lambda m, x: m(x, x)), TOKENS),
    "upsampling, nearest": Row(lambda: after_conv(nn.Upsample(scale_factor=2)), IMAGES),
    "upsampling, bilinear": Row(
        lambda: after_conv(nn.Upsample(scale_factor=2, mode="bilinear")), IMAGES
    ),
    "upsampling, bicubic": Row(
        lambda: after_conv(nn.Upsample(scale_factor=2, mode="bicubic")), IMAGES
    ),
    "resizing, antialiased": image_function(
        lambda x: functional.interpolate(x, size=10, mode="bilinear", antialias=True)
    ),
    "grid sample": Row(lambda: Called(nn.Linear(16, 6), sampled), IMAGES),
    "unfold and fold": image_function(
        lambda x: functional.fold(functional.unfold(x, 3), (16, 16), 3).tanh()
    ),
    "pixel shuffle": Row(lambda: after_conv(nn.PixelShuffle(2)), IMAGES),
    "padding": Row(lambda: after_conv(nn.ReflectionPad2d(2)), IMAGES),
    "distances": token_function(lambda x: torch.cdist(x, x)),
    "sort": token_function(lambda x: x.sort(-1).values),
    "top k": token_function(lambda x: x.topk(4).values),
    "median": token_function(lambda x: x.median(-1).values),
    "fourier transform": image_function(lambda x: torch.fft.rfft2(x).abs()),
    "singular values": token_function(torch.linalg.svdvals),
    "inverse": token_function(lambda x: torch.linalg.inv(x[..., :32] + 40 * torch.eye(32))),
    "cholesky": token_function(lambda x: torch.linalg.cholesky(x @ x.mT + 80 * torch.eye(32))),
    "matrix exponential": token_function(lambda x: torch.linalg.matrix_exp(x[..., :32])),
    "log-sum-exp": token_function(lambda x: x.logsumexp(-1)),
    "gather": token_function(lambda x: x.gather(-1, indices(x, 64))),
    "scatter": token_function(lambda x: torch.zeros_like(x).scatter_add(-1, indices(x, 64), x)),
    "positive values": token_function(lambda x: x[x > 0], fakes=False),
    "weight norm": Row(lambda: parametrizations.weight_norm(nn.Linear(64, 64)), TOKENS),
    "spectral norm": Row(lambda: parametrizations.spectral_norm(nn.Linear(64, 64)), TOKENS),
}
