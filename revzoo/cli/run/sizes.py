"""Tries a model on one black image, before reading images or measuring a step.

Some networks of libraries take images of only one size, and do not raise until they run.
"""

from __future__ import annotations

import torch
from torch import nn

from revzoo.cli.terminal import ConfigError, one_line
from revzoo.core.evaluation import evaluation_mode
from revzoo.core.invertible import kind_of

# layers raise the first, timm's asserts the second
REFUSALS = (RuntimeError, AssertionError)


def try_image(model: nn.Module, side: int, channels: int, *, remedy: str = "") -> None:
    """Run a model on one image of ``side`` x ``side`` pixels.

    Args:
        model: on any device; its BatchNorms keep their statistics.
        side: in pixels.
        channels: of the image.
        remedy: the end of the message; ``{size}`` stands for the side that the model was made for.

    Raises:
        ConfigError: the model fails on this size, but not on the size that it was made for.
        ValueError: from the model, if it checks the size.
    """
    try:
        _run(model, side, channels)
    except REFUSALS as error:
        made_for = getattr(model, "image_size", side)  # a user's model may have none
        if made_for == side:
            raise
        try:
            _run(model, made_for, channels)
        except REFUSALS:  # something else is wrong: show the original error
            raise error from None
        why = f" ({one_line(error)})" if str(error) else ""
        raise ConfigError(
            f"{kind_of(model)} fails on images of {side} x {side} pixels{why}: it is made for "
            f"{made_for} x {made_for}{remedy.format(size=made_for)}"
        ) from error


def _run(model: nn.Module, side: int, channels: int) -> None:
    first = next(model.parameters())
    image = torch.zeros(1, channels, side, side, dtype=first.dtype, device=first.device)
    # in evaluation mode, so BatchNorm's statistics stay
    with torch.no_grad(), evaluation_mode(model):
        model(image)
