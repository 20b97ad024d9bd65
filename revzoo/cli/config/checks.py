"""Refuses what cannot be run, before any data is touched.

Each section of the configuration is checked by building the value object it describes, or by the
rules below, so that a message comes from the one place that knows. Nothing is written, no model
is initialised: the model is built on torch's ``meta`` device, where weights have shapes only.
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
    CSV_ALONE,
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
from revzoo.profiling.units import bytes_from
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
}  # logged figures -> whether the best is the smallest or the largest
FITTED = {
    "memory": "the mode of memory=MODE",
    "num_classes": "the number of classes of the data",
    "in_chans": "the channels of the data; data.in_chans=N for a folder of images",
}  # arguments that build.model_spec fills in
LEAST = {
    "max_epochs": 1,
    "max_steps": 1,
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
}  # of Lightning's Trainer
ENDLESS = ("max_epochs", "max_steps")  # may be -1
PRECISION = {"trainer": str, "tf32": bool, "channels_last": bool}
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


def check_config(config: Mapping[str, Any]) -> None:
    """Check a composed configuration, given as plain containers.

    Raises:
        ValueError: with what was got, what is expected and what to do.
    """
    with wrong_kinds():
        _check_sections(config)


@contextmanager
def wrong_kinds() -> Iterator[None]:
    """One line for a value of a kind that no check has foreseen, such as a list for a name.

    Raises:
        ConfigError: with the name of the error that it has caused.
    """
    try:
        yield
    except (TypeError, AttributeError, LookupError, ArithmeticError) as error:
        raise ConfigError(
            f"a value of the configuration is missing or of the wrong kind ({type(error).__name__}:"
            f" {one_line(error)}): compare it with revzoo train --cfg job"
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
    build_callbacks(config["callbacks"], run_dir=Path())  # each checks its values
    check_logger(config["logger"])
    check_data(config["data"])
    check_model(config)
    if config.get(SECTION) is not None:
        check_tuner(config)


def check_model(config: Mapping[str, Any]) -> None:
    """Let the zoo check the model's name and keywords, and the memory mode with them."""
    check_memory(config["memory"])
    if not isinstance(config["model"].get("name"), str):
        raise ConfigError(f"model.name={config['model'].get('name')}: expected the name of a model")
    for key, source in FITTED.items():
        if key in config["model"]:
            raise ConfigError(f"model.{key} is not set here: it is {source}")
    spec = model_spec(config, num_classes=10, in_chans=3)
    start = {key: spec.pop(key) for key in WEIGHTS if key in spec}
    check_types(start, {"checkpoint_path": str | None, "pretrained": bool}, where="model")
    with torch.device("meta"):
        model = model_from(spec)
    starts = bool(start.get("pretrained") or start.get("checkpoint_path"))
    check_finetuning(config["callbacks"].get("finetuning"), model, starts=starts)
    if start.get("pretrained") and not start.get("checkpoint_path"):
        # known, at least; the package's weights are fetched when the run begins
        find_source(spec["name"], known=MODELS, pretrained=True)


def check_memory(memory: Mapping[str, Any]) -> None:
    """Check the names, and that a budget, and only a budget, comes with its bytes."""
    check_names(memory, ("mode", "bytes", "plan"), where="memory")
    given = memory.get("bytes")
    if memory["mode"] == "budget":
        if given in (None, "???"):
            raise ConfigError("memory.bytes is needed: give memory.bytes=4GiB, say")
        bytes_from(given, name="memory.bytes")
    elif given is not None:
        raise ConfigError(f"memory.bytes={given} is a budget: give memory=budget with it")
    plan = memory.get("plan")
    if plan is not None and not isinstance(plan, Mapping):
        raise ConfigError(f"memory.plan={plan!r:.80}: expected a mapping of steps to memory modes")


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
    """Check the options of Lightning's Trainer, and that the run has a beginning and an end."""
    names = [n for n in signature(pl.Trainer).parameters if n not in MANAGED_BY_TRAIN]
    check_names(trainer, names, where="trainer")
    for key, least in LEAST.items():
        value = trainer.get(key)
        if value is not None and not (is_count(value, least) or (value == -1 and key in ENDLESS)):
            endless = ", or -1" if key in ENDLESS else ""
            raise ConfigError(f"trainer.{key}={value}: expected a whole number >= {least}{endless}")
    ends = (trainer.get("max_epochs") != -1, trainer.get("max_steps", -1) != -1)
    if not any(ends) and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; give one"
        )
    if (clip := trainer.get("gradient_clip_val")) is not None:
        check_number("trainer.gradient_clip_val", clip)
    for key, instead in {"train": "give some", "test": "test=false leaves the test out"}.items():
        if trainer.get(f"limit_{key}_batches") == 0:
            raise ConfigError(f"trainer.limit_{key}_batches=0: there would be no batch; {instead}")
    if trainer.get("val_check_interval") == 0:
        raise ConfigError("trainer.val_check_interval=0: expected a share or number of batches")
    check_choice("trainer.profiler", trainer.get("profiler"), (*PROFILERS, None))
    check_types(trainer, get_type_hints(pl.Trainer.__init__), where="trainer")
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
    check_choice("trainer.accelerator", accelerator, ("auto", "gpu", *available))
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
    check_names(precision, tuple(PRECISION), where="precision")
    check_types(precision, PRECISION, where="precision")
    name, tf32 = precision["trainer"], precision["tf32"]
    check_choice("precision.trainer", name, PRECISIONS)
    refused = {
        "precision=fp16 needs a GPU, this run is on the CPU: use precision=bf16": (
            name == "16-mixed" and device == "cpu"
        ),
        "precision=fp64 is not there on mps: use trainer=cpu": (
            name == "64-true" and device == "mps"
        ),
        f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use precision=fp32": (
            tf32 and device != "cuda"
        ),
        f"precision.tf32=true changes float32 only, but precision.trainer={name}: "
        "use precision=tf32 alone": tf32 and name != "32-true",
    }
    for message, is_so in refused.items():
        if is_so:
            raise ConfigError(message)


def check_logger(logger: Mapping[str, Any]) -> None:
    """Refuse a kind of logger that does not exist, and unknown options."""
    kind, kinds = logger.get("kind"), (*LOGGERS, CSV_ALONE)
    check_choice("logger.kind", kind, (*kinds, None))
    options = keyword_names(LOGGERS[kind]) if kind in LOGGERS else ()
    check_names(logger, ("kind", *options), where="logger")
