"""Checks a configuration without Lightning, which takes seconds to import.

``revzoo train`` runs these checks first; those that import torch (optimiser, model) come last.
:func:`revzoo.cli.config.checks.check_config` runs them and all others.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from revzoo._checks import (
    check_choice,
    check_count,
    check_names,
    check_number,
    check_types,
    is_count,
)
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.config.overrides import FITTED, check_settable
from revzoo.cli.config.signatures import fields, model_keywords, options, table_options
from revzoo.profiling.units import bytes_from
from revzoo.training.callbacks.options import check_options

if TYPE_CHECKING:
    from revzoo.models.network import ImageNetwork

SECTIONS = ("model", "data", "memory", "precision", "optim", "trainer", "callbacks", "logger")
VALUES = ("seed", "test")
OPTIONAL = ("threads",)  # missing in runs of earlier versions
TUNER = "tuner"
SPLITS = ("test", "val")  # that an evaluation may read
EVAL_KEYS = ("ckpt", "split", "batch_size", "bits", "data", "precision", "trainer")
# arguments of create_model that the run sets itself, or that only some models take
NOT_SUGGESTED = (*FITTED, "reversible_bits", "features_only", "out_indices")
POSITIVE = ("max_epochs", "max_steps", "accumulate_grad_batches", "check_val_every_n_epoch")
ENDLESS = ("max_epochs", "max_steps")  # may be -1
ACCELERATORS = ("auto", "gpu", "cuda", "mps", "cpu")
# arguments of the Trainer that build_trainer takes from other sections
MANAGED_BY_TRAIN = (
    "callbacks",
    "logger",
    "plugins",
    "precision",
    "default_root_dir",
    "enable_checkpointing",
    "enable_progress_bar",
    "enable_model_summary",
)
BYTES_NEEDED = "memory.bytes is needed: give memory.bytes=4GiB, say"
CSV_ONLY = "csv"  # the logger that only writes metrics.csv, which the others write too
PRECISION = {"trainer": str, "tf32": bool, "channels_last": bool}
PRECISIONS = ("32-true", "64-true", "16-mixed", "bf16-mixed")


def check_quickly(config: Mapping[str, Any], *, looks: bool = False) -> ImageNetwork:
    """Check the sections, the model, memory, optimiser, callbacks and the Trainer's numbers.

    Args:
        config: plain containers.
        looks: whether to look at this machine, too: for the folder of images, and for a GPU.

    Returns:
        The model, on ``meta``.

    Raises:
        ValueError: naming the value, the expected ones and the remedy.
    """
    with type_errors_explained():
        needed = (*SECTIONS, *VALUES)
        check_names(config, (*needed, *OPTIONAL, TUNER), where="config")
        for key in needed:
            if key not in config:
                raise ConfigError(f"{key} is missing from the configuration")
        # NumPy's seeds have 32 bits
        if not is_count(config["seed"], 0) or config["seed"] >= 2**32:
            raise ConfigError(f"seed={config['seed']}: expected a whole number from 0 to 2**32 - 1")
        if config.get("threads") is not None:
            check_count("threads", config["threads"])
        # model=null, say, makes a section empty
        check_types(config, {"test": bool} | dict.fromkeys(SECTIONS, Mapping), where="config")
        check_trainer_numbers(config["trainer"])
        check_precision_options(config["precision"])
        if config["trainer"]["accelerator"] == "cpu":
            check_precision_of_cpu(config["precision"]["trainer"])
        check_data_quickly(config["data"])
        if config["memory"].get("bytes") == MISSING:
            raise ConfigError(BYTES_NEEDED)
        check_names_by_source(config)
        if looks:
            check_root(config["data"])
            check_device(config)
        # here and not above: it imports torch
        from revzoo.training.optim.optimizers import OptimSpec

        OptimSpec.of(config["optim"])
        check_memory(config["memory"])
        return check_model(config)


def check_evaluated(config: Mapping[str, Any]) -> None:
    """Check the keys of an evaluation, its split and batch size, and that it names weights."""
    check_names(config, EVAL_KEYS, where="config")
    if config["ckpt"] in (None, "", MISSING):
        raise ConfigError(
            "ckpt is needed: give the folder of a run, ckpt=RUN_DIR, or weights such as "
            "ckpt=revnet38.cifar10"
        )
    check_choice("split", config["split"], SPLITS)
    if config["batch_size"] is not None:
        check_count("batch_size", config["batch_size"])


@contextmanager
def type_errors_explained() -> Iterator[None]:
    """Explain in one line the error that Python raises for a value of the wrong type.

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


def check_trainer_numbers(trainer: Mapping[str, Any]) -> None:
    """Check the Trainer's numbers and accelerator, and that the run has batches and an end."""
    check_choice("trainer.accelerator", trainer.get("accelerator"), ACCELERATORS)
    for key in POSITIVE:
        value = trainer.get(key)
        if value is not None and not (is_count(value) or (value == -1 and key in ENDLESS)):
            endless = ", or -1" if key in ENDLESS else ""
            raise ConfigError(f"trainer.{key}={value}: expected a whole number >= 1{endless}")
    # without max_epochs, Lightning's default of 1000 ends the run
    ends = (trainer.get("max_epochs") != -1, trainer.get("max_steps", -1) != -1)
    if not any(ends) and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; set one"
        )
    if (clip := trainer.get("gradient_clip_val")) is not None:
        check_number("trainer.gradient_clip_val", clip)
    for key, instead in {"train": "allow some", "test": "test=false skips the test"}.items():
        # limit_val_batches=0 is allowed: training without validation
        if trainer.get(f"limit_{key}_batches") == 0:
            raise ConfigError(f"trainer.limit_{key}_batches=0 leaves no batch; {instead}")
    if trainer.get("val_check_interval") == 0:
        raise ConfigError("trainer.val_check_interval=0: expected a fraction or number of batches")


def check_precision_options(precision: Mapping[str, Any]) -> None:
    """Check the options of the precision, without the device."""
    check_names(precision, tuple(PRECISION), where="precision")
    check_types(precision, PRECISION, where="precision")
    check_choice("precision.trainer", precision["trainer"], PRECISIONS)


def check_precision_of_cpu(name: str) -> None:
    """Refuse a precision that only GPUs have."""
    if name == "16-mixed":
        raise ConfigError("precision=fp16 needs a GPU, this run is on the CPU: use precision=fp32")


def check_device(config: Mapping[str, Any]) -> None:
    """Check the precision of a run that takes the CPU since this machine has no GPU."""
    import torch

    has_gpu = torch.cuda.is_available() or torch.backends.mps.is_available()
    if config["trainer"]["accelerator"] == "auto" and not has_gpu:
        check_precision_of_cpu(config["precision"]["trainer"])


def check_data_quickly(data: Mapping[str, Any]) -> None:
    """Check that no option of the data is missing, and their counts."""
    for key, value in data.items():
        if value == MISSING:
            example = "DIR, the folder above train/CLASS/*.jpg" if key == "root" else "..."
            raise ConfigError(f"data.{key} is needed: give data.{key}={example}")
    for key in ("batch_size", "eval_batch_size"):
        if (count := data.get(key)) is not None:
            check_count(f"data.{key}", count)


def check_root(data: Mapping[str, Any]) -> None:
    """Check that the folder of an image folder exists."""
    if data.get("_target_") == "revzoo.data.ImageFolder":
        root = Path(str(data["root"])).expanduser().absolute()
        if not root.is_dir():
            raise ConfigError(
                f"image folder {root} does not exist: set data.root=DIR, the folder above "
                "train/CLASS/*.jpg"
            )


def check_names_by_source(config: Mapping[str, Any]) -> None:
    """Check names in tables, and names of options, against the source files.

    The modules with the tables check the same names, but import torch or Lightning. If a module is
    already imported, we do not check its names here: a plugin may have added rows.
    """
    data, logger, trainer = config["data"], config["logger"], config["trainer"]
    if rows := _rows("revzoo.training.callbacks.registry", "CALLBACKS"):
        check_options(config["callbacks"], rows)
    if rows := _rows("revzoo.data.registry", "DATA", positional=True):
        check_choice("data._target_", data.get("_target_"), rows)
        # data sets pass **options on to ImageData
        shared = options("revzoo.data.module", "ImageData")
        known = [*shared, *rows[data["_target_"]]]
        check_names((key for key in data if key != "_target_"), known, where="data")
    if rows := _rows("revzoo.training.loggers", "LOGGERS"):
        kind = logger.get("kind")
        check_choice("logger.kind", kind, (*rows, CSV_ONLY, None))
        check_names(logger, ("kind", *rows.get(str(kind), ())), where="logger")
    optimizers, optim = "revzoo.training.optim.optimizers", config["optim"]
    if rows := _rows(optimizers, "OPTIMIZERS"):
        check_names(optim, fields(optimizers, "OptimSpec"), where="optim")
        # a value that is not a string gets its own message later
        if isinstance(name := optim.get("name"), str):
            check_choice("optim.name", name, rows)
    if arguments := options("pytorch_lightning.trainer.trainer", "Trainer"):
        known = [name for name in arguments if name not in MANAGED_BY_TRAIN]
        check_names(trainer, known, where="trainer")
    if rows := _rows("revzoo.cli.config.build", "PROFILERS"):
        check_choice("trainer.profiler", trainer.get("profiler"), (*rows, None))
    # weights, such as revnet38.cifar10, take their architecture's keywords
    architecture = str(config["model"].get("name")).partition(".")[0]
    if "revzoo.models.registry" not in sys.modules and (found := model_keywords(architecture)):
        model = config["model"]
        known = [k for k in dict.fromkeys(found) if k in model or k not in NOT_SUGGESTED]
        check_names([k for k in model if k not in NOT_SUGGESTED], known, where="model")


def _rows(module: str, table: str, *, positional: bool = False) -> dict[str, list[str]]:
    """The rows of a table and their options; empty once the module is imported."""
    return {} if module in sys.modules else table_options(module, table, positional=positional)


def model_spec(config: Mapping[str, Any], *, num_classes: int, in_chans: int) -> dict[str, Any]:
    """The arguments of ``create_model`` for data with these numbers of classes and channels."""
    fitted = {"num_classes": num_classes, "in_chans": in_chans}
    return {**config["model"], "memory": memory_mode(config), **fitted}


def memory_mode(config: Mapping[str, Any]) -> str | None:
    """The memory mode with which a run's model is created; None for the model's default.

    A run with a planned mode also starts with the default (:mod:`revzoo.cli.run.memory_plan`).
    """
    from revzoo.profiling.plan import PLANNED

    mode: str | None = config["memory"]["mode"]
    return None if mode in PLANNED else mode


def check_model(config: Mapping[str, Any]) -> ImageNetwork:
    """Check the model's name, its keywords and the memory mode; return it on ``meta``."""
    import torch

    from revzoo.models.pretrained import find_model
    from revzoo.models.registry import MODELS, WEIGHTS_ARGUMENTS, create_model

    if not isinstance(config["model"].get("name"), str):
        raise ConfigError(f"model.name={config['model'].get('name')}: expected the name of a model")
    for key in config["model"]:
        check_settable(f"model.{key}")
    # any numbers: the data are not read yet
    spec = model_spec(config, num_classes=10, in_chans=3)
    # on meta there are no values to load
    start = {key: spec.pop(key) for key in WEIGHTS_ARGUMENTS if key in spec}
    check_types(start, {"checkpoint_path": str | None, "pretrained": bool}, where="model")
    with torch.device("meta"):
        model = create_model(spec.pop("name"), **spec)
    if start.get("pretrained") and not start.get("checkpoint_path"):
        # check that the name exists; the run downloads the weights later
        find_model(config["model"]["name"], known=MODELS, pretrained=True)
    return model


def check_memory(memory: Mapping[str, Any]) -> None:
    """Check the keys of ``memory``; only a bounded mode, such as ``budget``, has ``bytes``."""
    from revzoo.core.modes import INVERTING
    from revzoo.profiling.plan import PLANNED

    check_names(memory, ("mode", "bytes", "inverting", "plan", "planned_for"), where="memory")
    budget = memory.get("bytes")
    planned = PLANNED.get(memory["mode"])
    if planned is not None and planned.bounded:
        if budget is None:
            raise ConfigError(BYTES_NEEDED)
        bytes_from(budget, name="memory.bytes")
    elif budget is not None:
        raise ConfigError(f"memory.bytes={budget} is a budget: add memory=budget")
    if (inverting := memory.get("inverting")) is not None:
        if planned is None:
            raise ConfigError(f"memory.inverting={inverting} is for a plan: add memory=auto")
        check_choice("memory.inverting", inverting, INVERTING)
    mappings = {"plan": "steps to memory modes", "planned_for": "the conditions of the plan"}
    for key, content in mappings.items():
        value = memory.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"memory.{key}={value!r:.80}: expected a mapping of {content}")
