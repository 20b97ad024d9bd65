"""``revzoo plan NAME --budget 4GiB``: the fastest memory mode of each step within a budget.

--fit searches for the largest batch, image or depth that fits. It tries several, starting from
--batch-size, --image-size or the model's depth. Above 8, it names the largest batch that is a
multiple of 8, and the largest of all. A run makes its own plan.

    revzoo plan revnet104 --budget 4GiB --batch-size 64 --image-size 224
    revzoo plan revnet110 --budget 1GiB --fit batch
    revzoo train model=revnet110 memory=budget memory.bytes=1GiB
"""

from __future__ import annotations

import argparse
import bisect
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from revzoo._checks import check_choice
from revzoo._files import check_writable, json_bytes, write_atomically
from revzoo.cli.commands._models import (
    add_batch_options,
    check_name,
    check_picture,
    check_size,
    memory_chart,
    model_for,
    shape_for,
    size_argument,
)
from revzoo.cli.terminal import folded, folded_command, show_written, status_of
from revzoo.profiling.units import bytes_from, in_one_unit

if TYPE_CHECKING:
    from revzoo.profiling.chain import Outcome
    from revzoo.profiling.plan import Plan, Planner

Shape = tuple[int, ...]  # (B, C, H, W) of a batch
DEEPEST = 8  # ``--fit depth`` tries at most this many times the network's own depth


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", help="a model, e.g. revnet38")
    parser.add_argument("--budget", required=True, help="bytes of a training step, such as 4GiB")
    add_batch_options(parser, batch=64)
    text = "the mode of inverted steps: invert or exact"
    parser.add_argument("--memory", metavar="MODE", help=text)
    text = "find the largest one that fits"
    parser.add_argument("--fit", choices=("batch", "image", "depth"), help=text)
    parser.add_argument("--save", type=Path, help="write the plan as JSON, for set_memory")
    parser.add_argument("--plot", type=Path, help="draw time against memory, a PNG")


def run(args: argparse.Namespace) -> None:
    """Print the plan, or the largest batch, image or depth that fits."""
    # refuse a wrong name or budget before torch is imported
    check_name(args.name)
    budget = bytes_from(args.budget)
    with status_of("loading torch"):
        import torch

        from revzoo.core.modes import INVERTING
        from revzoo.profiling.plan import Planner

    if args.fit and (args.save or args.plot):
        raise ValueError("--fit makes no plan to save or plot: run the command that it prints")
    if args.memory is not None:
        check_choice("--memory", args.memory, INVERTING)
    check_picture(args.plot)
    check_writable(args.save, makes_folders=True)
    with status_of(args.name):
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
        write_atomically(args.save, json_bytes(plan.modes))
    if args.plot:
        sys.stdout.flush()  # the picture needs more plans
        with status_of(args.plot.name):
            draw(planner, plan, pures, args.plot)
    show_written(args.save, args.plot)


def _usage(args: argparse.Namespace, shape: Shape) -> str:
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
        f"in Python:         plan = revzoo.plan_memory(model, {shape}, {budget})\n"
        f"                   revzoo.set_memory(model, plan)\n{saved}"
        f"in a run:          revzoo train ... memory=budget memory.bytes={args.budget}"
        + (f" \\\n                       memory.inverting={args.memory}" if args.memory else "")
        + "\n                   (plans anew, with the optimiser's state)"
    )


class Fit(NamedTuple):
    """The number that ``--fit`` searches for; it sets how much memory a step needs."""

    start: int
    variant: Callable[[int], tuple[Shape, dict[str, Any]]]  # batch, keywords of ``create_model``
    option: str = ""  # sets the value, if there is one
    power: int = 1  # the need for memory is linear in this power of the value
    most: int = 2**20
    shown: Callable[[int], str] = str  # the value in messages


def fit_of(args: argparse.Namespace, shape: Shape) -> Fit:
    """What ``--fit`` searches for, from this batch on."""
    images, channels, side, *others = shape
    if args.fit == "batch":
        return Fit(images, lambda n: ((n, *shape[1:]), {}), "--batch-size")
    from revzoo.models.registry import MODELS

    architecture = args.name.partition(".")[0]
    if architecture not in MODELS:  # a folder of save_pretrained, say
        raise ValueError(
            f"{args.name}: --fit image and --fit depth build other variants of a model, so they "
            "need its name, such as revnet38; --fit batch takes a folder, too"
        )
    row: Any = MODELS[architecture].variant
    if args.fit == "image":
        if len({side, *others}) > 1:
            raise ValueError(
                f"--image-size={size_argument(shape[2:])}: --fit image looks for the largest "
                "square, so give one number"
            )

        def of_side(value: int) -> tuple[Shape, dict[str, Any]]:
            # the shapes of some weights depend on the size
            keywords = {"img_size": value} if hasattr(row, "img_size") else {}
            return (images, channels, value, *[value for _ in others]), keywords

        return Fit(side, of_side, "--image-size", power=1 + len(others))
    if not (hasattr(row, "depth") or hasattr(row, "units")):
        raise ValueError(f"--fit depth: {args.name} has one depth; expected batch or image")
    units: Sequence[int] | None = None if hasattr(row, "depth") else row.units
    start = row.depth if units is None else max(units)  # of the longest stage

    def of_depth(value: int) -> dict[str, Any]:
        if units is None:
            return {"depth": value}
        # all stages grow in proportion
        return {"units": tuple(max(1, round(u * value / start)) for u in units)}

    return Fit(
        start,
        lambda value: (shape, of_depth(value)),
        # inverted steps keep so little that thousands may fit; planning thousands takes hours
        most=DEEPEST * start,
        shown=lambda value: str(value) if units is None else f"units={of_depth(value)['units']}",
    )


def _least(args: argparse.Namespace, shape: Shape, keywords: Mapping[str, Any]) -> int | None:
    """The smallest budget in bytes; None if the model refuses the shape or the keywords."""
    import torch

    from revzoo.profiling.plan import Planner

    try:
        with torch.device("meta"):
            model = model_for(args, args.name, **keywords)
        # raises for sides that the model does not take
        check_size(model, shape[2:])
    except ValueError:
        return None
    # clock=False: only bytes matter, so do not time steps
    return Planner(model, shape, inverting=args.memory, clock=False).least


def _largest(args: argparse.Namespace, budget: int, shape: Shape) -> str:
    """A sentence with the largest batch, image or depth that fits, and how to see its plan."""
    from revzoo.profiling.plan import largest

    sized = in_one_unit(budget)
    fit = fit_of(args, shape)
    needs: dict[int, int | None] = {}
    option = f" ({fit.option})" if fit.option else ""
    # to standard error, also without a terminal: the search takes minutes
    start = f"looking for the largest {args.fit}, beginning with {fit.shown(fit.start)}{option}"
    sys.stderr.write(f"{folded(start, indent=2)}\n")

    def need(value: int) -> int | None:
        if value not in needs:  # a call takes seconds
            with status_of(f"{args.name}, {args.fit} {fit.shown(value)}"):
                needs[value] = _least(args, *fit.variant(value))
        return needs[value]

    def need_of_eights(value: int) -> int | None:
        # a batch that is a multiple of 8 suits the kernels
        return None if args.fit == "batch" and value > 8 and value % 8 else need(value)

    value = largest(need_of_eights, budget, start=fit.start, power=fit.power, most=fit.most)
    taken = {v: count for v, count in needs.items() if count is not None}
    if value is None:
        tried = "the model takes none of the values tried"
        if taken:
            smallest = min(taken)
            tried = f"the smallest tried, {fit.shown(smallest)}, needs {sized(taken[smallest])}"
        raise ValueError(
            f"no {args.fit} of {args.name} fits --budget={args.budget}: {tried}. Use a larger "
            "budget or a smaller model"
        )
    shown, needed = fit.shown(value), f"{sized(taken[value])} without the optimiser's state"
    sentence = f"the largest {args.fit} of {args.name} in {sized(budget)}: {shown}, needs {needed}"
    if args.fit == "batch" and value >= 8:
        more = bisect.bisect_right(range(value + 1, value + 8), budget, key=lambda n: need(n) or 0)
        sentence += f"; {value + more}, if it need not be a multiple of 8" * bool(more)
    if value == fit.most:
        sentence = f"{shown}, the largest {args.fit} of {args.name} that was tried, needs {needed}"
    sentence = folded(sentence, indent=2)
    if value == fit.most or not fit.option:
        return sentence
    images, _, *sides = fit.variant(value)[0]
    options = {"batch-size": images, "image-size": size_argument(sides)}
    options |= {name: getattr(args, name) for name in ("channels", "classes", "bits", "memory")}
    typed = " ".join(f"--{name} {v}" for name, v in options.items() if v is not None)
    command = f"its plan: revzoo plan {args.name} --budget {args.budget} {typed}"
    return f"{sentence}\n{folded_command(command, indent=4)}"


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
