"""Figures of matplotlib, and the picture of the memory of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from revzoo.profiling.units import in_one_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from revzoo.profiling.audit import Report

_STAGES = 10  # colours in the picture


def new_figure(**options: Any) -> Figure:
    """An empty figure of matplotlib. Not by pyplot, which would change the caller's backend."""
    # imported here: most programs draw nothing
    from matplotlib.figure import Figure

    return Figure(**options)


def step_figure(report: Report) -> Figure:
    """See :meth:`revzoo.profiling.audit.Report.figure`."""
    figure = new_figure(layout="constrained")
    series = [audit.series() for audit in report.listed]
    sized = in_one_unit(max(audit.activation_bytes for audit in report.listed))
    peaks: dict[str, int] = {}
    for levels, _ in series:
        for name, row in levels.items():
            peaks[name] = max(*row, peaks.get(name, 0))
    # each of the largest parts gets its own colour, the others share one
    large = sorted(peaks, key=peaks.__getitem__, reverse=True)
    large = large if len(large) <= _STAGES else large[: _STAGES - 1]
    shown = [name for name in peaks if name in large]
    width = max(4.8, 3.6 * len(series))  # inches
    figure.set_size_inches(width, 3.6)
    panels = figure.subplots(1, len(series), sharey=True, squeeze=False)
    for axes, audit, (levels, turn) in zip(panels[0], report.listed, series, strict=True):
        length = max(map(len, levels.values()), default=0)
        # every panel has the same names in the same order, so one legend serves all
        stacked = {name: levels.get(name, [0] * length) for name in shown}
        others = [levels[name] for name in levels if name not in shown]
        if others:
            stacked["others"] = [sum(values) for values in zip(*others, strict=True)]
        rows = [[b / 2**20 for b in row] for row in stacked.values()]
        axes.stackplot(range(length), rows, labels=stacked, step="post")
        axes.axvline(turn, color="#7d858d", lw=1, ls=":")
        peak = sized(audit.activation_bytes)
        axes.set(
            title=f"{audit.mode}: activations peak at {peak}",
            xlabel="operator (dotted: backward)",
        )
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("activations, MiB")
    shape = "x".join(map(str, report.input_shape))
    figure.suptitle(f"{report.model}, a training step on {shape}", fontsize="medium")
    handles, labels = panels[0][0].get_legend_handles_labels()
    # an estimate: inches of a letter, and of the colour with its margins
    columns = int(width / (0.09 * max(map(len, labels)) + 0.7))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    return figure
