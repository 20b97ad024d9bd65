"""Composes a configuration with Hydra, from files and checked overrides.

NOTE [ Hydra's section ]
``hydra.*`` of a configuration holds import paths (callbacks, launcher, sweeper, log handlers),
environment variables and files to write. Hydra merges that section from every file it reads, so
``experiment=x`` in a downloaded folder can set them. Therefore:
1. Hydra only composes. No class of its section is instantiated before rule 3 holds; callbacks,
   launchers and sweepers never are (:mod:`revzoo.cli.commands.train`).
2. A primary file with ``hydra.searchpath`` is refused before Hydra composes: ``pkg://x`` imports x.
3. The composed section must equal the default of Hydra's package, except for :data:`FREE`, which
   are folders and switches, and :data:`SET_BY_HYDRA`.
4. ``--experimental-rerun`` reads a pickle and is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import Container, DictConfig, ListConfig, OmegaConf, flag_override
from omegaconf.errors import OmegaConfBaseException

from revzoo._files import file_name
from revzoo._libraries import LIBRARIES, check_library_name
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.config.overrides import (
    FREE,
    HYDRA_GROUPS,
    check_key,
    check_one_value,
    check_option,
    check_value_types,
    parse,
)
from revzoo.cli.config.signatures import fields, table_rows
from revzoo.cli.config.yaml_files import check_growth, check_references, check_resolvers

HYDRA_VERSION = "1.3"
CONFIGS = Path(str(files("revzoo.configs")))
SCHEDULE = "optim.schedule"
GLOBAL_GROUPS = ("experiment", "debug")  # their files set keys of all sections
SET_BY_HYDRA = (
    "hydra.runtime",
    "hydra.overrides",
    "hydra.job.override_dirname",
    "hydra.job.config_name",
    "hydra.job.num",
    "hydra.job.id",
)


@dataclass(frozen=True)
class ConfigFiles:
    """The files of a configuration.

    Attributes:
        name: the primary file, which lists the groups.
        folder: the folder of the primary file and its groups.
        extra: a further folder, searched after it (``--config-dir``).
    """

    name: str = "train"
    folder: Path = CONFIGS
    extra: Path | None = None


TRAIN = ConfigFiles()

OmegaConf.register_new_resolver("folder_name", lambda name: file_name(str(name)))


@contextmanager
def hydra_of(source: ConfigFiles) -> Iterator[Hydra]:
    """Initialise Hydra with this source, inside the context.

    Raises:
        ConfigError: a folder does not exist, or the primary file is refused.
    """
    for folder in (source.folder, source.extra):
        if folder is not None and not folder.is_dir():
            raise ConfigError(f"there is no folder {folder}: expected a folder of configurations")
    # otherwise Hydra warns, and behaves as version 1.1
    version.setbase(HYDRA_VERSION)
    search_path = create_config_search_path(f"file://{source.folder.resolve()}")
    if source.extra is not None:
        # as Hydra does for its --config-dir: after the primary folder
        search_path.prepend(
            provider="command-line",
            path=f"file://{source.extra.resolve()}",
            anchor=SearchPathQuery(provider="schema"),
        )
    GlobalHydra.instance().clear()  # Hydra refuses a second initialisation in a process
    try:
        # private in Hydra 1.3; the public initialize_config_dir() takes one folder only
        hydra = Hydra.create_main_hydra2("train", search_path)
        _check_loaded_files(hydra)
        _check_search_path(hydra, source)
        yield hydra
    finally:
        GlobalHydra.instance().clear()


def _check_loaded_files(hydra: Hydra) -> None:
    """Let Hydra check each file of a user's folder: it could fill the memory, or read secrets."""

    def load(place: ConfigSource, config_path: str) -> ConfigResult:
        path = Path(place.path, place._normalize_file_name(config_path)).resolve()
        check_growth(path)
        loaded = type(place).load_config(place, config_path)
        values = plain_of(loaded.config)
        check_resolvers(values, path)
        check_references(values)
        return loaded

    # private in Hydra 1.3; other files of the folder may be broken
    for place in hydra.config_loader.repository.get_sources():  # type: ignore[attr-defined]
        if place.scheme() == "file" and Path(place.path) != CONFIGS.resolve():
            place.load_config = partial(load, place)


def _check_search_path(hydra: Hydra, source: ConfigFiles) -> None:
    # see NOTE [ Hydra's section ], 2
    repository = hydra.config_loader.repository  # type: ignore[attr-defined]
    try:
        loaded = repository.load_config(source.name)
        paths = None if loaded is None else OmegaConf.select(loaded.config, "hydra.searchpath")
    except ConfigError:
        raise
    except Exception as error:  # the errors of the libraries have no common base class
        raise ConfigError(f"{source.name}: {one_line(error)}") from None
    if paths is not None:
        raise ConfigError(
            f"hydra.searchpath={paths} in {source.name}: a file cannot add places to read or "
            "import; use --config-dir DIR"
        )


def compose_checked(overrides: Sequence[str], source: ConfigFiles = TRAIN) -> DictConfig:
    """Compose a configuration with ``overrides`` after checking every key.

    Args:
        overrides: as on the command line, without sweeps.
        source: the files.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    return compose_whole(overrides, source)[0]


def compose_whole(
    overrides: Sequence[str], source: ConfigFiles = TRAIN, *, trusted: Sequence[str] = ()
) -> tuple[DictConfig, DictConfig]:
    """As :func:`compose_checked`, and the same with Hydra's section, which is checked too.

    Args:
        overrides: as on the command line, without sweeps.
        source: the files.
        trusted: overrides that the program adds; they are not checked.
    """
    overrides = with_schedule(with_libraries(overrides))
    with hydra_of(source) as hydra:
        parsed, base = _check_overrides(overrides, source, hydra.config_loader)
        groups = hydra.config_loader.list_groups("")
        for override in parsed:
            check_one_value(override, groups)
        whole = _composed(source.name, [*overrides, *trusted])
    check_references(plain_of(whole))  # those of one file may lead to those of another
    _check_hydra_section(whole)
    _drop_options_of_other_schedules(whole, parsed)
    cfg = whole.copy()
    # Hydra locks the configuration: no key can be added or removed
    with flag_override(cfg, ["struct", "readonly"], [False, False]):
        del cfg["hydra"]
    check_value_types(cfg, base)
    return cfg, whole


def with_libraries(overrides: Sequence[str]) -> list[str]:
    """The overrides as Hydra takes them: ``model=torchvision model.name=torchvision:resnet50``.

    Raises:
        ValueError: the library is not installed, or has no such network.
    """
    expanded = []
    for override in overrides:
        # no comma: a list of models is a multirun
        library = re.match(r"model=(\w+):[^,]+$", override)
        named = override.replace("model=", "model.name=", 1)
        if library is not None and library[1] in LIBRARIES:
            check_library_name(override.removeprefix("model="))
        expanded += [override] if library is None else [f"model={library[1]}", named]
    return expanded


def with_schedule(overrides: Sequence[str]) -> list[str]:
    """The overrides, with ``++`` before the options of a schedule that one of them names.

    The default's schedule may lack them: ``optim.schedule.name=step optim.schedule.gamma=0.2``.
    """
    named = [o.partition("=")[2] for o in overrides if o.startswith(f"{SCHEDULE}.name=")]
    keys = {f"{SCHEDULE}.{key}" for name in named for key in _schedule_options(name) or ()}
    return [f"++{o}" if o.partition("=")[0] in keys else o for o in overrides]


def _schedule_options(name: str) -> list[str] | None:
    """The options of a schedule; None for an unknown name."""
    module = "revzoo.training.optim.schedules"
    row = table_rows(module, "SCHEDULES").get(name)
    return None if row is None else [key for key in fields(module, row) if key != "name"]


def _drop_options_of_other_schedules(cfg: DictConfig, overrides: Sequence[Override]) -> None:
    """If an override names the schedule, drop the options of files that this one does not have.

    Options on the command line stay, and are refused later.
    """
    typed: dict[str, Any] = {}
    for override in overrides:
        key, value = override.key_or_group, override.value()
        if key == SCHEDULE and isinstance(value, dict):
            typed |= {str(name): item for name, item in value.items()}
        elif key.startswith(f"{SCHEDULE}."):
            typed[key.removeprefix(f"{SCHEDULE}.")] = value
    options, schedule = _schedule_options(str(typed.get("name"))), OmegaConf.select(cfg, SCHEDULE)
    if options is None or not isinstance(schedule, DictConfig):
        return
    with flag_override(schedule, ["struct", "readonly"], [False, False]):
        for name in [n for n in schedule if n not in ("name", *options, *typed)]:
            del schedule[name]


@cache  # the jobs of a sweep ask again; each takes 0.2 s
def _packaged_base(name: str, chosen: tuple[str, ...]) -> DictConfig:
    """The packaged defaults of the chosen options. Callers must not change them."""
    return _composed(name, chosen, with_hydra=False)


def _composed(name: str | None, overrides: Sequence[str], *, with_hydra: bool = True) -> DictConfig:
    try:
        return compose(name, list(overrides), return_hydra_config=with_hydra)
    except ConfigError:  # from check_growth
        raise
    except (HydraException, OmegaConfBaseException) as error:
        # +experiment=NAME, which is right where the primary file does not list the group
        if double := re.match(r"Multiple values for ([\w/]+)\.", str(error)):
            group = double[1]
            raise ConfigError(f"{group} has two values: write {group}=NAME without +") from None
        raise ConfigError(one_line(error)) from None
    except Exception as error:  # Hydra does not validate files, so any error can occur
        raise ConfigError(f"{name}: {type(error).__name__}: {one_line(error)}") from None


def _check_hydra_section(cfg: DictConfig) -> None:
    """Check rule 3 of NOTE [ Hydra's section ].

    Raises:
        ConfigError: naming the key.
    """
    choices = cfg.hydra.runtime.choices
    packaged = _packaged_section(tuple(f"{group}={choices.get(group)}" for group in HYDRA_GROUPS))
    composed = plain_of(cfg.hydra)
    for key, value in _differing(packaged, composed, "hydra"):
        if key in FREE or key.startswith(("hydra.help.", "hydra.hydra_help.")):
            continue
        # the trailing dots keep hydra.job.numbers apart from hydra.job.num
        if any(f"{key}.".startswith(f"{name}.") for name in SET_BY_HYDRA):
            continue
        raise ConfigError(
            f"{key}={value!r:.80} is set by a configuration file: files may set only these keys of "
            f"Hydra: {', '.join(FREE)}"
        )
    name, folder, verbose = cfg.hydra.job.name, cfg.hydra.output_subdir, cfg.hydra.verbose
    # FREE keys may have any value, so check the dangerous ones here
    if not isinstance(verbose, bool | str | ListConfig):
        raise ConfigError(f"hydra.verbose={verbose}: expected true, false, or names of loggers")
    name = str(name)
    # it becomes a file name
    if not re.fullmatch(r"[\w.-]+", name) or name.startswith("."):
        raise ConfigError(f"hydra.job.name={name}: expected letters, digits, '_', '-' and '.'")
    if folder not in (".hydra", None):
        raise ConfigError(f"hydra.output_subdir={folder}: expected .hydra or null")


@cache  # the jobs of a sweep ask again
def _packaged_section(chosen: tuple[str, ...]) -> Any:
    """Hydra's own configuration, without a user's overrides, with the same log handlers."""
    with hydra_of(TRAIN):
        return plain_of(_composed(None, chosen).hydra)


def _differing(expected: Any, got: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Yield each dotted key at which two plain values differ, and the value of ``got``."""
    if isinstance(expected, dict) and isinstance(got, dict):
        # in the order of the files, each name once
        for name in {**expected, **got}:
            yield from _differing(expected.get(name), got.get(name), f"{key}.{name}")
    elif expected != got:
        yield key, got


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, with references resolved.

    Missing values stay ``"???"``; the checks report them.

    Raises:
        ConfigError: a reference names a missing key.
    """
    try:
        plain = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(one_line(error)) from None
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def plain_of(cfg: Container) -> Any:
    """The configuration as plain containers, with references as they are written."""
    return OmegaConf.to_container(cfg, resolve=False)


def check_multirun(overrides: Sequence[str], source: ConfigFiles = TRAIN) -> list[Override]:
    """Check the keys and options of several runs (``-m``), but not their combinations.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    with hydra_of(source) as hydra:
        return _check_overrides(with_schedule(overrides), source, hydra.config_loader)[0]


def _check_overrides(
    overrides: Sequence[str], source: ConfigFiles, loader: ConfigLoader
) -> tuple[list[Override], DictConfig]:
    """Check all names; return the overrides, and the configuration with only the options chosen."""
    parsed = parse(overrides, loader)
    # hydra/job_logging and so on are compared by value later
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    ours = [override for override in parsed if not override.is_hydra_override()]
    choices = [override for override in ours if override.key_or_group in groups]
    for override in choices:
        check_option(override, loader)
        _check_package(override, source)
    # without the values of keys: types are compared with the defaults
    chosen = tuple(str(o.input_line) for o in choices if not o.is_sweep_override())
    if source.folder == CONFIGS and source.extra is None:
        base = _packaged_base(source.name, chosen)
    else:  # a user may edit these files between two jobs
        base = _composed(source.name, chosen, with_hydra=False)
    for override in ours:
        if override not in choices:
            check_key(override, base, groups, CONFIGS)
    return parsed, base


def _check_package(override: Override, source: ConfigFiles) -> None:
    """Check that a user's experiment sets the keys of the whole configuration.

    Without the line, Hydra puts them below ``experiment``, and does not name the cause.
    """
    group = override.key_or_group
    if group not in GLOBAL_GROUPS or override.is_sweep_override():
        return
    for folder in (source.extra, source.folder):
        path = None if folder is None else folder / group / f"{override.value()}.yaml"
        if path is not None and path.is_file():
            check_growth(path)
            if not re.search(r"^#\s*@package\s+_global_\s*$", path.read_text(), re.MULTILINE):
                raise ConfigError(f"{path} needs the first line '# @package _global_'")
            return
