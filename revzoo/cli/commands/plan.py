"""``revzoo plan NAME --budget 4GiB``: the fastest memory mode of each step within a budget.

--fit finds the largest batch, image or depth instead, by trying several, beginning with --batch
or --image or the model's depth. A run makes its own plan.

    revzoo plan revnet104 --budget 4GiB --batch 64 --image 224
    revzoo plan revnet110 --budget 1GiB --fit batch
    revzoo train model=revnet110 memory=budget memory.bytes=1GiB
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from revzoo._checks import check_choice
from revzoo._files import check_writable, write_atomically
from revzoo.cli.commands._models import (
    add_batch_options,
    bits_of,
    check_picture,
    check_side,
    memory_chart,
    model_for,
    shape_for,
)
from revzoo.cli.commands._status import show_written, status_of

if TYPE_CHECKING:
    from revzoo.profiling.chain import Outcome
    from revzoo.profiling.plan import Plan, Planner

FITS = ("batch", "image", "depth")
DEEPEST = 8
"""The greatest depth that ``--fit depth`` tries, in multiples of the network's own."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="a model, e.g. revnet38")
    parser.add_argument("--budget", required=True, help="bytes of a training step, such as 4GiB")
    add_batch_options(parser, batch=64)
    parser.add_argument(
        "--memory", metavar="MODE", help="the mode of inverted steps: invert or exact"
    )
    parser.add_argument("--fit", choices=FITS, help="find the largest one that fits")
    parser.add_argument("--save", type=Path, help="write the plan as JSON, for set_memory")
    parser.add_argument("--plot", type=Path, help="draw time against memory, a PNG")


def run(args: argparse.Namespace) -> None:
    """Print the plan, or the largest batch, image or depth that fits.

    Raises:
        ValueError: model, mode, batch or size do not exist; the budget is wrong or too small.
    """
    import torch

    from revzoo.core.modes import INVERTING
    from revzoo.profiling.plan import Planner
    from revzoo.profiling.units import bytes_from, in_one_unit

    if args.fit and (args.save or args.plot):
        raise ValueError("--fit makes no plan to save or plot: run the command that it prints")
    if args.memory is not None:
        check_choice("--memory", args.memory, INVERTING)
    # a wrong budget is refused before the model is built
    budget = bytes_from(args.budget)
    check_picture(args.plot)
    check_writable(args.save, makes_folders=True)
    with torch.device("meta"):
        model = model_for(args, args.name)
    shape = shape_for(args, model)
    if args.fit:
        sys.stdout.write(f"{_largest(args, budget, shape)}\n")
        return
    with status_of(args.name):
        planner = Planner(model, shape, inverting=args.memory)
        if args.memory not in (None, *planner.modes):
            raise ValueError(
                f"--memory {args.memory}: no step of {args.name} has an inverse; leave it out, or "
                "make the network reversible with --bits 4"
            )
        plan = planner.plan(budget)
        pures = planner.pures()
    size = "x".join(map(str, shape))
    sys.stdout.write(
        f"{args.name}, one training step on {size}\n{plan}\n\n"
        "for comparison, every step in one mode\n"
    )
    sized = in_one_unit(max(plan.budget, *(pure.peak for pure in pures.values())))
    for mode, pure in pures.items():
        note = "" if mode in planner.modes else f"  (to plan with it: --memory {mode})"
        sys.stdout.write(f"{mode:12}{sized(pure.peak):>14}{pure.cost / 1e9:>10.3g} s{note}\n")
    sys.stdout.write(f"\n{_usage(args, shape)}\n")
    if args.save:
        write_atomically(args.save, f"{json.dumps(plan.modes, indent=2)}\n".encode())
    if args.plot:
        sys.stdout.flush()  # the picture needs more plans
        with status_of(args.plot.name):
            draw(planner, plan, pures, args.plot)
    show_written(args.save, args.plot)


def _usage(args: argparse.Namespace, shape: Sequence[int]) -> str:
    """How to use the plan."""
    saved = (
        f'or the saved one:  revzoo.set_memory(model, json.load(open("{args.save}")))\n'
        if args.save
        else ""
    )
    budget = f'"{args.budget}"'
    if args.memory:
        budget += f',\n{" " * 45}inverting="{args.memory}"'
    return (
        f"in Python:         plan = revzoo.plan_memory(model, {tuple(shape)}, {budget})\n"
        f"                   revzoo.set_memory(model, plan)\n{saved}"
        f"in a run:          revzoo train ... memory=budget memory.bytes={args.budget}"
        + (f" \\\n                       memory.inverting={args.memory}" if args.memory else "")
        + "\n                   (plans anew, with the optimiser's state)"
    )


def _largest(args: argparse.Namespace, budget: int, shape: Sequence[int]) -> str:
    """A sentence with the largest batch, image or depth that has a plan, and how to see the plan.

    Raises:
        ValueError: none fits.
    """
    from revzoo.profiling.plan import largest
    from revzoo.profiling.units import in_one_unit

    sized = in_one_unit(budget)
    start, least_of = _needs(args, shape)
    needs: dict[int, int | None] = {}
    option = "" if args.fit == "depth" else f" (--{args.fit})"
    # to standard error, also without a terminal: the search takes minutes
    sys.stderr.write(
        f"looking for the largest {args.fit}, beginning with {_shown(args, start)}{option}\n"
    )

    def need(value: int) -> int | None:
        if value not in needs:  # a call takes seconds
            with status_of(f"{args.name}, {args.fit} {_shown(args, value)}"):
                needs[value] = least_of(value)
        return needs[value]

    # inverted steps keep so little that thousands may fit; planning those takes hours
    most = DEEPEST * start if args.fit == "depth" else 2**20
    power = 2 if args.fit == "image" else 1
    value = largest(need, budget, start=start, power=power, most=most)
    taken = {v: count for v, count in needs.items() if count is not None}
    if value is None:
        smallest = min(taken, default=None)
        tried = (
            f"the smallest tried, {_shown(args, smallest)}, needs {sized(taken[smallest])}"
            if smallest is not None
            else "the model takes none of the values tried"
        )
        raise ValueError(
            f"no {args.fit} of {args.name} fits --budget={args.budget}: {tried}. Use a larger "
            "budget or a smaller model"
        )
    shown, needed = _shown(args, value), f"{sized(taken[value])} without the optimiser's state"
    if value == most:
        return f"{shown}, the largest {args.fit} of {args.name} that was tried, needs {needed}"
    found = f"the largest {args.fit} of {args.name} in {sized(budget)}: {shown}, needs {needed}"
    if args.fit == "depth":
        return found
    given = {"batch": shape[0], "image": shape[2], args.fit: value}
    given |= {name: getattr(args, name) for name in ("classes", "bits", "memory")}
    options = " ".join(f"--{name} {v}" for name, v in given.items() if v is not None)
    return f"{found}\nits plan: revzoo plan {args.name} --budget {args.budget} {options}"


def _needs(
    args: argparse.Namespace, shape: Sequence[int]
) -> tuple[int, Callable[[int], int | None]]:
    """The first value of the search, and a function from a value to its smallest budget.

    None if the model refuses the value; the search skips it.
    """
    import torch

    from revzoo.models import create_model
    from revzoo.profiling.plan import Planner

    row, fit = _row(args), args.fit
    if fit == "depth" and not (hasattr(row, "depth") or hasattr(row, "units")):
        raise ValueError(f"--fit depth: {args.name} has one depth; expected batch or image")
    batch, channels, side, _ = shape

    def least(value: int) -> int | None:
        options = _options(args, value)
        images, pixels = value if fit == "batch" else batch, value if fit == "image" else side
        try:
            with torch.device("meta"):
                changed = create_model(
                    args.name, num_classes=args.classes, **bits_of(args), **options
                )
            # raises for sides that the model does not take
            check_side(changed, pixels, "--image")
        except ValueError:
            return None
        batch_shape = (images, channels, pixels, pixels)
        # clock=False: only bytes matter, so no step is timed
        return Planner(changed, batch_shape, inverting=args.memory, clock=False).least

    if fit == "depth":
        return row.depth if hasattr(row, "depth") else max(row.units), least
    return batch if fit == "batch" else side, least


def _row(args: argparse.Namespace) -> Any:
    """The model's row in its table."""
    from revzoo.models.registry import MODELS

    return MODELS[args.name.partition(".")[0]].variant


def _options(args: argparse.Namespace, value: int) -> dict[str, Any]:
    """The keywords with which ``create_model`` builds the model for a value of the search."""
    row = _row(args)
    if args.fit == "image" and hasattr(row, "img_size"):  # its weights depend on the size
        return {"img_size": value}
    if args.fit == "depth" and hasattr(row, "depth"):
        return {"depth": value}
    if args.fit == "depth":
        # all stages grow in proportion; the value is the length of the longest
        return {"units": tuple(max(1, round(u * value / max(row.units))) for u in row.units)}
    return {}


def _shown(args: argparse.Namespace, value: int) -> str:
    """A value of the search as ``create_model`` takes it: ``units=(3, 3, 4)``."""
    units = _options(args, value).get("units")
    return str(value) if units is None else f"units={units}"


def draw(planner: Planner, plan: Plan, pures: Mapping[str, Outcome], path: Path) -> None:
    """Draw time against memory: the frontier of plans, the pure modes and the chosen plan."""
    chosen = {"color": "#d9485f"}
    with memory_chart(path) as axes:
        # neighbouring budgets often have the same plan
        points = sorted({(p.peak_bytes / 2**20, p.seconds) for p in planner.frontier(12)})
        axes.plot(*zip(*points, strict=True), "o-", color="#2fa36b", label="plans")
        for marker, (mode, pure) in zip("xsD^v", pures.items(), strict=False):
            at = pure.peak / 2**20, pure.cost / 1e9  # costs are in ns
            axes.plot(*at, marker, color="#4b5258", ms=8, mew=2, mfc="none", label=mode)
        axes.plot(plan.peak_bytes / 2**20, plan.seconds, "*", **chosen, ms=14, label="chosen")
        axes.axvline(plan.budget / 2**20, **chosen, lw=1, ls=":", label="budget")
