"""Refuses what cannot be run, before any data is touched.

Each section of the configuration is checked by building the value object it describes, or by the
rules below, so that a message comes from the one place that knows. Nothing is written, no model
is initialised: the model is built on torch's ``meta`` device, where weights have shapes only.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator

from revzoo._checks import (
    check_count,
    check_names,
    check_number,
    did_you_mean,
    keyword_names,
)
from revzoo.cli.config.build import (
    CSV_ALONE,
    MANAGED_BY_TRAIN,
    PROFILERS,
    build_data,
    model_spec,
)
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.run.tune import SECTION, check_tuner
from revzoo.data import ImageData
from revzoo.data.registry import DATA
from revzoo.models.pretrained import find_source
from revzoo.models.registry import MODELS
from revzoo.training.callbacks.finetune import Finetuning
from revzoo.training.callbacks.registry import CALLBACKS, build_callbacks, check_callbacks
from revzoo.training.checkpoint.hyperparameters import WEIGHTS
from revzoo.training.classifier import model_from
from revzoo.training.loggers import LOGGERS
from revzoo.training.optim.optimizers import OptimSpec

SECTIONS = ("model", "data", "memory", "precision", "optim", "trainer", "callbacks", "logger")
VALUES = ("seed", "test")
OPTIONAL = ("threads",)  # runs of earlier versions have none
MONITORED = {
    f"{split}/{name}": "min" if name == "loss" else "max"
    for split, names in {"val": ("loss", "acc", "acc5"), "train": ("loss", "acc")}.items()
    for name in names
}  # what a run logs each epoch, and where its best is
FITTED = {
    "memory": "that of memory=MODE",
    "num_classes": "the number of classes of the data",
    "in_chans": "that of the data; data.in_chans=N for a folder of images",
}  # what build.model_spec fills in
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


def check_config(config: Mapping[str, Any]) -> None:
    """Check a composed configuration, given as plain containers.

    Raises:
        ValueError: with what was got, what is expected and what to do.
    """
    needed = (*SECTIONS, *VALUES)
    check_names(config, (*needed, *OPTIONAL, SECTION), where="config")
    for key in needed:
        if key not in config:
            raise ConfigError(f"{key} is missing from the configuration")
    if not isinstance(config["seed"], int) or not 0 <= config["seed"] < 2**32:
        raise ConfigError(f"seed={config['seed']}: expected a whole number from 0 to 2**32 - 1")
    if config.get("threads") is not None:
        check_count("threads", config["threads"])
    check_trainer(config["trainer"])
    check_precision(config["precision"], device_kind(config["trainer"]["accelerator"]))
    OptimSpec.of(config["optim"])
    check_callbacks(config["callbacks"])
    check_monitors(config["callbacks"])
    build_callbacks(config["callbacks"], run_dir=Path())  # each checks its values
    check_logger(config["logger"])
    check_data(config["data"])
    check_model(config)
    if config.get(SECTION) is not None:
        check_tuner(config)


def check_model(config: Mapping[str, Any]) -> None:
    """Let the zoo check the model's name and keywords, and the memory mode with them."""
    check_names(config["memory"], ("mode",), where="memory")
    if not isinstance(config["model"].get("name"), str):
        raise ConfigError(f"model.name={config['model'].get('name')}: expected the name of a model")
    for key, source in FITTED.items():
        if key in config["model"]:
            raise ConfigError(f"model.{key} is not set here: it is {source}")
    spec = model_spec(config, num_classes=10, in_chans=3)
    start = {key: spec.pop(key) for key in WEIGHTS if key in spec}
    with torch.device("meta"):
        model = model_from(spec)
    starts = bool(start.get("pretrained") or start.get("checkpoint_path"))
    check_finetuning(config["callbacks"].get("finetuning"), model, starts=starts)
    if start.get("pretrained") and not start.get("checkpoint_path"):
        # known, at least; the package's weights are fetched when the run begins
        find_source(spec["name"], known=MODELS, pretrained=True)


def check_finetuning(
    options: Mapping[str, Any] | None, model: torch.nn.Module, *, starts: bool
) -> None:
    """Refuse parts that the model lacks, and to freeze a model that has learnt nothing yet."""
    if options is None:
        return
    Finetuning(**options).first_trained(model, epoch=0)
    if not starts:
        raise ConfigError(
            "callbacks.finetuning would freeze random weights: give model.pretrained=true or "
            "+model.checkpoint_path=FILE, or callbacks.finetuning=null"
        )


def check_monitors(callbacks: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Refuse to follow a figure that no run has, or in the wrong direction."""
    for name, builder in CALLBACKS.items():
        parameters = signature(builder).parameters
        if callbacks.get(name) is None or "monitor" not in parameters:
            continue
        options = {key: p.default for key, p in parameters.items()} | dict(callbacks[name] or {})
        figure, mode = options["monitor"], options["mode"]
        if figure not in MONITORED:
            raise ConfigError(
                f"callbacks.{name}.monitor={figure}: expected one of {', '.join(MONITORED)}"
                + did_you_mean(str(figure).replace("_", "/"), MONITORED)
            )
        if mode != (better := MONITORED[figure]):
            raise ConfigError(
                f"callbacks.{name}.mode={mode}: the best {figure} is the {better}imum, so give "
                f"callbacks.{name}.mode={better}"
            )


def check_data(data: Mapping[str, Any]) -> None:
    """Check the set, the names of its options and, by its constructor, their values."""
    target = data.get("_target_")
    if target not in DATA:
        raise ConfigError(
            f"data._target_={target}: expected one of {', '.join(DATA)}"
            + did_you_mean(str(target), DATA)
        )
    own, shared = signature(DATA[target]).parameters, signature(ImageData).parameters
    names = [p.name for p in {**own, **shared}.values() if p.kind is not p.VAR_KEYWORD]
    check_names([key for key in data if key != "_target_"], names, where="data")
    for key, value in data.items():
        if value == "???":
            raise ConfigError(f"data.{key} is needed: give data.{key}=...")
    build_data(data)


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Check names against Lightning's Trainer, and that the run has a beginning and an end."""
    names = [n for n in signature(pl.Trainer).parameters if n not in MANAGED_BY_TRAIN]
    check_names(trainer, names, where="trainer")
    for key in ("max_epochs", "max_steps"):
        value = trainer.get(key)
        if value is not None and (not isinstance(value, int) or value < -1 or value == 0):
            raise ConfigError(f"trainer.{key}={value}: expected a whole number >= 1, or -1")
    ends = (trainer.get("max_epochs") != -1, trainer.get("max_steps", -1) != -1)
    if not any(ends) and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; give one"
        )
    for key in ("accumulate_grad_batches", "check_val_every_n_epoch"):
        value = trainer.get(key, 1)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"trainer.{key}={value}: expected a whole number >= 1")
    if (clip := trainer.get("gradient_clip_val")) is not None:
        check_number("trainer.gradient_clip_val", clip)
    for key, instead in {"train": "give some", "test": "test=false leaves the test out"}.items():
        if trainer.get(f"limit_{key}_batches") == 0:
            raise ConfigError(f"trainer.limit_{key}_batches=0: there would be no batch; {instead}")
    profiler = trainer.get("profiler")
    if profiler is not None and str(profiler) not in PROFILERS:
        raise ConfigError(
            f"trainer.profiler={profiler}: expected {', '.join(PROFILERS)} or null"
            + did_you_mean(str(profiler), PROFILERS)
        )
    device_kind(trainer.get("accelerator"))


def device_kind(accelerator: Any) -> str:
    """The kind of device a run will be on: ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ConfigError: if the accelerator is unknown or not there.
    """
    available = {
        "cuda": CUDAAccelerator.is_available(),
        "mps": MPSAccelerator.is_available(),
        "cpu": True,
    }
    if accelerator not in ("auto", "gpu", *available):
        raise ConfigError(
            f"trainer.accelerator={accelerator}: expected auto, cpu, gpu, cuda or mps"
            + did_you_mean(str(accelerator), ("auto", "gpu", *available))
        )
    fitting = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}
    for kind in fitting.get(accelerator, (accelerator,)):
        if available[kind]:
            return kind
    raise ConfigError(
        f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no such device here; "
        "use trainer=cpu or trainer=auto"
    )


def check_precision(precision: Mapping[str, Any], device: str) -> None:
    """Refuse number formats that the device lacks or that exclude each other."""
    check_names(precision, ("trainer", "tf32", "channels_last"), where="precision")
    name = precision["trainer"]
    if name not in PRECISIONS:
        raise ConfigError(
            f"precision.trainer={name}: expected one of {', '.join(PRECISIONS)}"
            + did_you_mean(str(name), PRECISIONS)
        )
    if name == "16-mixed" and device == "cpu":
        raise ConfigError("precision=fp16 needs a GPU, this run is on the CPU: use precision=bf16")
    if name == "64-true" and device == "mps":
        raise ConfigError("precision=fp64 is not there on mps: use trainer=cpu")
    if precision["tf32"] and device != "cuda":
        raise ConfigError(
            f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: "
            "use precision=fp32"
        )
    if precision["tf32"] and name != "32-true":
        raise ConfigError(
            f"precision.tf32=true changes float32 only, but precision.trainer={name}: "
            "use precision=tf32 alone"
        )


def check_logger(logger: Mapping[str, Any]) -> None:
    """Refuse a kind of logger that does not exist, and unknown options."""
    kind, kinds = logger.get("kind"), (*LOGGERS, CSV_ALONE)
    if kind is not None and kind not in kinds:
        raise ConfigError(
            f"logger.kind={kind}: expected one of {', '.join(kinds)} or null"
            + did_you_mean(str(kind), kinds)
        )
    check_names(
        logger, ("kind", *(keyword_names(LOGGERS[kind]) if kind in LOGGERS else ())), where="logger"
    )
