"""Compares a composed configuration with the schema, and its devices and folder with this machine.

The error for a wrong name suggests the nearest option; that for a wrong value gives the range. The
schema is compared without torch, the machine without Lightning, which takes seconds to import.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

from revzoo._checks import (
    check_choice,
    cores,
    did_you_mean,
    expected_type,
    is_number,
    nearest,
    number_of,
    shortened,
)
from revzoo.cli.schema import (
    CALLBACKS,
    FITTED,
    MISSING,
    MONITORED,
    OPTIMIZERS,
    PLANS,
    RUN,
    SPELLINGS,
    Chosen,
    Config,
    Option,
    Section,
    chosen,
    having,
    names_in,
    registered,
)
from revzoo.cli.terminal import ConfigError
from revzoo.profiling.units import bytes_from

OF_SAMPLES = ("private", "gradient_noise_scale", "hard_samples")  # callbacks
REASONS = {
    "reversible_bits": ": it makes plain networks reversible; RevNets, i-RevNets, RevViTs, "
    "RevBiFPNs and RevCols are reversible without it",
}


def check(config: Config, root: Section = RUN, *, complete: bool = True) -> None:
    """Check the names and values of all options; those that must be given only if ``complete``."""

    def check_section(path: str, values: Config, known: Section) -> None:
        for key in values:
            if key not in known.options:
                raise unknown(f"{path}{key}", values[key], config, root)
        for key, option in known.options.items():
            name, value = f"{path}{key}", values.get(key, option.default)
            if value == MISSING and complete:
                missing = "is needed" if key in values else "is missing from the configuration"
                raise ConfigError(f"{name} {missing}{': ' * bool(option.remedy)}{option.remedy}")
            if key not in values or value == MISSING:
                continue
            part = known.parts.get(key)
            if part is not None and not isinstance(value, Mapping | None):
                raise ConfigError(f"{name}={typed(value)}: {_in_braces(name, value, part)}")
            check_value(name, value, option)
            if part is not None and value is not None:
                check_section(f"{name}.", value, chosen(name, part, value))

    check_section("", config, root)
    if root is RUN:
        _check_rules(config)


def check_value(name: str, value: Any, option: Option) -> None:
    """Check the type and the range of a value."""
    remedy = f"; {option.remedy}" if option.remedy else ""
    if option.choices and value is not None and value not in option.choices:
        null = "" if expected_type(None, option.type) else ", null"
        listed = ", ".join(map(str, option.choices)) + null
        hint = did_you_mean(value, option.choices)
        raise ConfigError(f"{name}={typed(value)}: expected one of {listed}{hint}")
    if expected := expected_type(value, option.type):
        raise ConfigError(f"{name}={typed(value)}: expected {expected}{remedy}")
    if not option.range or not is_number(value) or value in option.also:
        return
    low, high = map(float, option.range[1:-1].split(","))
    above = low < value if option.range[0] == "(" else low <= value
    below = value < high if option.range[-1] == ")" else value <= high
    if not (above and below):
        kind = "a number" if "float" in str(option.type) else "a whole number"
        others = "".join(f", or {other}" for other in option.also)
        raise ConfigError(f"{name}={value}: expected {kind} {option.within}{others}{remedy}")


def _in_braces(name: str, value: Any, part: Section | Chosen) -> str:
    if isinstance(part, Chosen):
        return f"expected options; the name is {name}.{part.by}={value}"
    return (
        f"expected options in braces and quotes, '{name}={{OPTION: VALUE}}'; {{}} uses the "
        "defaults, null leaves it out"
    )


def unknown(name: str, value: Any, config: Config, root: Section = RUN) -> ConfigError:
    """The error for an option that does not exist, with the one that the user probably means."""
    while isinstance(value, Mapping) and len(value) == 1:  # logger.wandb.project=mine
        ((key, value),) = value.items()
        name = f"{name}.{key}"
    path, _, leaf = name.rpartition(".")
    if path == "model" and leaf in FITTED:
        return ConfigError(f"{name} cannot be set: it is {FITTED[leaf]}")
    hint = f"; to continue a run: --resume {typed(value)}" if name == "resume" else ""
    # Hydra puts the keys of such a file below its group
    if name.partition(".")[0] in ("experiment", "debug"):
        hint = "; the first line of its file must be '# @package _global_'"
    sections = ["hydra", "debug", *root.options]
    # the other options of the trainer are Lightning's
    for spelling in (name, leaf) if path != "trainer" else (name,):
        hint = hint or our_spelling(spelling, typed(value), sections)
    part: Any = root
    for key in path.split("."):
        part = part.parts.get(key) if isinstance(part, Section) else None
    if isinstance(part, Chosen) and (choices := having(path, part, leaf)):
        has = "have" if "," in choices else "has"
        hint = hint or f"; {choices} {has} it{REASONS.get(leaf, '')}"
    hint = hint or _meant(path, leaf, list(names_in(root, config)))
    return ConfigError(f"{name}={typed(value)}: there is no option {name!r}{hint}")


def _meant(path: str, leaf: str, known: Sequence[str]) -> str:
    """The nearest option of the section; a bare last part (``lr``) finds its place."""
    by_leaf: dict[str, str] = {}  # the first of each
    for other in known:
        by_leaf.setdefault(other.rpartition(".")[2], other)
    siblings = [other for other in known if path and other.rpartition(".")[0] == path]
    longer = [other for other in siblings if other.endswith(f"_{leaf}")]
    near = longer or nearest(f"{path}.{leaf}", siblings, cutoff=0.8)
    near = near or ([by_leaf[leaf]] if leaf in by_leaf else [])
    if siblings and not near:
        return f" (there is {shortened((o.rpartition('.')[2] for o in siblings), 12)})"
    near = near or nearest(f"{path}.{leaf}".lstrip("."), known, cutoff=0.6)
    # a bare, misspelt last part: `lrr`
    near = near or [by_leaf[found] for found in nearest(leaf, by_leaf, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""


def typed(value: Any) -> str:
    """A value as users type it."""
    words = {"None": "null", "True": "true", "False": "false", "": "''"}
    return words.get(str(value), f"{value!s:.80}")


def our_spelling(key: str, value: str, sections: Container[str]) -> str:
    """``"; use optim.lr=0.1"`` for ``learning_rate=0.1``; empty if the table has no row.

    The ``sections`` are those of the command: an evaluation has no ``optim``.
    """
    text = SPELLINGS.get(f"{key}={value}", SPELLINGS.get(key))
    if text is None:
        return ""
    text = text.replace("@", value)
    text = SPELLINGS.get(text, text)  # trainer.precision=16: precision=16 is foreign, too
    section = re.split("[.=]", text.lstrip("'+"))[0]
    return f"; use {text}" if section in sections or " " in section else ""


# --- rules of several options ---


def _check_rules(config: Config) -> None:
    trainer, precision, memory = config["trainer"], config["precision"], config["memory"]
    # without max_epochs, Lightning's default of 1000 ends the run
    ends = trainer.get("max_epochs") != -1 or trainer.get("max_steps", -1) != -1
    if not ends and trainer.get("max_time") is None:
        raise ConfigError(
            "trainer.max_epochs=-1 and trainer.max_steps=-1: the run would never end; set one"
        )
    name = config["optim"].get("name")
    check_choice("optim.name", name, dict.fromkeys([*OPTIMIZERS, *registered("optim")]))
    if precision.get("tf32") and precision.get("trainer") != "32-true":
        raise ConfigError(
            f"precision.tf32=true changes float32 only, but precision.trainer="
            f"{precision.get('trainer')}: use precision=tf32 only"
        )
    mode, budget, inverting = (memory.get(key) for key in ("mode", "bytes", "inverting"))
    if mode == "budget" and budget is None:
        raise ConfigError("memory.bytes is needed: give memory.bytes=4GiB, say")
    if budget is not None and mode not in ("auto", "budget"):
        raise ConfigError(f"memory.bytes={budget} is a budget: add memory=budget")
    if budget not in (None, MISSING):
        bytes_from(budget, name="memory.bytes")
    if (part := memory.get("fraction")) is not None and mode != "auto":
        raise ConfigError(f"memory.fraction={part} is of the free memory: add memory=auto")
    if inverting is not None and mode not in PLANS:
        raise ConfigError(f"memory.inverting={inverting} is for a plan: add memory=auto")
    tuner = config.get("tuner") or {}
    if tuner and (trainer.get("devices", 1), trainer.get("strategy", "auto")) != (1, "auto"):
        raise ConfigError(
            f"tuner={tuner.get('kind')} searches on one device: give trainer.devices=1 "
            "trainer.strategy=auto, then train on several with its suggestion (batch sizes are per "
            "process)"
        )
    if tuner.get("kind") == "lr" and not tuner["min_lr"] <= tuner["max_lr"]:
        raise ConfigError(f"tuner.max_lr={tuner['max_lr']}: expected at least tuner.min_lr")
    _check_callbacks(config)


def _check_callbacks(config: Config) -> None:
    used = {name: options for name, options in config["callbacks"].items() if options is not None}
    model, trainer = config["model"], config["trainer"]
    if "finetuning" in used and not (model.get("pretrained") or model.get("checkpoint_path")):
        raise ConfigError(
            "callbacks.finetuning would freeze random weights: add model.pretrained=true or "
            "+model.checkpoint_path=FILE, or set callbacks.finetuning=null"
        )
    if "compiled_branches" in used and (others := [name for name in OF_SAMPLES if name in used]):
        raise ConfigError(
            f"callbacks.compiled_branches with callbacks.{others[0]}, which computes per-sample "
            "gradients at each layer: a compiled part does not call its layers. Set one of the two "
            "to null"
        )
    if "private" in used and config["optim"].get("class_weights") == "balanced":
        raise ConfigError(
            "callbacks.private with optim.class_weights=balanced: one image would change the "
            "weights of all others. Give a list of numbers, which do not come from the data"
        )
    for name, options in used.items():
        if name not in CALLBACKS or "monitor" not in CALLBACKS[name].options:
            continue
        figure, mode = options.get("monitor", "val/acc"), options.get("mode")
        no_validation = trainer.get("limit_val_batches") == 0
        if name == "early_stopping" and figure.startswith("val/") and no_validation:
            raise ConfigError(
                f"callbacks.{name}.monitor={figure}, but with trainer.limit_val_batches=0 the run "
                f"does not validate: set callbacks.{name}.monitor=train/loss, or "
                f"callbacks.{name}=null"
            )
        if mode not in (None, better := MONITORED[figure]):
            raise ConfigError(
                f"callbacks.{name}.mode={mode}: the best {figure} is the {better}imum, so set "
                f"callbacks.{name}.mode={better}"
            )


# --- this machine ---


def check_machine(config: Config) -> None:
    """Check the device, the precision and the number of processes of a checked configuration."""
    trainer, precision = config["trainer"], config["precision"]
    device, devices = device_kind(trainer["accelerator"]), str(trainer["devices"])
    # Lightning's errors do not name the option
    if device == "cpu" and not re.fullmatch(r"auto|[1-9]\d*", devices):
        raise ConfigError(
            f"trainer.devices={devices}: expected a number of processes, or auto; this run is on "
            "the CPU"
        )
    if not re.fullmatch(r"auto|-1|[1-9]\d*|\d+(,\d*)+|\[\d+(, \d+)*\]", devices):
        raise ConfigError(
            f"trainer.devices={devices}: expected a number of GPUs, a list of their numbers such "
            "as [0,1], or auto"
        )
    # on a CPU, Lightning starts any number of processes
    if device == "cpu" and devices.isdecimal() and int(devices) > 4 * cores():
        raise ConfigError(
            f"trainer.devices={devices} processes for {number_of(cores(), 'core')}: "
            f"expected at most {4 * cores()}"
        )
    if device == "cpu" and precision["trainer"] == "16-mixed":
        raise ConfigError("precision=fp16 needs a GPU, this run is on the CPU: use precision=fp32")
    if device == "mps" and precision["trainer"] == "64-true":
        raise ConfigError("precision=fp64 is not supported on mps: use trainer=cpu")
    if device != "cuda" and trainer.get("cuda_graph") is True:
        raise ConfigError(
            f"trainer.cuda_graph=true needs an NVIDIA GPU, this run is on {device}: use "
            "trainer.cuda_graph=auto, which captures steps where there is one"
        )
    if device != "cuda" and precision["tf32"]:
        raise ConfigError(
            f"precision=tf32 is a format of NVIDIA GPUs, this run is on {device}: use "
            "precision=fp32"
        )


def check_root(data: Config) -> None:
    """Check that the folder of an image folder exists."""
    if data["_target_"] == "revzoo.data.ImageFolder":
        root = Path(data["root"]).expanduser().absolute()
        if not root.is_dir():
            raise ConfigError(
                f"image folder {root} does not exist: set data.root=DIR, the folder above "
                "train/CLASS/*.jpg"
            )


def device_kind(accelerator: str) -> str:
    """The type of a run's device: ``cpu``, ``cuda`` or ``mps``."""
    import torch

    available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
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


def check_started_together(overrides: Sequence[str], *, several: bool) -> None:
    """Check that processes of ``torchrun`` or ``srun`` share one run and one folder.

    ``several`` is for a command that starts several runs: ``-m``, ``revzoo sweep``.
    """
    from revzoo.training.distributed import started_together

    count = started_together()
    if count == 1:
        return
    if several:
        raise ConfigError(
            f"torchrun or srun has started {count} processes, and each would start all runs: start "
            "several runs without torchrun and srun"
        )
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"torchrun or srun has started {count} processes, which need one folder: add "
            "hydra.run.dir=outputs/NAME, with a new name"
        )
