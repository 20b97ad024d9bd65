"""What ``audit``, ``plan`` and ``bench`` share: the model, the shape of its batch, options."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from revzoo.models.network import ImageNetwork


def add_batch_options(parser: argparse.ArgumentParser, *, batch: int) -> None:
    """Declare ``--batch``, ``--image`` and ``--classes``."""
    parser.add_argument("--batch", type=int, default=batch, help=f"images a step ({batch})")
    parser.add_argument("--image", type=int, help="side of the images in pixels (the model's own)")
    parser.add_argument("--classes", type=int, help="classes of the head (the model's own)")
    add_bits_option(parser)


def add_bits_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--bits``."""
    parser.add_argument(
        "--bits", type=int, help="of torchvision:NAME or timm:NAME, which it makes reversible"
    )


def bits_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keyword of ``create_model`` that ``--bits`` stands for."""
    return {} if args.bits is None else {"reversible_bits": args.bits}


def model_for(args: argparse.Namespace, name: str, *, memory: str | None = None) -> ImageNetwork:
    """The model, randomly initialised; on torch's meta device inside its context.

    Raises:
        ValueError: no such model, or options that it refuses.
    """
    from revzoo.models import create_model

    return create_model(name, num_classes=args.classes, memory=memory, **bits_of(args))


def shape_for(args: argparse.Namespace, model: ImageNetwork) -> tuple[int, int, int, int]:
    """The shape of a batch.

    Raises:
        ValueError: batch or image size is not possible.
    """
    if args.batch < 1:
        raise ValueError(f"--batch {args.batch}: expected a positive whole number")
    side = args.image or model.image_size
    model.check_size(side, side)
    return args.batch, model.in_chans, side, side
