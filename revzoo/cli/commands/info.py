"""``revzoo info NAME``: a model's weights, parameters, FLOPs and memory."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from revzoo._checks import check_count
from revzoo.cli.commands._models import add_bits_option, bits_of, check_side, side_of
from revzoo.cli.commands._status import show_status
from revzoo.cli.commands.list import add_weights_option, weights_table
from revzoo.cli.terminal import folded
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.table import WeightsTable

if TYPE_CHECKING:  # run imports torch, after it has printed the facts of the weights
    import torch

    from revzoo.models.network import ImageNetwork


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="a model (revnet38), or its weights (revnet38.cifar10)")
    parser.add_argument("--batch", type=int, default=8, help="images per step (default 8)")
    parser.add_argument("--size", type=int, help="side of the images in pixels")
    add_weights_option(parser)
    add_bits_option(parser)


def run(args: argparse.Namespace) -> None:
    """Print the facts of the weights, then the costs, each as soon as it is counted.

    Raises:
        ValueError: there is no such model, or the batch or size is impossible.
    """
    check_count("--batch", args.batch)
    table = weights_table(args)
    entry = _entry(table, args.name)
    for key, value in entry.plain().items() if entry else ():
        _print(key, value)
    show_status("loading torch")
    import torch

    from revzoo.models import create_model

    torch.manual_seed(0)
    model = create_model(entry.name if entry else args.name, table=table, **bits_of(args))
    if entry is None:
        _print("architecture", args.name)
        _print("weights", "none")
    default = entry.input_size[-1] if entry else model.image_size
    size = side_of("--size", args.size, default)
    check_side(model, size, "--size")
    images = torch.randn(args.batch, model.in_chans, size, size)
    for key, value in _costs(model, images):
        _print(key, value)


def _entry(table: WeightsTable, name: str) -> WeightsEntry | None:
    try:
        return table.find(name)
    except UnknownWeightsError:
        return None


def _costs(model: ImageNetwork, images: torch.Tensor) -> Iterator[tuple[str, str]]:
    from revzoo.core.modes import DEVICE_MODES
    from revzoo.core.set_memory import set_memory
    from revzoo.profiling.costs import activation_bytes, forward_flops

    yield "parameters", f"{sum(p.numel() for p in model.parameters()):,}"
    shape = "x".join(map(str, images.shape[1:]))
    show_status("counting operations")
    yield f"forward, {shape}", f"{forward_flops(model, images) / 1e6:,.1f} MFLOP per image"
    for mode in DEVICE_MODES:
        try:
            set_memory(model, mode)
        except ValueError:
            continue  # the model has no steps for this mode
        show_status(f"counting activations of a training step, memory={mode}")
        size = activation_bytes(model, images) / 1024
        yield f"training, {mode}", f"{size:,.0f} KiB of activations per image"


def _print(key: str, value: object) -> None:
    # clear the status before the row that it announced appears
    show_status("")
    sys.stdout.write(f"{folded(f'{key:24}{_text(value)}', indent=24)}\n")
    # counting takes seconds, so show the facts first
    sys.stdout.flush()


def _text(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{key} {_text(item)}" for key, item in value.items())
        case tuple() | list():
            return ", ".join(map(_text, value))
        case _:
            return str(value)
