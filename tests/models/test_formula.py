"""The networks against arXiv 1707.04585, written down as plain functions of a state dict.

None of the package's modules is used on the reference side; evaluation mode, images (B, C, H, W).
"""

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revzoo.models import create_model

Weights = Mapping[str, Tensor]


def under(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """The entries below ``prefix``, without it."""
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}


def norm_relu(x: Tensor, w: Weights, name: str) -> Tensor:
    scale = w[f"{name}.weight"] / (w[f"{name}.running_var"] + 1e-3).sqrt()
    centred = x - w[f"{name}.running_mean"][:, None, None]
    return (centred * scale[:, None, None] + w[f"{name}.bias"][:, None, None]).clamp(min=0)


def branch(x: Tensor, w: Weights, stride: int = 1) -> Tensor:
    for i in (1, 2, 3):
        if f"norm{i}.weight" in w:
            x = norm_relu(x, w, f"norm{i}")
        if f"conv{i}.weight" in w:
            kernel = w[f"conv{i}.weight"]
            x = F.conv2d(x, kernel, stride=stride if i == 1 else 1, padding=kernel.shape[2] // 2)
    return x


def shortcut(x: Tensor, like: Tensor, w: Weights, name: str) -> Tensor:
    stride = x.shape[2] // like.shape[2]
    if f"{name}.weight" in w:
        return F.conv2d(x, w[f"{name}.weight"], stride=stride)
    b, c, height, width = x.shape
    x = x.reshape(b, c, height // stride, stride, width // stride, stride).mean((3, 5))
    zeros = torch.zeros(b, (like.shape[1] - c) // 2, *x.shape[2:], dtype=x.dtype)
    return torch.cat([zeros, x, zeros], 1)


def revnet_unit(state: tuple[Tensor, ...], w: Weights, stride: int) -> tuple[Tensor, ...]:
    x1, x2 = state
    if "steps.0.branch.conv1.weight" in w:
        y1 = x1 + branch(x2, under(w, "steps.0.branch."))
        return y1, x2 + branch(y1, under(w, "steps.1.branch."))
    value = branch(x2, under(w, "f."), stride)
    y1 = shortcut(x1, value, w, "shortcut1") + value
    return y1, shortcut(x2, value, w, "shortcut2") + branch(y1, under(w, "g."))


def resnet_unit(state: tuple[Tensor, ...], w: Weights, stride: int) -> tuple[Tensor, ...]:
    (x,) = state
    value = branch(x, under(w, "branch."), stride)
    return (shortcut(x, value, w, "shortcut") + value,)


def logits(images: Tensor, w: Weights, *, streams: int, units: tuple[int, ...]) -> Tensor:
    """Logits of a CIFAR network, strides 1, 2, 2."""
    unit = revnet_unit if streams == 2 else resnet_unit
    stem = under(w, "stem.steps.0.")
    x = norm_relu(F.conv2d(images, stem["conv.weight"], padding=1), stem, "norm")
    state = x.chunk(streams, 1)
    for stage, count in enumerate(units):
        for i in range(count):
            stride = 2 if stage > 0 and i == 0 else 1
            state = unit(state, under(w, f"stages.{stage}.steps.{i}."), stride)
    pooled = norm_relu(torch.cat(state, 1), w, "norm").mean((2, 3))
    return pooled @ w["fc.weight"].T + w["fc.bias"]


def randomise(model: nn.Module) -> None:
    """Change every scale, shift and statistic from its initial 0 or 1, so each term matters."""
    for key, tensor in model.state_dict().items():
        if key.endswith("running_var") or (tensor.dim() == 1 and key.endswith("weight")):
            tensor.uniform_(0.5, 1.5)
        elif key.endswith(("bias", "running_mean")):
            tensor.normal_(0, 0.5)


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        *((name, None) for name in ("revnet38", "revnet164", "resnet32", "resnet164")),
        ("revnet38", "store"),
        ("resnet164", "recompute"),
    ],
)
def test_logits_follow_the_formula(name, memory):
    torch.manual_seed(0)
    units = (2, 3, 1)
    model = create_model(name, units=units, memory=memory).double().eval()
    randomise(model)
    images = torch.randn(2, 3, 12, 8, dtype=torch.float64)
    reference = logits(images, model.state_dict(), streams=model.streams, units=units)
    assert reference.abs().max() > 0.1
    assert torch.allclose(model(images), reference, rtol=1e-10, atol=1e-10)
