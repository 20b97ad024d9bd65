"""The table of loggers by name; each run also writes ``metrics.csv``.

Each row takes the run's folder, a short description of the run (for tables that compare runs),
the step at which a resumed run starts to log, and the options of its configuration.
"""

from __future__ import annotations

import csv
import functools
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from revzoo._files import replacing_table
from revzoo.training.tasks.registry import task_class

log = logging.getLogger(__name__)

MIB = 2**20
GROUP = "watch"  # TensorBoard's group of pictures and other figures: sorts after train and val
RENAMED = {
    "footprint/peak_bytes": ("memory_MiB", MIB),
    "footprint/activation_bytes": ("activations_MiB", MIB),
    "reconstruction/error": ("reconstruction_error", 1),
    "drift/max": ("drift", 1),
}  # a figure's chart in the group, and its unit


class MetricsCSV(Logger):
    """Writes ``path``; columns are ``step`` and the names of the figures, in order of appearance.

    Why not Lightning's ``CSVLogger``: when a run resumes, it deletes the figures from before.

    From ``first_step`` on, a resumed run logs the rows again: they are removed from the file. None
    is for a new run, which begins with an empty file.
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
        columns = [*dict.fromkeys(chain(self._columns, *self._rows))]
        if columns != self._columns or not self.path.exists():
            self._write(columns, self._read())
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerows(self._rows)
        self._rows = []

    def _begin(self) -> None:
        # the killed session may have logged past its last checkpoint
        first = self._first_step or 0
        kept = [row for row in self._read() if int(row["step"]) < first]
        self._write([*dict.fromkeys(chain(["step"], *kept))], kept)

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


class TensorBoard(TensorBoardLogger):
    """Event files that read well in TensorBoard.

    TensorBoard orders groups of charts by name and opens the first two. So the figures besides
    training and validation are in a group ``watch``, after ``val``: test figures, memory,
    throughput, rates, and the largest drift (``metrics.csv`` has the drift of each step). Of
    the test, only the figures in HPARAMS get a chart.

    TensorBoard names a run by its folder, so the event files are in a folder ``MODEL-DATA``.
    HPARAMS compares runs by the figure of their task, such as ``val/dice``, and by the monitored
    one; Lightning's logger writes all options of the optimiser there.

    From ``first_step`` on TensorBoard drops older figures; a resumed run logs them again.
    """

    def __init__(self, run_dir: Path, run: Mapping[str, Any], first_step: int | None) -> None:
        folder = re.sub(r"[^\w.]+", "-", f"{run['model']} {run['data']}".lower())
        super().__init__(save_dir=run_dir, name="", version=folder, purge_step=first_step)
        self.run = dict(run)
        usual = task_class(run.get("task")).monitor
        self.compared = [*dict.fromkeys([usual, run.get("monitor", usual)])]
        validated = [name for name in self.compared if name.startswith("val/")]
        self.tested = [name.replace("val", "test", 1) for name in validated]

    @rank_zero_only
    def save(self) -> None:
        """Write the new events. Lightning's logger also writes ``hparams.yaml``."""
        self.experiment.flush()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(dict(_charts(metrics, self.tested)), step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log the description of the run; ignore the module's options that Lightning passes."""
        self.hparams = self.run
        # torch's add_hparams would write these summaries into another run
        writer = self.experiment._get_file_writer()
        names = [*self.compared, *(f"{GROUP}/{name}" for name in self.tested)]
        figures = dict.fromkeys(names, 0.0)  # HPARAMS uses only the names
        for summary in hparams(self.run, figures):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)


def _charts(metrics: Mapping[str, float], tested: Sequence[str]) -> Iterator[tuple[str, float]]:
    """Yield the figures that get a chart, with their names in TensorBoard."""
    # LearningRateMonitor logs one figure per group: lr/weights, lr/norms_biases
    rates = {float(value) for name, value in metrics.items() if name.startswith("lr")}
    for name, value in metrics.items():
        group, _, rest = name.partition("/")
        if group == "lr" or group.startswith("lr-"):
            if len(rates) > 1:
                yield f"{GROUP}/lr_{rest.replace('/', '_')}", value
            elif rates:  # all parameter groups have the same rate
                yield f"{GROUP}/lr", rates.pop()
        elif name in RENAMED:
            chart, unit = RENAMED[name]
            yield f"{GROUP}/{chart}", value / unit
        elif group == "footprint":
            yield f"{GROUP}/{rest}", value
        elif group in ("train", "val"):
            yield name, value
        elif name in tested:
            yield f"{GROUP}/{name}", value
        elif name != "epoch" and group not in ("drift", "test"):
            # these get no chart; metrics.csv has them
            yield f"{GROUP}/{name.replace('/', '_')}", value


def unfailing(logger: Logger) -> Logger:
    """Let ``logger`` log its first error and drop figures, instead of ending the run."""
    failed: list[str] = []

    def caught(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except Exception as error:  # a full disk; a service's client may raise anything
                kind = type(logger).__name__
                if not failed:
                    log.error("%s fails, figures are lost (%s): training continues", kind, error)
                failed.append(str(error))

        return call

    for name in ("log_metrics", "log_hyperparams", "log_image", "save", "finalize"):
        if (method := getattr(logger, name, None)) is not None:
            setattr(logger, name, caught(method))
    return logger


def name_of(run_dir: Path) -> str:
    """A run's name from its last two folders: ``revnet38-digits-2026-11-22_08-01-26``."""
    return f"{run_dir.absolute().parent.name}-{run_dir.name}"


def wandb(
    run_dir: Path,
    run: Mapping[str, Any],
    first_step: int | None,
    *,
    project: str = "revzoo",
    offline: bool = False,
) -> Logger:
    """Weights & Biases; a run resumed in the same folder continues its record."""
    name = name_of(run_dir)
    logger = WandbLogger(
        name=name,
        # the same id continues the record; two sweeps may have folders of the same name
        id=f"{name}-{zlib.crc32(str(run_dir.absolute()).encode()):08x}",
        save_dir=run_dir,
        project=project,
        offline=offline,
        resume="allow",
    )
    logger.log_hyperparams(dict(run))
    return unfailing(logger)


def mlflow(
    run_dir: Path,
    run: Mapping[str, Any],
    first_step: int | None,
    *,
    experiment: str = "revzoo",
    tracking_uri: str | None = None,
) -> Logger:
    """MLflow; a resumed run begins a second record of the same name.

    The default ``tracking_uri`` is the environment's ``MLFLOW_TRACKING_URI``.
    """
    # an argument of None would replace the environment's variable
    uri: dict[str, Any] = {} if tracking_uri is None else {"tracking_uri": tracking_uri}
    logger = MLFlowLogger(experiment_name=experiment, run_name=name_of(run_dir), **uri)
    logger.log_hyperparams(dict(run))
    return unfailing(logger)


def tensorboard(run_dir: Path, run: Mapping[str, Any], first_step: int | None) -> Logger:
    """TensorBoard; a resumed run continues its curves."""
    return unfailing(TensorBoard(run_dir, run, first_step))


LOGGERS: dict[str, Callable[..., Logger]] = {
    "tensorboard": tensorboard,
    "wandb": wandb,
    "mlflow": mlflow,
}
EXTRAS = ("wandb", "mlflow")  # loggers that need the package of their name
