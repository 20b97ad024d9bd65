"""``revzoo audit NAME``: the memory that a training step keeps, and its peak, in each mode.

Counts without running or allocating the model; --real runs the steps.

    revzoo audit revnet38 --batch-size 64
    revzoo audit revnet104 --batch-size 256 --memory invert --plot step.png
    revzoo audit revvit_base --optim adamw
"""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._files import check_writable
from revzoo.cli.commands._models import (
    add_batch_options,
    check_name,
    check_picture,
    model_for,
    shape_for,
)
from revzoo.cli.terminal import show_written, status_of

if TYPE_CHECKING:
    from torch import nn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="a model, e.g. revnet38")
    add_batch_options(parser, batch=64)
    text = "only this mode (default: all modes that save memory here)"
    parser.add_argument("--memory", metavar="MODE", help=text)
    text = "add an optimiser's state to the peak: sgd, adamw, ... (default: none)"
    parser.add_argument("--optim", metavar="NAME", help=text)
    parser.add_argument("--real", action="store_true", help="run real steps")
    parser.add_argument("--csv", type=Path, help="write every kept tensor")
    parser.add_argument("--plot", type=Path, help="draw memory over the step, a PNG")
    parser.add_argument("--tensorboard", type=Path, metavar="DIR", help="log the picture")


def run(args: argparse.Namespace) -> None:
    """Print the report and write the requested files."""
    check_name(args.name)
    with status_of("loading torch"):
        import torch

        from revzoo.profiling.audit import audit

    # first check everything that would fail after the count
    check_picture(args.plot)
    check_writable(args.csv)
    # a model on meta takes no memory, however large it is
    with nullcontext() if args.real else torch.device("meta"):
        model = model_for(args, args.name, memory=args.memory)
    # an empty list of modes: only the model's own
    shape = shape_for(args, model)
    modes: list[str] | None = [] if args.memory else None
    with status_of(args.name):
        extra = 0 if args.optim is None else _state_bytes(model, args.optim)
        report = audit(model, shape, modes=modes, real=args.real, extra=extra)
    sys.stdout.write(f"{report}\n")
    if args.csv:
        report.to_csv(args.csv)
    if args.plot:
        report.plot(args.plot)
    if args.tensorboard:
        report.to_tensorboard(args.tensorboard)
    show_written(args.csv, args.plot, args.tensorboard)


def _state_bytes(model: nn.Module, name: str) -> int:
    """Bytes of an optimiser's state, with the options of a run that sets none."""
    from revzoo.training.memory import optimizer_bytes
    from revzoo.training.optim.optimizers import OptimSpec

    return optimizer_bytes(model, OptimSpec(name=name, sgd_lr=0.1 if name == "muon" else None))
