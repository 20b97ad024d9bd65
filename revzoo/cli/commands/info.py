"""``revzoo info NAME``: a model's weights, parameters, FLOPs and memory.

    revzoo info revnet38                    the model, and its default weights
    revzoo info DIR/revnet38.x.safetensors  your weights, or their folder
    revzoo info RUN_DIR                     a run, by its best checkpoint

It counts the memory of a training step in each mode that the model has.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._checks import Size, check_count, short_size
from revzoo.cli.commands._models import (
    add_bits_option,
    add_option,
    bits_of,
    check_name,
    check_size,
    trained,
)
from revzoo.cli.commands.list import add_weights_option, weights_table
from revzoo.cli.schema import model_names
from revzoo.cli.terminal import columns, folded, status_of
from revzoo.weights.entry import WeightsEntry
from revzoo.weights.errors import UnknownWeightsError
from revzoo.weights.source import SAVED, checkpoint_of, find_entry, resolve_source

if TYPE_CHECKING:  # run imports torch, after it has printed the facts of the weights
    from revzoo.models.network import ImageNetwork


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="a model (revnet38), weights, a checkpoint or a run's folder")
    add_option(parser, "--batch-size", default=8, help="images per step (default 8)")
    add_option(parser, "--image-size", help="size of the images in pixels")
    add_weights_option(parser)
    add_bits_option(parser)


def run(args: argparse.Namespace) -> None:
    """Print the facts of the weights, then the costs, each as soon as it is counted."""
    check_count("--batch-size", args.batch_size)
    checkpoint = None if args.name in model_names() else checkpoint_of(Path(args.name))
    model, trained_size = _restored(checkpoint, args) if checkpoint else _created(args)
    size = trained_size if args.image_size is None else args.image_size
    check_size(model, size)
    for key, value in _costs(model, model.batch_shape(args.batch_size, size)):
        _print(key, value)


def _created(args: argparse.Namespace) -> tuple[ImageNetwork, Size | None]:
    """Print the entry of a model's weights; return the model and the size of its images."""
    table, name = weights_table(args), args.name
    entry: WeightsEntry | None
    try:
        entry = table.find(name)
        name = entry.name  # of the default weights
    except UnknownWeightsError:
        # of a file, a folder or the hub; a folder must not hide the architecture of its name
        entry = None if name in model_names() else find_entry(name)
        if entry is None:
            check_name(name, table)
    for key, value in entry.plain().items() if entry else ():
        if key != "parameters":  # in millions; their exact number follows
            _print(key, value)
    with status_of("loading torch"):
        from revzoo.models import create_model

        model = create_model(name, table=table, **bits_of(args))
    if entry is None:
        _print("architecture", name)
        _print("weights", "none")
    return model, short_size(entry.input_size[1:]) if entry else None


def _restored(checkpoint: Path, args: argparse.Namespace) -> tuple[ImageNetwork, Size | None]:
    """Print the facts of a checkpoint; return its model and the size of its images."""
    _print("checkpoint", resolve_source(checkpoint))
    restored = trained(checkpoint, SAVED if args.bits is None else args.bits)
    spec = restored.network.spec
    assert spec is not None, "create_model sets it"
    facts = {"architecture": spec.architecture, "options": spec.options, **restored.facts}
    for key, value in facts.items():
        if value not in (None, {}):  # as in an entry
            _print(key, value)
    return restored.network, short_size(facts["input_size"][1:])


def _costs(model: ImageNetwork, batch: tuple[int, ...]) -> Iterator[tuple[str, str]]:
    from revzoo.core.modes import DEVICE_MODES, set_memory
    from revzoo.core.twins import fake_twin, images_for
    from revzoo.profiling.audit import audit
    from revzoo.profiling.count import forward_flops

    yield "parameters", f"{sum(p.numel() for p in model.parameters()):,}"
    shape = "x".join(map(str, batch[1:]))
    # without data: a step of a network for volumes takes minutes, and tens of gigabytes
    with status_of("counting operations"):
        twin = fake_twin(model)
        flops = forward_flops(twin, images_for(twin, batch)) / 1e6
    yield f"forward, {shape}", f"{flops:,.1f} MFLOP per image"
    for mode in DEVICE_MODES:
        try:
            set_memory(model, mode)
        except ValueError:
            continue  # the model has no steps for this mode
        with status_of(f"counting activations of a training step, memory={mode}"):
            peak = audit(model, batch, modes=[]).activation_bytes
        size = peak // batch[0] / 1024
        yield f"training, {mode}", f"{size:,.0f} KiB of activations per image at the peak"


def _print(key: str, value: object) -> None:
    text = _text(value)
    # a hash is one word, longer than a column
    width = len(key) + 2 if " " not in text and 0 < columns() < 24 + len(text) else 24
    sys.stdout.write(f"{folded(f'{key:{width}}{text}', indent=24)}\n")
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
