"""The table of loggers by name; each run also writes ``metrics.csv``.

Each row takes the run's folder, a short description of the run (for tables that compare runs),
the step at which a resumed run starts to log, and the options of its configuration.
"""

from __future__ import annotations

import functools
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.utilities import rank_zero_only
from torch.utils.tensorboard.summary import hparams

log = logging.getLogger(__name__)

MIB = 2**20
GROUP = "watch"  # TensorBoard's group of pictures and other figures: sorts after train and val
RENAMED = {
    "footprint/peak_bytes": ("memory_MiB", MIB),
    "footprint/activation_bytes": ("activations_MiB", MIB),
    "reconstruction/error": ("reconstruction_error", 1),
    "test/acc": ("test/acc", 1),
    "drift/max": ("drift", 1),
}  # a figure's chart in the group, and its unit
COMPARED = ("val/acc", f"{GROUP}/test/acc")  # figures of a run in TensorBoard's HPARAMS


class TensorBoard(TensorBoardLogger):
    """Event files that read well in TensorBoard.

    TensorBoard orders groups of charts by name and opens the first two. So the figures besides
    training and validation are in a group ``watch``, after ``val``: test accuracy, memory,
    throughput, rates, and the largest drift (``metrics.csv`` has the drift of each step). Other
    test figures get no chart: with two points, TensorBoard's axis ends at 1, which hides the losses
    of two runs.

    TensorBoard names a run by its folder, so the event files are in a folder ``MODEL-DATA``.

    HPARAMS compares runs by :data:`COMPARED`. Lightning's logger writes all options of the
    optimiser there, and a figure ``hp_metric`` of -1.

    Args:
        run_dir: the run's folder.
        run: a short description of the run; ``model`` and ``data`` name the folder.
        first_step: TensorBoard drops older figures from this step on; the run logs them again.
    """

    def __init__(self, run_dir: Path, run: Mapping[str, Any], first_step: int | None) -> None:
        folder = re.sub(r"[^\w.]+", "-", f"{run['model']} {run['data']}".lower())
        super().__init__(save_dir=run_dir, name="", version=folder, purge_step=first_step)
        self.run = dict(run)

    @rank_zero_only
    def save(self) -> None:
        """Write the new events. Lightning's logger also writes ``hparams.yaml``."""
        self.experiment.flush()

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        super().log_metrics(dict(_charts(metrics)), step)

    @rank_zero_only
    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log the description of the run; ignore the module's options that Lightning passes."""
        self.hparams = self.run
        # torch's add_hparams would write these summaries into another run
        writer = self.experiment._get_file_writer()
        figures = dict.fromkeys(COMPARED, 0.0)  # HPARAMS uses only the names
        for summary in hparams(self.run, figures):  # type: ignore[no-untyped-call]
            writer.add_summary(summary)


def _charts(metrics: Mapping[str, float]) -> Iterator[tuple[str, float]]:
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
        # the same id continues the record
        name=name,
        # two sweeps may have folders of the same name
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
