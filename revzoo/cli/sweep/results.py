"""The results of trials: reads them from the run folders, and writes tables."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from revzoo._checks import did_you_mean
from revzoo._files import replacing_table
from revzoo.cli.config.yaml_files import write_yaml
from revzoo.cli.invocation import command_line
from revzoo.cli.run.build import METRICS_FILE
from revzoo.cli.run.folder import SUMMARY_FILE, errors_naming
from revzoo.cli.sweep.spec import SweepSpec


class NoFigureError(ValueError):
    """The figure to compare is missing; further trials would not have it either."""


def figure_of(run_dir: Path, metric: str) -> float:
    """A final figure of a run.

    Raises:
        NoFigureError: the run has no such figure.
        ValueError: it is not finite.
    """
    with errors_naming(run_dir / SUMMARY_FILE):
        figures = dict(json.loads((run_dir / SUMMARY_FILE).read_text())["metrics"])
    if metric not in figures:
        # the test split may not choose; 'acc' finds val/acc before train/acc
        names = sorted(n for n in figures if not n.startswith("test/"))
        same = sorted((n for n in names if n.endswith(f"/{metric}")), key=lambda n: n[:4] != "val/")
        hint = f"; did you mean {same[0]!r}?" if same else did_you_mean(metric, names)
        listed = "" if hint else f", expected one of {', '.join(names)}"
        raise NoFigureError(f"metric={metric}: a run has no such figure{listed}{hint}")
    value = float(figures[metric])
    # optuna would fail such a trial without a reason
    if not math.isfinite(value):
        raise ValueError(f"{metric} is {value}")
    return value


def last_line(log: Path, status: int) -> str:
    """The exit status and the last line of a program's output, for a message."""
    # the last line of a traceback, or our one-line message
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"status {status}: {lines[-1].strip()}" if lines else f"status {status}"


class Curve:
    """A figure of a running trial, read from ``metrics.csv``.

    Attributes:
        pruned: whether the pruner has stopped the trial.
    """

    def __init__(self, run_dir: Path, metric: str, trial: Any) -> None:
        self.path, self.metric, self.trial = run_dir / METRICS_FILE, metric, trial
        # a resumed trial has reported some values; optuna refuses the same step twice
        self.reported = len(trial.study.trials[trial.number].intermediate_values)
        self.pruned = False

    def values(self) -> list[float]:
        """The figure's values so far, without an unfinished last row."""
        if not self.path.exists():
            return []
        # the run may be writing the last row at this moment
        whole = self.path.read_text().rpartition("\n")[0].splitlines()
        return [float(row[self.metric]) for row in csv.DictReader(whole) if row.get(self.metric)]

    def report(self) -> None:
        """Report new values to the study."""
        for value in self.values()[self.reported :]:
            self.trial.report(value, self.reported)
            self.reported += 1

    def should_prune(self) -> bool:
        """Report new values; return whether the pruner stops the trial."""
        self.report()
        # optuna compares the last reported value, so there must be one
        self.pruned = self.reported > 0 and self.trial.should_prune()
        return self.pruned


def write_results(trials: Sequence[Any], spec: SweepSpec, folder: Path) -> None:
    """Write ``trials.csv`` and, if a trial is complete, ``best.yaml``."""
    keys = [parameter.key for parameter in spec.space]
    rows = [["trial", "state", spec.metric, *keys, "seconds", "error"]]
    for trial in trials:
        seconds = f"{trial.duration.total_seconds():.1f}" if trial.duration else ""
        values = [trial.params.get(key, "") for key in keys]
        figure = trial.value if trial.state.name == "COMPLETE" else ""
        error = trial.user_attrs.get("error", "")
        rows.append([trial.number, trial.state.name.lower(), figure, *values, seconds, error])
    with replacing_table(folder / "trials.csv") as file:
        csv.writer(file).writerows(rows)
    if (best := best_of(trials, spec)) is not None:
        description = {
            "trial": best.number,
            "metric": spec.metric,
            "value": best.value,
            "parameters": dict(best.params),
            "command": best_command(best, spec),
        }
        write_yaml(description, folder / "best.yaml")


def best_of(trials: Sequence[Any], spec: SweepSpec) -> Any:
    """The best complete trial; None if there is none."""
    sign = 1 if spec.direction == "maximize" else -1
    done = [trial for trial in trials if trial.state.name == "COMPLETE"]
    return max(done, key=lambda trial: sign * trial.value, default=None)


def best_command(best: Any, spec: SweepSpec) -> str:
    """The command line that trains with a trial's parameters."""
    return command_line("train", *spec.config_arguments, *spec.overrides(best.params))
