"""Tries a model on one black image, before images are read or a step is measured.

A library's network may take images of one size only, and say so only when it runs.
"""

from __future__ import annotations

import torch
from torch import nn

from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.core.invertible import kind_of
from revzoo.core.memory import evaluation_mode

# a layer raises the first, an assert of timm the second
REFUSALS = (RuntimeError, AssertionError)


def try_image(model: nn.Module, side: int, channels: int, *, remedy: str = "") -> None:
    """Run a model on one image of ``side`` x ``side`` pixels.

    Args:
        model: on any device; its BatchNorms keep their statistics.
        side: in pixels.
        channels: of the image.
        remedy: ends the message; ``{size}`` is the side for which the model is made.

    Raises:
        ConfigError: the model fails on this size, but not on the size for which it is made.
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
        except REFUSALS:  # the size is not the reason
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
