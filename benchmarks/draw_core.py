"""Draws the inversion of a reversible block, and the live tensors of a training step.

    python benchmarks/draw_core.py docs/pictures

writes ``block.svg`` and ``alive.svg``. Both are diagrams, not measurements; the function ``alive``
has the rules of the second. Needs the ``plot`` extra.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle

GREY = "#7d858d"  # readable on white and on a dark background
BLUE, RED = "#4fb3ff", "#d9485f"
STEPS = 6
MODES = {
    "store": "store: every activation waits for its turn",
    "recompute": "recompute: the input of each step waits, one step is evaluated again at a time",
    "invert": "invert, exact: the last state alone waits; each step gives back its input",
}


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **style: Any) -> None:
    """An arrow between two points."""
    style = {"color": GREY, "arrowstyle": "-|>", "lw": 1.6, "shrinkA": 0, "shrinkB": 0, **style}
    axes.annotate("", end, start, arrowprops=style)


def draw_block(axes: Axes, *, inverse: bool) -> None:
    """Two streams from left to right, or back."""
    top, bottom, f, g = 1.0, 0.0, 1.2, 2.8
    names = {0.0: ("x_1", "x_2"), 4.0: ("y_1", "y_2")}
    for x, pair in names.items():
        for y, name in zip((top, bottom), pair, strict=True):
            place = {"ha": "center", "va": "center", "fontsize": 17}
            axes.text(x, y, f"${name}$", color=BLUE if x == 0 else RED, **place)
    way = -1 if inverse else 1
    for y, middle in ((top, f), (bottom, g)):
        ends = (0.25, middle - 0.17, middle + 0.17, 3.75)
        for left, right in ((ends[0], ends[1]), (ends[2], ends[3])):
            arrow(axes, *[(x, y) for x in (left, right)[::way]])
        axes.add_patch(Circle((middle, y), 0.17, fill=False, ec=GREY, lw=1.6))
        sign = "$-$" if inverse else "$+$"
        axes.text(middle, y, sign, color=GREY, ha="center", va="center_baseline", fontsize=17)
    for name, x, start, end in (("F", f, bottom, top), ("G", g, top, bottom)):
        up = 1 if end > start else -1
        box = FancyBboxPatch((x - 0.22, 0.36), 0.44, 0.28, boxstyle="round,pad=0.04")
        box.set(facecolor="none", edgecolor=GREY, linewidth=1.6)
        axes.add_patch(box)
        axes.text(x, 0.5, f"${name}$", color=GREY, ha="center", va="center", fontsize=15)
        arrow(axes, (x, start), (x, 0.5 - 0.18 * up), arrowstyle="-")
        arrow(axes, (x, 0.5 + 0.18 * up), (x, end - 0.17 * up))
    first, then = r"$y_1 = x_1 + F(x_2)$", r"$y_2 = x_2 + G(y_1)$"
    if inverse:
        first, then = r"$x_2 = y_2 - G(y_1)$", r"$x_1 = y_1 - F(x_2)$"
    axes.text(2, -0.5, f"{first}    then    {then}", color=GREY, ha="center", fontsize=13)
    axes.set_title(
        "backward pass: the same, read from right to left" if inverse else "forward pass"
    )
    axes.set(xlim=(-0.3, 4.3), ylim=(-0.65, 1.3), aspect="equal")
    axes.axis("off")


def alive(mode: str, time: int, step: int) -> tuple[bool, bool]:
    """Whether the activations inside ``step``, and its input, are alive at ``time``.

    Forward passes of the steps are at times 0 to 5, their backward passes at 6 to 11. The output of
    the last step counts as the input of a further one.
    """
    forward, backward = step, 2 * STEPS - 1 - step
    waits = forward - 1 <= time <= backward  # the input is the output of the step before
    if mode == "store":
        return forward <= time <= backward, waits
    inside = time in (forward, backward)
    if mode == "recompute":
        return inside, waits
    return inside, time in (forward - 1, forward, backward, backward + 1)


def draw_alive(axes: Axes, mode: str) -> None:
    """A row for each step, a column for each moment."""
    for step in range(STEPS + 1):  # the last row is the output of the last step
        for time in range(2 * STEPS):
            inside, state = alive(mode, time, step)
            if inside and step < STEPS:
                axes.add_patch(Rectangle((time + 0.08, step + 0.08), 0.84, 0.62, color=RED, lw=0))
            if state:
                axes.add_patch(Rectangle((time + 0.08, step - 0.2), 0.84, 0.2, color=BLUE, lw=0))
    axes.axvline(STEPS, color=GREY, lw=1, ls=":")
    axes.set(xlim=(0, 2 * STEPS), ylim=(-0.4, STEPS + 0.2), yticks=[], xticks=[])
    axes.set_title(MODES[mode], loc="left", fontsize=11)
    axes.set_ylabel("steps", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    """Draw both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    grey = ("text.color", "axes.labelcolor", "axes.titlecolor", "axes.edgecolor")
    plt.rcParams.update({**dict.fromkeys(grey, GREY), "svg.hashsalt": "revzoo", "font.size": 12})

    figure, panels = plt.subplots(1, 2, figsize=(10.5, 2.9), layout="constrained")
    for axes, inverse in zip(panels, (False, True), strict=True):
        draw_block(axes, inverse=inverse)
    save(figure, folder / "block.svg")

    figure, rows = plt.subplots(len(MODES), 1, figsize=(8, 7), layout="constrained", sharex=True)
    for axes, mode in zip(rows, MODES, strict=True):
        draw_alive(axes, mode)
    rows[-1].set_xticks([STEPS / 2, 1.5 * STEPS], ["forward pass", "backward pass"], color=GREY)
    rows[-1].tick_params(length=0, labelsize=12)
    marks = [Rectangle((0, 0), 1, 1, color=colour, lw=0) for colour in (RED, BLUE)]
    labels = ["activations inside a step", "state between two steps"]
    figure.legend(marks, labels, loc="outside lower center", ncols=2, frameon=False)
    save(figure, folder / "alive.svg")


def save(figure: Any, path: Path) -> None:
    """Save without the date, so that the file is reproducible."""
    figure.savefig(path, transparent=True, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
