"""The figures of each class, label or target after a validation or a test, as a table."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, TensorBoardLogger
from torchmetrics import MetricCollection

from revzoo._files import replacing_table
from revzoo.training.figure_names import ORDER, higher_is_better
from revzoo.training.loggers import GROUP
from revzoo.training.metrics import PerClass

FILE = "per_class.csv"  # in a run's folder
SHORT = {"balanced_acc": "bal", "sensitivity": "sens", "specificity": "spec"}  # six letters fit
MOST = 30  # rows on the terminal; of more, the worst
COLUMNS = 70  # on the terminal, beside the time of a log line

Table = dict[str, list[float]]
"""The values of each class by the name of the figure."""


def class_table(metrics: MetricCollection, count: int) -> Table:
    """What the last evaluation has computed for each class; empty without one, or for one class."""
    found = {
        name: metric.values.tolist()
        for name, metric in metrics.items(keep_base=True, copy_state=False)
        if isinstance(metric, PerClass) and metric.values is not None
    }
    # of classes, the mean recall is the balanced accuracy; as text, since NaN is not NaN
    if str(found.get("balanced_acc")) == str(found.get("sensitivity")):
        found.pop("balanced_acc", None)
    return {n: found[n] for n in ORDER if n in found and len(found[n]) == count > 1}


def lines_of(table: Table, classes: Sequence[str]) -> list[str]:
    """The table for a terminal: a line for each class, of more than :data:`MOST` the worst."""
    places, (first, values) = [*range(len(classes))], next(iter(table.items()))
    if len(places) > MOST:
        places = sorted(places, key=values.__getitem__, reverse=not higher_is_better(first))[:MOST]
    longest = max(len(classes[i]) for i in places)
    width = min(longest, COLUMNS - 7 * len(table))
    lines = [" " * width + "".join(f" {SHORT.get(name, name):>6}" for name in table)]
    for i in places:
        name = classes[i] if len(classes[i]) <= width else f"{classes[i][: width - 1]}~"
        # six letters: errors may have any unit
        numbers = (f" {f'{column[i]:6.4f}'[:6]:>6}" for column in table.values())
        lines.append(f"{name:{width}}{''.join(numbers)}")
    if rest := len(classes) - len(places):
        lines.append(f"and {rest} with a better {first}")
    return lines


def write(
    table: Table, classes: Sequence[str], path: Path, figures: Mapping[str, float] | None = None
) -> None:
    """Write the whole table as CSV: a row for each class, below those of ``figures`` of all."""
    rows: list[dict[str, Any]] = [{"class": "all", **figures}] if figures else []
    for i, name in enumerate(classes if table else ()):
        rows.append({"class": name, **{figure: values[i] for figure, values in table.items()}})
    with replacing_table(path) as file:
        writer = csv.DictWriter(file, [*dict.fromkeys(["class", *(figures or ()), *table])])
        writer.writeheader()
        writer.writerows(rows)


def log_text(table: Table, classes: Sequence[str], loggers: Sequence[Logger], step: int) -> None:
    """Add the table to TensorBoard's texts."""
    rows = [["class", *table], ["---"] * (len(table) + 1)]
    rows += [
        [name, *(f"{v:.4g}" for v in values)]
        for name, *values in zip(classes, *table.values(), strict=True)
    ]
    text = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            with suppress(OSError):  # a full disk, which the logger reports
                logger.experiment.add_text(f"{GROUP}/per_class", text, step)
