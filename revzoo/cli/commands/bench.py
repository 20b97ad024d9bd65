"""``revzoo bench NAME...``: time and memory of a training step, in several memory modes.

The modes of a model run in turn, round by round; ratios are relative to the first mode. On one CPU
thread (OMP_NUM_THREADS=1) it measures the thread's CPU time.

    revzoo bench revnet38 revnet110 --memory store,balanced --batch-size 128
    revzoo bench revnet --depths 38,110,164 --csv bench.csv --plot bench.png
    revzoo bench torchvision:resnet50 --bits 4 --batch-size 16

With --bits, "store" also runs the reversible network, so all modes train the same function.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from revzoo._checks import check_choice
from revzoo._files import check_writable, replacing_table
from revzoo.cli.commands._models import (
    add_batch_options,
    check_name,
    check_picture,
    memory_chart,
    model_for,
    shape_for,
)
from revzoo.cli.schema import MODES, PLANS
from revzoo.cli.terminal import folded, show_written, status_of

if TYPE_CHECKING:
    from revzoo.models.network import ImageNetwork
    from revzoo.profiling.bench import Measured

MARKERS = "osD^vP*X"  # of models in the picture; more models than markers share them
WIDTH = 17  # of the column of names
HEADER = (
    f"{'model':{WIDTH}} {'memory':10}{'s/step':>8}"
    f"{'ratio (quartiles)':>21}{'images/s':>9}{'peak':>13}\n"
)


LEGEND = "s/step: median over rounds; ratio: median of the ratios to {}, round by round"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="models, or families (revnet)")
    add_batch_options(parser, batch=32)
    text = "separated by commas (store,invert,balanced; exact where invert does not fit)"
    parser.add_argument("--memory", metavar="MODES", help=text)
    parser.add_argument("--depths", metavar="N,...", help="depths of each family, e.g. 38,110,164")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each mode (5)")
    parser.add_argument("--csv", type=Path, help="write the rows")
    parser.add_argument("--plot", type=Path, help="draw time and memory, a PNG")


def run(args: argparse.Namespace) -> None:
    """Measure, and print row by row."""
    names = [name for family in args.names for name in with_depths(family, args.depths)]
    for name in names:
        if name in (*MODES, *PLANS):
            raise ValueError(
                f"{name} is a memory mode, not a model: separate modes by commas, as in "
                "--memory store,invert"
            )
        check_name(name)
    with status_of("loading torch"):
        import torch

        from revzoo.profiling.bench import bench
        from revzoo.profiling.plan import PLANNED
        from revzoo.profiling.units import in_one_unit, peak_note

    check_picture(args.plot)
    check_writable(args.csv)
    chosen = [] if args.memory is None else [mode.strip() for mode in args.memory.split(",")]
    planned = (name for name, m in PLANNED.items() if not (m.bounded or m.fills_device))
    known = [*MODES, *planned]
    for mode in chosen:
        check_choice("--memory", mode, known)
    rows: list[Measured] = []
    for name in names:  # all of them, before the first one is measured
        with torch.device("meta"):
            shape_for(args, model_for(args, name))
    for name in names:
        # the same weights and images at each call of the program
        torch.manual_seed(0)
        model = model_for(args, name)
        shape = shape_for(args, model)
        modes = chosen or default_modes(model)
        with status_of(name):
            # a function: each mode trains a new model
            measured = bench(lambda: model_for(args, name), name, modes, shape, rounds=args.rounds)  # noqa: B023
        if not rows:  # a wrong name or option shows no table
            sys.stdout.write(f"{peak_note()}\n{HEADER}")
            sized = in_one_unit(max(row.peak_bytes for row in measured))
        sys.stdout.writelines(_table(name, measured, sized))
        rows += measured
        # the next model may take minutes
        sys.stdout.flush()
    # on a noisy machine the medians of times need not give the median ratio
    sys.stdout.write(f"{folded(LEGEND.format(rows[0].memory), indent=2)}\n")
    if args.csv:
        with replacing_table(args.csv) as file:
            writer = csv.DictWriter(file, asdict(rows[0]))
            writer.writeheader()
            writer.writerows(map(asdict, rows))
    if args.plot:
        draw(rows, args.plot)
    show_written(args.csv, args.plot)


def _table(name: str, measured: list[Measured], sized: Callable[[float], str]) -> Iterator[str]:
    """The lines of a model's rows, with their ends; ``sized`` formats the peaks."""
    label = name
    if len(name) > WIDTH:  # on a separate line, so the table fits into 80 columns
        yield f"{name}\n"
        label = ""
    for row in measured:
        ratio = f"{row.ratio:.2f} ({row.low:.2f} to {row.high:.2f})"
        yield (
            f"{label:{WIDTH}} {row.memory:10}{row.seconds:>8.3f}{ratio:>21}"
            f"{row.images_per_second:>9.1f}{sized(row.peak_bytes):>13}\n"
        )


def default_modes(model: ImageNetwork) -> list[str]:
    """``store``, the first inverting mode that fits all steps, and ``balanced``."""
    from revzoo.core.modes import set_memory

    for mode in ("invert", "exact"):
        with suppress(ValueError):  # blocks with side bits have no mode invert
            set_memory(model, mode)
            return ["store", mode, "balanced"]
    return ["store", "balanced"]


def with_depths(name: str, depths: str | None) -> list[str]:
    """The models of a family: ``revnet`` or ``revnet38`` with the depths ``38,110``."""
    if depths is None:
        return [name]
    numbers = [depth.strip() for depth in depths.split(",")]
    if not all(map(str.isdigit, numbers)):
        raise ValueError(f"--depths {depths}: expected whole numbers, such as 38,110,164")
    # revnet38 and revnet name the same family
    family = re.sub(r"\d+$", "", name)
    return [f"{family}{number}" for number in numbers]


def draw(rows: list[Measured], path: Path) -> None:
    """Draw time against memory: a coloured line for each mode, a marker for each model."""
    markers = dict(zip(dict.fromkeys(row.name for row in rows), cycle(MARKERS), strict=False))
    with memory_chart(path) as axes:
        for mode in dict.fromkeys(row.memory for row in rows):  # in the order of the rows
            points = [(row.peak_bytes / 2**20, row.seconds) for row in rows if row.memory == mode]
            (line,) = axes.plot(*zip(*points, strict=True), "-", label=mode, lw=1)
            for row, (x, y) in zip((r for r in rows if r.memory == mode), points, strict=True):
                axes.plot(x, y, markers[row.name], color=line.get_color(), ms=8, alpha=0.7)
        for name, marker in markers.items():
            axes.plot([], [], marker, color="#7d858d", ms=8, label=name)
        axes.set(ylim=(0, None))
