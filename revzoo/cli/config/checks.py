"""Checks a composed configuration before reading any data.

Each section is checked by building the object that it describes, or by the rules below, so each
rule has one place. The checks write no files and initialise no weights: the model is built on
torch's ``meta`` device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, get_type_hints

import pytorch_lightning as pl
import torch
from pytorch_lightning.accelerators import CUDAAccelerator, MPSAccelerator

from revzoo._checks import (
    check_choice,
    check_count,
    check_names,
    check_number,
    check_types,
    did_you_mean,
    is_count,
    keyword_names,
)
from revzoo.cli.config.build import (
    CSV_ONLY,
    MANAGED_BY_TRAIN,
    PROFILERS,
    build_data,
    model_spec,
)
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.run.tune import SECTION, check_tuner
from revzoo.data import ImageData
from revzoo.data.registry import DATA
from revzoo.models.pretrained import find_source
from revzoo.models.registry import MODELS
from revzoo.profiling.plan import PLANNED
from revzoo.profiling.units import bytes_from
from revzoo.training.callbacks.finetune import Finetuning
from revzoo.training.callbacks.registry import CALLBACKS, build_callbacks, check_callbacks
from revzoo.training.checkpoint.hyperparameters import WEIGHTS
from revzoo.training.classifier import model_from
from revzoo.training.loggers import LOGGERS
from revzoo.training.optim.optimizers import OptimSpec

SECTIONS = ("model", "data", "memory", "precision", "optim", "trainer", "callbacks", "logger")
VALUES = ("seed", "test")
OPTIONAL = ("threads",)  # missing in runs of earlier versions
MONITORED = {
    f"{split}/{name}": "min" if name == "loss" else "max"
    for split, names in {"val": ("loss", "acc", "acc5"), "train": ("loss", "acc")}.items()
    for name in names
}  # logged figures -> whether the best is the smallest or the largest
FITTED = {
    "memory": "the mode of memory=MODE",
    "num_classes": "the number of classes of the data",
    "in_chans": "the channels of the data; data.in_chans=N for a folder of images",
}  # arguments that build.model_spec fills in
POSITIVE = ("max_epochs", "max_steps", "accumulate_grad_batches", "check_val_every_n_epoch")
ENDLESS = ("max_epochs", "max_steps")  # may be -1
PRECISION = {"trainer": str, "tf32": bool, "channels_last": bool}
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


def check_config(config: Mapping[str, Any]) -> None:
    """Check a composed configuration (plain containers).

    Raises:
        ValueError: naming the value, the expected ones and the remedy.
    """
    with type_errors_explained():
        _check_sections(config)


@contextmanager
def type_errors_explained() -> Iterator[None]:
    """Turn the errors of a value with an unexpected type, such as a list for a name, into one line.

    Raises:
        ConfigError: with the type of the error.
    """
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            "a value of the configuration is missing or has the wrong type "
            f"({type(error).__name__}: {one_line(error)}): compare it with revzoo train --cfg job"
        ) from error


def _check_sections(config: Mapping[str, Any]) -> None:
    needed = (*SECTIONS, *VALUES)
    check_names(config, (*needed, *OPTIONAL, SECTION), where="config")
    for key in needed:
        if key not in config:
            raise ConfigError(f"{key} is missing from the configuration")
    if not is_count(config["seed"], 0) or config["seed"] >= 2**32:
        raise ConfigError(f"seed={config['seed']}: expected a whole number from 0 to 2**32 - 1")
    if config.get("threads") is not None:
        check_count("threads", config["threads"])
    check_types(config, {"test": bool} | dict.fromkeys(SECTIONS, Mapping), where="config")
    check_trainer(config["trainer"])
    check_precision(config["precision"], device_kind(config["trainer"]["accelerator"]))
    OptimSpec.of(config["optim"])
    check_callbacks(config["callbacks"])
    check_monitors(config["callbacks"])
    build_callbacks(config["callbacks"], run_dir=Path())  # each constructor checks its values
    check_logger(config["logger"])
    check_data(config["data"])
    check_model(config)
    if config.get(SECTION) is not None:
        check_tuner(config)


def check_model(config: Mapping[str, Any]) -> None:
    """Check the model's name, its keywords and the memory mode, by building it on ``meta``."""
    check_memory(config["memory"])
    if not isinstance(config["model"].get("name"), str):
        raise ConfigError(f"model.name={config['model'].get('name')}: expected the name of a model")
    for key, source in FITTED.items():
        if key in config["model"]:
            raise ConfigError(f"model.{key} cannot be set: it is {source}")
    spec = model_spec(config, num_classes=10, in_chans=3)
    start = {key: spec.pop(key) for key in WEIGHTS if key in spec}
    check_types(start, {"checkpoint_path": str | None, "pretrained": bool}, where="model")
    with torch.device("meta"):
        model = model_from(spec)
    starts = bool(start.get("pretrained") or start.get("checkpoint_path"))
    check_finetuning(config["callbacks"].get("finetuning"), model, starts=starts)
    if start.get("pretrained") and not start.get("checkpoint_path"):
        # check that the name exists; the run downloads the weights later
        find_source(spec["name"], known=MODELS, pretrained=True)


def check_memory(memory: Mapping[str, Any]) -> None:
    """Check the keys; a bounded mode needs ``bytes``, and the other modes have none."""
    check_names(memory, ("mode", "bytes", "plan"), where="memory")
    budget = memory.get("bytes")
    planned = PLANNED.get(memory["mode"])
    if planned is not None and planned.bounded:
        if budget in (None, "???"):
            raise ConfigError("memory.bytes is needed: give memory.bytes=4GiB, say")
        bytes_from(budget, name="memory.bytes")
    elif budget is not None:
        raise ConfigError(f"memory.bytes={budget} is a budget: add memory=budget")
    plan = memory.get("plan")
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(f"memory.plan={plan!r:.80}: expected a mapping of steps to memory modes")


def check_finetuning(
    options: Mapping[str, Any] | None, model: torch.nn.Module, *, starts: bool
) -> None:
    """Check that the model has the parts to unfreeze, and starts from trained weights."""
    if options is None:
        return
    Finetuning(**options).first_trained(model, epoch=0)
    if not starts:
        raise ConfigError(
            "callbacks.finetuning would freeze random weights: add model.pretrained=true or "
            "+model.checkpoint_path=FILE, or set callbacks.finetuning=null"
        )


def check_monitors(callbacks: Mapping[str, Mapping[str, Any] | None]) -> None:
    """Check that each ``monitor`` is a figure of a run, and ``mode`` its direction."""
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
                f"callbacks.{name}.mode={mode}: the best {figure} is the {better}imum, so set "
                f"callbacks.{name}.mode={better}"
            )


def check_data(data: Mapping[str, Any]) -> None:
    """Check the data set's name, the names of its options and, by its constructor, their values."""
    target = data.get("_target_")
    check_choice("data._target_", target, DATA)
    kinds = (ImageData, DATA[str(target)])
    parameters = {n: p for kind in kinds for n, p in signature(kind).parameters.items()}
    names = [n for n, p in parameters.items() if p.kind is not p.VAR_KEYWORD]
    options = {key: value for key, value in data.items() if key != "_target_"}
    check_names(options, names, where="data")
    for key, value in options.items():
        if value == "???":
            raise ConfigError(f"data.{key} is needed: give data.{key}=...")
    hints = {n: hint for kind in kinds for n, hint in get_type_hints(kind.__init__).items()}
    check_types(options, hints, where="data")
    build_data(data)


def check_trainer(trainer: Mapping[str, Any]) -> None:
    """Check the options of Lightning's Trainer, and that the run has batches and an end."""
    names = [n for n in signature(pl.Trainer).parameters if n not in MANAGED_BY_TRAIN]
    check_names(trainer, names, where="trainer")
    for key in POSITIVE:
        value = trainer.get(key)
        if value is not None and not (is_count(value) or (value == -1 and key in ENDLESS)):
            endless = ", or -1" if key in ENDLESS else ""
            raise ConfigError(f"trainer.{key}={value}: expected a whole number >= 1{endless}")
    ends = (trainer.get("max_epochs") != -1, trainer.get("max_steps", -1) != -1)
    if not any(ends) and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; set one"
        )
    if (clip := trainer.get("gradient_clip_val")) is not None:
        check_number("trainer.gradient_clip_val", clip)
    for key, instead in {"train": "allow some", "test": "test=false skips the test"}.items():
        if trainer.get(f"limit_{key}_batches") == 0:
            raise ConfigError(f"trainer.limit_{key}_batches=0: there would be no batch; {instead}")
    if trainer.get("val_check_interval") == 0:
        raise ConfigError("trainer.val_check_interval=0: expected a fraction or number of batches")
    check_choice("trainer.profiler", trainer.get("profiler"), (*PROFILERS, None))
    check_types(trainer, get_type_hints(pl.Trainer.__init__), where="trainer")
    device_kind(trainer.get("accelerator"))


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
    check_choice("trainer.accelerator", accelerator, ("auto", "gpu", *available))
    fitting = {"auto": ("cuda", "mps", "cpu"), "gpu": ("cuda", "mps")}
    for kind in fitting.get(accelerator, (accelerator,)):
        if available[kind]:
            return kind
    raise ConfigError(
        f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no such device; use "
        "trainer=cpu or trainer=auto"
    )


def check_precision(precision: Mapping[str, Any], device: str) -> None:
    """Check that the device supports the precision, and that its options do not contradict."""
    check_names(precision, tuple(PRECISION), where="precision")
    check_types(precision, PRECISION, where="precision")
    name, tf32 = precision["trainer"], precision["tf32"]
    check_choice("precision.trainer", name, PRECISIONS)
    refused = {
        "precision=fp16 needs a GPU, this run is on the CPU: use precision=bf16": (
            name == "16-mixed" and device == "cpu"
        ),
        "precision=fp64 is not supported on mps: use trainer=cpu": (
            name == "64-true" and device == "mps"
        ),
        f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use precision=fp32": (
            tf32 and device != "cuda"
        ),
        f"precision.tf32=true changes float32 only, but precision.trainer={name}: "
        "use precision=tf32 only": tf32 and name != "32-true",
    }
    for message, applies in refused.items():
        if applies:
            raise ConfigError(message)


def check_logger(logger: Mapping[str, Any]) -> None:
    """Check the kind of the logger and the names of its options."""
    kind, kinds = logger.get("kind"), (*LOGGERS, CSV_ONLY)
    check_choice("logger.kind", kind, (*kinds, None))
    options = keyword_names(LOGGERS[kind]) if kind in LOGGERS else ()
    check_names(logger, ("kind", *options), where="logger")
