"""What a training step of common networks takes, as bars: plain, torch's checkpoint, converted.

    python benchmarks/draw_common.py docs/pictures/common.png

The figures are those of ``benchmarks/results/common.md``, from ``bench_convert.py counted``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib import pyplot as plt

REPORT = Path(__file__).parent / "results" / "common.md"
GREY = "#7d858d"
COLOURS = {"plain": GREY, "torch's checkpoint of each block": "#c9a227", "converted": "#2fa36b"}
COLUMNS = (2, 3, 5)  # of the report's table
LARGE = (", 384", ", 4096 tokens")  # left out: the shares are those of the smaller size


def rows() -> list[tuple[str, list[list[float]]]]:
    """Networks with a run, and by kind MiB kept and at the peak; the greatest gain first."""
    found = []
    for line in REPORT.read_text().splitlines():
        cells = line.strip("| ").split(" | ")
        if len(cells) == 6 and cells[5][0].isdigit() and not cells[0].endswith(LARGE):
            found.append((cells[0], [[*map(float, cells[i].split(", "))] for i in COLUMNS]))
    return sorted(found, key=lambda row: row[1][2][1] / row[1][1][1])


def main() -> None:
    """Draw one panel for what is kept, and one for the peak."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    names, sizes = zip(*rows(), strict=True)
    figure, panels = plt.subplots(
        1, 2, figsize=(8, 0.45 * len(names) + 0.9), sharey=True, layout="constrained"
    )
    titles = ("kept between forward and backward pass", "peak of the step")
    for figure_of, (axes, title) in enumerate(zip(panels, titles, strict=True)):
        for i, (label, colour) in enumerate(COLOURS.items()):
            mib = [of_kinds[i][figure_of] for of_kinds in sizes]
            shares = [100 * of_kinds[i][figure_of] / of_kinds[0][figure_of] for of_kinds in sizes]
            places = [place + 0.28 * (i - 1) for place in range(len(names))]
            bars = axes.barh(places, shares, height=0.26, color=colour, label=label)
            axes.bar_label(bars, [f"{size:g}" for size in mib], padding=2, fontsize=7, color=GREY)
        axes.set(xlim=(0, 115), xlabel="% of plain; beside the bars MiB a sample")
        axes.set_title(title, color=GREY, fontsize="medium")
        axes.tick_params(colors=GREY)
        axes.xaxis.label.set_color(GREY)
        for side in axes.spines.values():
            side.set_color(GREY)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    panels[0].margins(y=0.01)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=3, frameon=False, labelcolor=GREY
    )
    figure.savefig(args.picture, dpi=160, transparent=True)


if __name__ == "__main__":
    main()
