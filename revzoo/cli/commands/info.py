"""``revzoo info NAME``: what is known of a model and its weights, and what it costs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from revzoo.cli.commands._models import add_bits_option, bits_of
from revzoo.cli.commands.list import add_weights_option, weights_table
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.table import WeightsTable

if TYPE_CHECKING:  # torch is imported when costs are measured, after the known facts are printed
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
    """Print what is known, then what is measured, line by line as it comes.

    Raises:
        ValueError: there is no such model, or the batch or the size is not possible.
    """
    if args.batch < 1:
        raise ValueError(f"--batch {args.batch}: expected a positive whole number")
    table = weights_table(args)
    entry = _entry(table, args.name)
    for key, value in entry.plain().items() if entry else ():
        _tell(key, value)
    _wait("loading torch")
    import torch

    from revzoo.models import create_model

    torch.manual_seed(0)
    model = create_model(entry.name if entry else args.name, table=table, **bits_of(args))
    if entry is None:
        _tell("architecture", args.name)
        _tell("weights", "none")
    size = args.size or (entry.input_size[-1] if entry else model.image_size)
    images = torch.randn(args.batch, model.in_chans, size, size)
    for key, value in _costs(model, images):
        _tell(key, value)


def _entry(table: WeightsTable, name: str) -> WeightsEntry | None:
    try:
        return table.find(name)
    except UnknownWeightsError:
        return None


def _costs(model: ImageNetwork, images: torch.Tensor) -> Iterator[tuple[str, str]]:
    from revzoo.core.modes import COUNTED, set_memory
    from revzoo.profiling.costs import activation_bytes, forward_flops

    yield "parameters", f"{sum(p.numel() for p in model.parameters()):,}"
    shape = "x".join(map(str, images.shape[1:]))
    _wait("counting operations")
    yield f"forward, {shape}", f"{forward_flops(model, images) / 1e6:,.1f} MFLOP an image"
    for mode in COUNTED:
        try:
            set_memory(model, mode)
        except ValueError:
            continue  # nothing to invert
        _wait(f"counting activations of a training step, memory={mode}")
        found = activation_bytes(model, images) / 1024
        yield f"training, {mode}", f"{found:,.0f} KiB of activations an image"


def _tell(key: str, value: object) -> None:
    _wait("")
    text = value if isinstance(value, str) else json.dumps(value)
    sys.stdout.write(f"{key:24}{text}\n")
    sys.stdout.flush()


def _wait(doing: str) -> None:
    """Say on a terminal what takes seconds now, until the next line."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{doing + ' ...' if doing else ''}")
        sys.stderr.flush()
