"""Shared by the commands: options, the model, the shape of its batch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo._checks import Size, check_count, sides_of, size_word
from revzoo._files import check_writable, replacing
from revzoo._libraries import unknown_model
from revzoo.cli.schema import model_names
from revzoo.cli.terminal import ConfigError, one_line, status_of
from revzoo.weights.source import SAVED, SUFFIX, resolve_source
from revzoo.weights.table import SHIPPED, WeightsTable

if TYPE_CHECKING:
    from torch import nn

    from revzoo.models.network import ImageNetwork
    from revzoo.training.checkpoint.restore import Restored


SHORT = {"--batch-size": ["--batch"], "--image-size": ["--size", "--image"], "--output": ["--out"]}


def add_option(parser: argparse.ArgumentParser, name: str, **options: Any) -> None:
    """Declare an option of several commands, with its short names."""
    kind = {"type": int, "metavar": "N"}
    if name == "--image-size":
        kind = {"type": _size, "metavar": "N|H,W"}
    parser.add_argument(name, *SHORT[name], **{**kind, **options})


def _size(text: str) -> Size:
    """``64``, or ``48,80`` for height and width."""
    try:
        sides = [int(side) for side in text.strip("[]").split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text}: expected 64, or 48,80 for height and width"
        ) from None
    return sides if len(sides) > 1 else sides[0]


def add_batch_options(parser: argparse.ArgumentParser, *, batch: int) -> None:
    """Declare ``--batch-size``, ``--image-size``, ``--channels``, ``--classes`` and ``--bits``."""
    add_option(parser, "--batch-size", default=batch, help=f"images per step ({batch})")
    add_option(parser, "--image-size", help="size of the images in pixels (the model's)")
    parser.add_argument("--channels", type=int, help="channels of the images (the model's)")
    parser.add_argument("--classes", type=int, help="classes of the head (the model's)")
    add_bits_option(parser)


def add_bits_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--bits``."""
    text = "make a ResNet, torchvision:NAME or timm:NAME reversible with this many bits"
    parser.add_argument("--bits", type=int, help=text)


def add_saved_bits_option(parser: argparse.ArgumentParser) -> None:
    """Declare ``--bits`` for trained weights; without it, they keep their bits."""
    parser.add_argument(
        "--bits",
        type=_saved_bits,
        metavar="N",
        default=SAVED,
        help="of reversible blocks, 1 to 8, or null for the plain network (default: the weights')",
    )


def trained(source: str | Path, bits: int | str | None = SAVED) -> Restored:
    """The model of a checkpoint, or of weights; a run's plugins must be imported."""
    with status_of("loading torch and Lightning"):
        from revzoo.cli.run.folder import check_imports, run_of
        from revzoo.training.checkpoint.restore import restore
    check_imports(run_of(source))
    return restore(source, bits=bits)


def _saved_bits(text: str) -> int | str | None:
    if text == SAVED:
        return SAVED
    if text == "null":  # as in configurations
        return None
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: expected 1 to 8, or null")
    return int(text)


def bits_of(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of ``create_model`` for ``--bits``."""
    if args.bits is None:
        return {}
    size = getattr(args, "image_size", None)  # None: the model's
    return {"reversible_bits": args.bits, "reversible_size": size}


def check_name(name: str, table: WeightsTable = SHIPPED, *, weights: bool = False) -> None:
    """Refuse an unknown model without torch, whose import takes seconds.

    With ``weights``, a name that is no model means weights.
    """
    is_file = Path(name).is_file() or name.endswith((SUFFIX, ".ckpt", ".py"))
    # plugins have imported torch, and may have registered the name
    if "torch" in sys.modules or is_file or ":" in name or name in (names := model_names()):
        return
    if Path(name).is_dir():
        resolve_source(name)  # which says what a folder may hold
    elif weights or "." in name:
        table.find(name)
    else:
        raise unknown_model(name, names)


def model_for(args: argparse.Namespace, name: str, **keywords: Any) -> ImageNetwork:
    """The model, randomly initialised, on torch's current default device."""
    from revzoo.models import create_model

    # None leaves the model's own numbers
    numbers = {"num_classes": args.classes, "in_chans": args.channels}
    return create_model(name, **numbers, **bits_of(args), **keywords)


@contextmanager
def memory_chart(path: Path) -> Iterator[Any]:
    """Yield matplotlib's axes for time against memory, and save the picture."""
    from matplotlib.figure import Figure  # not pyplot, which would change the backend

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    yield axes
    axes.set(xlabel="peak memory of a step, MiB", ylabel="seconds per step", xlim=(0, None))
    # beside the axes: names beside the points would cover each other
    figure.legend(frameon=False, loc="outside right upper")
    with replacing(path) as file:
        figure.savefig(file, dpi=120)


def check_picture(path: Path | None) -> None:
    """Refuse a path for a picture that could not be drawn, before the work that it shows."""
    if path is None:
        return
    check_writable(path)
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise ValueError(
            f"--plot={path}: expected a name that ends in .png, or in one of .{', .'.join(formats)}"
        )


def check_size(model: ImageNetwork, size: Size | None) -> None:
    """Check that the model takes images of ``--image-size``; None is the size that it is made for.

    This comes before steps that may take minutes.
    """
    if size is None:
        return
    from revzoo.models.network import ImageSizeError

    sides = sides_of("--image-size", size, model.dims)
    option = f"--image-size={size_argument(sides)}"
    try:
        model.check_size(*sides)
    except ImageSizeError as error:
        # its remedy names an option of training
        text = f"{option}: {error.reason}: use --image-size {size_argument(error.sizes)}"
        raise ValueError(text) from None
    except ValueError as error:  # of a user's network
        raise ValueError(f"{option}: {error}") from None
    if sides != model.batch_shape(1)[2:]:
        try_image(model, sides, model.in_chans, remedy=": try --image-size {size}")


def size_argument(sides: Sequence[int]) -> str:
    """Sides as ``--image-size`` takes them: without brackets, which a shell would expand."""
    return size_word(sides).strip("[]")


def shape_for(args: argparse.Namespace, model: ImageNetwork) -> tuple[int, ...]:
    """The shape of a batch."""
    check_count("--batch-size", args.batch_size)
    check_size(model, args.image_size)
    return model.batch_shape(args.batch_size, args.image_size)


def try_image(model: nn.Module, sizes: Sequence[int], channels: int, *, remedy: str = "") -> None:
    """Run a model on one black image, before reading images or measuring a step.

    Some networks of libraries take images of only one size, and do not raise until they run.

    ``remedy`` ends the message; ``{size}`` in it stands for the size that the model was made for.
    """
    import torch

    from revzoo.core.invertible import evaluation_mode, kind_of

    def run(sizes: Sequence[int]) -> None:
        first = next(model.parameters())
        image = torch.zeros(1, channels, *sizes, dtype=first.dtype, device=first.device)
        # in evaluation mode, so BatchNorm's statistics stay
        with torch.no_grad(), evaluation_mode(model):
            model(image)

    refusals = (RuntimeError, AssertionError)  # of layers, and of timm
    try:
        run(sizes)
    except refusals as error:
        # a user's model may have none
        made_for = sides_of("image_size", getattr(model, "image_size", sizes), len(sizes))
        if made_for == tuple(sizes):
            raise
        try:
            run(made_for)
        except refusals:  # something else is wrong: show the original error
            raise error from None
        why = f" ({one_line(error)})" if str(error) else ""
        raise ConfigError(
            f"{kind_of(model)} fails on images of {' x '.join(map(str, sizes))} pixels{why}: it is "
            f"made for {' x '.join(map(str, made_for))}{remedy.format(size=size_word(made_for))}"
        ) from error
