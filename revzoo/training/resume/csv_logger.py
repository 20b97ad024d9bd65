"""Writes a run's figures to ``metrics.csv``, one row per call of a logger.

Why not Lightning's ``CSVLogger``: when a run resumes, it deletes the figures from before.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger
from pytorch_lightning.utilities import rank_zero_only

from revzoo._files import replacing_table

log = logging.getLogger(__name__)


class MetricsCSV(Logger):
    """Writes ``path``; columns are ``step`` and the names of the figures, in order of appearance.

    Args:
        path: the file.
        first_step: for a resumed run, which logs the rows from this step on again: they are
            removed from the file. None for a new run, which begins with an empty file.
    """

    def __init__(self, path: Path, *, first_step: int | None = None) -> None:
        super().__init__()
        self.path = path
        self._first_step = first_step
        self._columns: list[str] = []  # empty before the file is read
        self._rows: list[dict[str, Any]] = []  # not yet written
        self._last = first_step or 0  # the newest step
        self._failed = False  # whether the last attempt to write failed

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: ``config.yaml`` has the hyperparameters."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._last = self._last if step is None else step
        # tensors become numbers here, so the logger keeps none on a GPU
        self._rows.append({"step": self._last, **{k: float(v) for k, v in metrics.items()}})

    @rank_zero_only
    def save(self) -> None:
        """Append the new rows; after an error of the disk, keep them for the next call."""
        # a resumed run also drops the rows after its checkpoint before it saves the next one
        if not self._rows and (self._columns or self._first_step is None):
            return
        try:
            self._append()
        except OSError as error:
            # one message, not one for each row of a full disk
            if not self._failed:
                log.error("cannot write %s (%s): keeping its rows and retrying", self.path, error)
            self._failed = True
        else:
            self._failed = False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        # a resume that is refused leaves the file as it is
        if self._rows or status == "success":
            self.save()

    def _append(self) -> None:
        if not self._columns:
            self._begin()
        # figures of a validation appear later, so the header changes; a user may remove the file
        columns = list(
            dict.fromkeys([*self._columns, *(name for row in self._rows for name in row)])
        )
        if columns != self._columns or not self.path.exists():
            self._write(columns, self._read())
        # appending costs the same at every step, however long the run
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(self._rows)
        self._rows = []

    def _begin(self) -> None:
        # the killed session may have logged past its last checkpoint
        first = self._first_step or 0
        kept = [row for row in self._read() if int(row["step"]) < first]
        self._write(list(dict.fromkeys(["step", *(name for row in kept for name in row)])), kept)

    def _read(self) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        # a kill may have cut off the last row
        return [r for r in rows if None not in r.values() and r.get("step", "").isdecimal()]

    def _write(self, columns: list[str], rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_table(self.path) as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        self._columns = columns
