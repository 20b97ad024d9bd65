"""Builds the parts of a run from plain configuration sections.

Classes are chosen from tables: a configuration holds names, and a name that is in no table is
refused. Hydra's ``instantiate`` would import whatever path a configuration names, which is more
than a configuration should be able to do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint, ProgressBar
from pytorch_lightning.loggers import CSVLogger, Logger, TensorBoardLogger

from revzoo.data import CIFAR10, CIFAR100, Digits, ImageData, ImageFolder
from revzoo.training import build_callbacks

DATA: dict[str, type[ImageData]] = {
    f"revzoo.data.{kind.__name__}": kind for kind in (Digits, CIFAR10, CIFAR100, ImageFolder)
}
LOGGERS: dict[str, type[Any]] = {"tensorboard": TensorBoardLogger, "csv": CSVLogger}
# what the trainer is given by build_trainer, from other sections than its own
MANAGED_BY_TRAIN = (
    "self",
    "callbacks",
    "logger",
    "precision",
    "default_root_dir",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
)


def model_spec(config: Mapping[str, Any], *, num_classes: int, in_chans: int) -> dict[str, Any]:
    """The arguments of ``create_model`` for data of so many classes and channels."""
    fitted = {"num_classes": num_classes, "in_chans": in_chans}
    return {**config["model"], "memory": config["memory"]["mode"], **fitted}


def build_data(data: Mapping[str, Any]) -> ImageData:
    """The data module of a checked ``data`` section."""
    options = {key: value for key, value in data.items() if key != "_target_"}
    return DATA[data["_target_"]](**options)


def build_logger(logger: Mapping[str, Any], *, run_dir: Path) -> Logger | None:
    """The logger, writing into ``run_dir/<kind>``; None for none."""
    kind = logger["kind"]
    if kind is None:
        return None
    built: Logger = LOGGERS[kind](save_dir=run_dir, name="", version=kind)
    return built


def build_trainer(config: Mapping[str, Any], *, run_dir: Path) -> pl.Trainer:
    """Lightning's Trainer with the callbacks, the logger and the precision of the run.

    Raises:
        ValueError: from Lightning, for values that exclude each other.
    """
    logger = build_logger(config["logger"], run_dir=run_dir)
    specs = dict(config["callbacks"])
    if not sys.stdout.isatty():
        specs["progress_bar"] = None  # redrawn lines make a log file unreadable
    if logger is None:
        specs["learning_rate"] = None  # it has nowhere to write to and would refuse to start
    callbacks = build_callbacks(specs, run_dir=run_dir)
    return pl.Trainer(
        **config["trainer"],
        precision=config["precision"]["trainer"],
        callbacks=callbacks,
        logger=logger if logger is not None else False,
        default_root_dir=run_dir,
        enable_checkpointing=any(isinstance(c, Checkpoint) for c in callbacks),
        enable_progress_bar=any(isinstance(c, ProgressBar) for c in callbacks),
        enable_model_summary=False,
    )


def apply_precision(precision: Mapping[str, Any]) -> None:
    """Switch TensorFloat-32 on or off for this process.

    Torch leaves it on for convolutions by default, so that "float32" would not mean float32.
    """
    torch.set_float32_matmul_precision("high" if precision["tf32"] else "highest")
    torch.backends.cudnn.allow_tf32 = bool(precision["tf32"])
