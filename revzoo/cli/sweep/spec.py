"""The options of a sweep: read from the command line, recorded as ``sweep.yaml`` in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from revzoo._checks import check_choice, check_count, nearest, package_needed
from revzoo.cli.config.config import ConfigFiles, parse
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.config.yaml_files import CONFIG_FILE, read_yaml, write_yaml
from revzoo.cli.sweep.space import Parameter, split_space

SPEC_FILE = "sweep.yaml"
DIRECTIONS = ("maximize", "minimize")
OPTIONS = ("trials", "metric", "direction", "sampler_seed", "prune")
RECORDED = (*OPTIONS, "config_dir")


def load_optuna() -> Any:
    """The package optuna.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        optuna = import_module("optuna")
    except ImportError:
        raise ConfigError(package_needed("revzoo sweep needs", "optuna")) from None
    # it logs each trial at INFO, as we do
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass
class SweepSpec:
    """A search; ``revzoo sweep --help`` describes the options.

    Raises:
        ConfigError: an option is out of range.
    """

    arguments: list[str]
    trials: int = 20
    metric: str = "val/acc"
    direction: str = ""
    sampler_seed: int = 0
    prune: bool = False
    config_dir: str | None = None
    fixed: list[str] = field(init=False)
    space: list[Parameter] = field(init=False)

    def __post_init__(self) -> None:
        self.fixed, self.space = split_space(self.arguments)
        if not self.direction:
            self.direction = "minimize" if self.metric.endswith("loss") else "maximize"
        check_count("trials", self.trials)
        check_count("sampler_seed", self.sampler_seed, least=0)
        check_choice("direction", self.direction, DIRECTIONS)
        if not isinstance(self.prune, bool):
            raise ConfigError(f"prune={self.prune}: expected true or false")
        if self.metric.startswith("test/"):
            raise ConfigError(
                f"metric={self.metric}: a model chosen on the test split cannot be evaluated on "
                "it; use a figure of the validation, such as val/acc"
            )
        if not self.space:
            raise ConfigError(
                "the sweep has no range: add one, such as optim.lr='tag(log,interval(0.01,1))'"
            )

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """The overrides of a run with these values of the parameters."""
        return [*self.fixed, *(f"{p.key}={values[p.key]}" for p in self.space)]

    def plain(self) -> dict[str, Any]:
        """The values for ``sweep.yaml``."""
        return {"overrides": self.arguments} | {name: getattr(self, name) for name in RECORDED}

    @property
    def source(self) -> ConfigFiles:
        """The files of the trials' configurations."""
        return ConfigFiles(extra=None if self.config_dir is None else Path(self.config_dir))

    @property
    def config_arguments(self) -> list[str]:
        """``--config-dir`` for the command of a trial."""
        return [] if self.config_dir is None else ["--config-dir", self.config_dir]

    def write(self, folder: Path) -> None:
        """Record the options in the sweep's folder."""
        write_yaml(self.plain(), folder / SPEC_FILE)


def read_spec(
    words: Sequence[str], *, default: Path, config_dir: Path | None = None
) -> tuple[Path, SweepSpec]:
    """The folder and options of a sweep. In an existing folder, only ``trials`` may change.

    Args:
        words: the command line without the program's name.
        default: the folder, if the command line names none.
        config_dir: a further folder of configurations; None for none, or the recorded one.

    Raises:
        ConfigError: an option is out of range, or the folder has another sweep or a run.
    """
    names = ("dir", *OPTIONS)
    options: dict[str, Any] = {}
    arguments: list[str] = []
    for override in parse(words):
        if override.key_or_group in names and not override.is_sweep_override():
            # parsed by Hydra: trials=5 is an int, prune=true a bool
            value = override.value()
            # dir=2026 would be a number
            is_text = override.key_or_group in ("dir", "metric", "direction")
            options[override.key_or_group] = str(value) if is_text else value
        elif meant := nearest(override.key_or_group, names, cutoff=0.75):
            # closer than elsewhere: the other words are keys of revzoo train
            raise ConfigError(
                f"{override.input_line}: there is no key {override.key_or_group!r}; "
                f"did you mean {meant[0]!r}?"
            )
        else:
            arguments.append(str(override.input_line))
    if config_dir is not None:
        # the sweep may continue in another working directory
        options["config_dir"] = str(config_dir.absolute())
    folder = Path(options.pop("dir", default))
    path = folder / SPEC_FILE
    if not path.exists():
        if (folder / CONFIG_FILE).exists():
            raise ConfigError(f"{folder} holds a run: choose another folder for the sweep, dir=DIR")
        return folder, SweepSpec(arguments, **options)
    recorded = _recorded(path)
    wanted = {**recorded, "overrides": arguments or recorded["overrides"], **options}
    # the results so far would not be comparable
    for name, value in wanted.items():
        if name != "trials" and value != recorded.get(name):
            raise ConfigError(
                f"{folder} is a sweep with {name}={recorded.get(name)}, got {value}: only trials "
                "may change; use another dir for another search"
            )
    return folder, SweepSpec(wanted.pop("overrides"), **wanted)


def _recorded(path: Path) -> dict[str, Any]:
    """The options of a sweep's folder, and its overrides.

    Raises:
        ConfigError: the file is damaged.
    """
    plain = read_yaml(path)
    overrides = plain.get("overrides")
    is_list = isinstance(overrides, list) and all(isinstance(o, str) for o in overrides)
    is_path = isinstance(plain.get("config_dir"), str | None)
    # someone may have edited it
    if not (is_list and is_path) or not set(plain) <= {"overrides", *RECORDED}:
        raise ConfigError(f"{path} is damaged: restore it from a copy")
    return plain
