"""Checks a composed configuration before reading any data.

We check each section by building the object that it describes, or by the rules below, so each rule
has one place. The checks write no files and initialise no weights: they build the model on torch's
``meta`` device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator

from revzoo._checks import (
    check_choice,
    check_names,
    check_types,
    cores,
    did_you_mean,
    in_section,
    keyword_names,
    number_of,
)
from revzoo.cli.config.build import PROFILERS, build_data
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.config.quick import (
    CSV_ONLY,
    MANAGED_BY_TRAIN,
    TUNER,
    check_data_quickly,
    check_precision_of_cpu,
    check_precision_options,
    check_quickly,
    check_trainer_numbers,
    type_errors_explained,
)
from revzoo.cli.run.tune import check_tuner
from revzoo.data import ImageData
from revzoo.data.registry import DATA
from revzoo.models.network import ImageNetwork
from revzoo.training.callbacks.base import ChecksModel
from revzoo.training.callbacks.private import check_class_weights
from revzoo.training.callbacks.registry import (
    CALLBACKS,
    build_callbacks,
    check_callbacks,
    direction,
)
from revzoo.training.loggers import LOGGERS

_FIGURES = {"val": ("loss", "acc", "balanced_acc", "acc5"), "train": ("loss", "acc")}
MONITORED = {
    f"{split}/{name}": direction(name) for split, names in _FIGURES.items() for name in names
}  # logged figures -> whether the best is the smallest or the largest

LIMIT = "limit_val_batches"
OF_SAMPLES = ("private", "gradient_noise_scale", "hard_samples")  # callbacks


def check_config(config: Mapping[str, Any]) -> None:
    """Check a composed configuration (plain containers).

    Raises:
        ValueError: naming the value, the expected ones and the remedy.
    """
    network = check_quickly(config)
    with type_errors_explained():
        check_trainer(config["trainer"])
        check_precision(config["precision"], device_kind(config["trainer"]["accelerator"]))
        check_callbacks(config["callbacks"])
        check_monitors(config["callbacks"], validates=config["trainer"].get(LIMIT) != 0)
        # the constructors check their values
        callbacks = build_callbacks(config["callbacks"], run_dir=Path())
        check_logger(config["logger"])
        check_data(config["data"])
        check_finetuning(config)
        check_compiled(config["callbacks"])
        if config["callbacks"].get("private") is not None:
            check_class_weights(config["optim"].get("class_weights"))
        check_network(callbacks, network)
        if config.get(TUNER) is not None:
            check_tuner(config)


def check_finetuning(config: Mapping[str, Any]) -> None:
    """Check that fine-tuning starts from trained weights."""
    if config["callbacks"].get("finetuning") is None:
        return
    if not (config["model"].get("pretrained") or config["model"].get("checkpoint_path")):
        raise ConfigError(
            "callbacks.finetuning would freeze random weights: add model.pretrained=true or "
            "+model.checkpoint_path=FILE, or set callbacks.finetuning=null"
        )


def check_network(callbacks: Sequence[pl.Callback], network: ImageNetwork) -> None:
    """Check that the network meets the requirements of the callbacks."""
    names = {factory: name for name, factory in CALLBACKS.items()}
    for callback in callbacks:
        try:
            if isinstance(callback, ChecksModel):
                callback.check_model(network)
        except ValueError as error:
            kind = type(callback)
            raise in_section(f"callbacks.{names.get(kind, kind.__name__)}", error) from error


def check_compiled(callbacks: Mapping[str, Any]) -> None:
    """Check that no callback needs the layers that ``compiled_branches`` compiles."""
    others = [name for name in OF_SAMPLES if callbacks.get(name) is not None]
    if callbacks.get("compiled_branches") is not None and others:
        raise ConfigError(
            f"callbacks.compiled_branches with callbacks.{others[0]}, which computes per-sample "
            "gradients at each layer: a compiled part does not call its layers. Set one of the two "
            "to null"
        )


def check_monitors(
    callbacks: Mapping[str, Mapping[str, Any] | None], *, validates: bool = True
) -> None:
    """Check that each ``monitor`` is a figure of a run, and ``mode`` its direction."""
    for name, builder in CALLBACKS.items():
        parameters = signature(builder).parameters
        # not in the run, or without a figure to watch
        if callbacks.get(name) is None or "monitor" not in parameters:
            continue
        options = {key: p.default for key, p in parameters.items()} | dict(callbacks[name] or {})
        figure, mode = options["monitor"], options["mode"]
        if figure not in MONITORED:
            raise ConfigError(
                f"callbacks.{name}.monitor={figure}: expected one of {', '.join(MONITORED)}"
                # val_acc is the name in other programs
                + did_you_mean(str(figure).replace("_", "/"), MONITORED)
            )
        if name == "early_stopping" and figure.startswith("val/") and not validates:
            raise ConfigError(
                f"callbacks.{name}.monitor={figure}, but with trainer.{LIMIT}=0 the run does not "
                f"validate: set callbacks.{name}.monitor=train/loss, or callbacks.{name}=null"
            )
        if mode not in (None, better := MONITORED[figure]):
            raise ConfigError(
                f"callbacks.{name}.mode={mode}: the best {figure} is the {better}imum, so set "
                f"callbacks.{name}.mode={better}"
            )


def check_data(data: Mapping[str, Any]) -> None:
    """Check the data set's name, the names of its options and, by its constructor, their values."""
    target = data.get("_target_")
    check_choice("data._target_", target, DATA)
    # data sets pass **options on to ImageData
    kinds = (ImageData, DATA[str(target)])
    parameters = {n: p for kind in kinds for n, p in signature(kind).parameters.items()}
    names = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    options = {key: value for key, value in data.items() if key != "_target_"}
    check_names(options, names, where="data")
    check_data_quickly(options)
    hints = {n: hint for kind in kinds for n, hint in get_type_hints(kind.__init__).items()}
    check_types(options, hints, where="data")
    # the constructor checks the values; it reads no files
    try:
        build_data(data)
    except ValueError as error:
        raise in_section("data", error) from error


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Check the options of Lightning's Trainer."""
    check_trainer_numbers(trainer)
    names = [n for n in signature(pl.Trainer).parameters if n not in MANAGED_BY_TRAIN]
    check_names(trainer, names, where="trainer")
    check_choice("trainer.profiler", trainer.get("profiler"), (*PROFILERS, None))
    check_types(trainer, get_type_hints(pl.Trainer.__init__), where="trainer")
    kind, devices = device_kind(trainer.get("accelerator")), str(trainer.get("devices"))
    # on a CPU, Lightning starts any number of processes
    if kind == "cpu" and devices.isdecimal() and int(devices) > 4 * cores():
        raise ConfigError(
            f"trainer.devices={devices} processes for {number_of(cores(), 'core')}: "
            f"expected at most {4 * cores()}"
        )


def device_kind(accelerator: Any) -> str:
    """The type of a run's device: ``cpu``, ``cuda`` or ``mps``.

    Raises:
        ConfigError: the accelerator is unknown, or this machine has none.
    """
    available = {
        "cuda": CUDAAccelerator.is_available(),
        "mps": MPSAccelerator.is_available(),
        "cpu": True,
    }
    fitting = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}
    for kind in fitting.get(accelerator, (accelerator,)):
        if available[kind]:
            return kind
    raise ConfigError(
        f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no such device; use "
        "trainer.accelerator=cpu or auto"
    )


def check_precision(precision: Mapping[str, Any], device: str) -> None:
    """Check that the device supports the precision, and that its options do not contradict."""
    check_precision_options(precision)
    name, tf32 = precision["trainer"], precision["tf32"]
    if device == "cpu":
        check_precision_of_cpu(name)
    if name == "64-true" and device == "mps":
        raise ConfigError("precision=fp64 is not supported on mps: use trainer=cpu")
    if tf32 and device != "cuda":
        raise ConfigError(
            f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use "
            "precision=fp32"
        )
    if tf32 and name != "32-true":
        raise ConfigError(
            f"precision.tf32=true changes float32 only, but precision.trainer={name}: use "
            "precision=tf32 only"
        )


def check_logger(logger: Mapping[str, Any]) -> None:
    """Check the kind of the logger and the names of its options."""
    kind, kinds = logger.get("kind"), (*LOGGERS, CSV_ONLY)
    check_choice("logger.kind", kind, (*kinds, None))
    options = keyword_names(LOGGERS[kind]) if kind in LOGGERS else ()
    check_names(logger, ("kind", *options), where="logger")
