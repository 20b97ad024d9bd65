from __future__ import annotations

import csv
from pathlib import Path

from revzoo.training.csv_logger import MetricsCSV


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if v} for row in csv.DictReader(file)]


def write(
    path: Path, *metrics: tuple[int, dict[str, float]], first_step: int | None = None
) -> None:
    logger = MetricsCSV(path, first_step=first_step)
    for step, figures in metrics:
        logger.log_metrics(figures, step)
        logger.save()
    logger.finalize("success")


def test_columns_are_added_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    write(path, (0, {"a": 1.0}), (1, {"a": 0.5, "b": 2.0}))
    assert rows(path) == [{"step": "0", "a": "1.0"}, {"step": "1", "a": "0.5", "b": "2.0"}]
    assert [p.name for p in path.parent.iterdir()] == ["metrics.csv"]


def test_a_run_that_goes_on_keeps_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, *((step, {"a": float(step)}) for step in range(4)))
    with path.open("a") as file:
        file.write("4")  # cut off by a kill
    write(path, (2, {"b": 9.0}), first_step=2)
    assert rows(path) == [
        {"step": "0", "a": "0.0"},
        {"step": "1", "a": "1.0"},
        {"step": "2", "b": "9.0"},
    ]


def test_a_run_from_the_start_begins_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    write(path, (0, {"a": 1.0}))
    write(path, (0, {"a": 2.0}))
    assert rows(path) == [{"step": "0", "a": "2.0"}]
