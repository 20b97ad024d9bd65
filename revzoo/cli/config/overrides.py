"""Checks a command line against the configuration before Hydra runs anything.

Hydra refuses an unknown key too, but names neither the key that was meant nor stops before a run's
folder exists. Here the overrides are parsed by Hydra's own parser and compared with the composed
configuration: the group's options for ``model=revnet39``, the keys for ``optim.lrr=1``, the type
of the value that was there for ``trainer.max_epochs=many``.

Known limit: a key added with ``+`` is only held to an existing section; its name is checked where
the section is built.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from numbers import Real
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from revzoo._checks import nearest

CONFIG_MODULE = "revzoo.configs"
CONFIG_NAME = "train"
HYDRA_VERSION = "1.3"
# a number in one option of a group, a word in another
WORD_OR_NUMBER = ("trainer.devices",)
# of Hydra's own keys, those that name no code: its callbacks and log handlers are import paths
HYDRA_KEYS = (
    "hydra.run.dir",
    "hydra.sweep.dir",
    "hydra.sweep.subdir",
    "hydra.job.name",
    "hydra.job.chdir",
    "hydra.output_subdir",
    "hydra.mode",
    "hydra.verbose",
)
HYDRA_GROUPS = ("hydra/launcher", "hydra/job_logging", "hydra/hydra_logging")


class ConfigError(ValueError):
    """A command line or configuration that cannot be run; the message says what to change."""


def compose_checked(
    overrides: Sequence[str], *, config_dir: Path | None = None, name: str = CONFIG_NAME
) -> DictConfig:
    """The configuration of training (or the one named) with ``overrides``, every key checked.

    Args:
        overrides: as on the command line, without sweeps.
        config_dir: folder of the configurations; None for the installed ``revzoo.configs``.
        name: of the file that says which groups there are.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    with _initialized(config_dir):
        return _compose(overrides, _check(overrides, name), name)


def to_plain(cfg: DictConfig) -> dict[str, Any]:
    """The configuration as plain containers, every reference resolved.

    Missing values stay ``"???"`` for the checks to name.
    """
    plain = OmegaConf.to_container(cfg, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


def check_sweep(overrides: Sequence[str], *, config_dir: Path | None = None) -> None:
    """Check the keys and options of a sweep (``--multirun``), not the combinations it makes.

    Raises:
        ConfigError: naming the nearest valid key or option.
    """
    with _initialized(config_dir):
        _check(overrides, CONFIG_NAME)


def _initialized(config_dir: Path | None) -> AbstractContextManager[Any]:
    if config_dir is None:
        return initialize_config_module(CONFIG_MODULE, version_base=HYDRA_VERSION)
    return initialize_config_dir(str(config_dir.resolve()), version_base=HYDRA_VERSION)


def _check(overrides: Sequence[str], name: str) -> DictConfig:
    """Check names; return the configuration that the choice of options alone gives."""
    loader = GlobalHydra.instance().config_loader()
    parsed = check_hydra(overrides, loader)
    groups = [group for group in loader.list_groups("") if group != "hydra"]
    parsed = [override for override in parsed if not override.is_hydra_override()]
    choices = [override for override in parsed if override.key_or_group in groups]
    for override in choices:
        _check_choice(override, loader)
    plain = [str(o.input_line) for o in choices if not o.is_sweep_override()]
    try:
        base = compose(name, plain)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    for override in parsed:
        if override not in choices:
            _check_key(override, base, groups)
    return base


def check_hydra(overrides: Sequence[str], loader: ConfigLoader | None = None) -> list[Override]:
    """The parsed overrides; of those of Hydra itself only such as name no code to import.

    Raises:
        ConfigError: for any other key of Hydra, or an override that is none.
    """
    try:
        parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    except OverrideParseException as error:
        what = str(error).splitlines()[0]
        quotes = "; put quotes around a value with signs in it: KEY='\"a=b\"'"
        unquoted = str(error.override).count("=") > 1 and '"' not in str(error.override)
        raise ConfigError(f"{error.override}: {what}" + quotes * unquoted) from None
    for override in parsed:
        key, known = override.key_or_group, [*HYDRA_KEYS, *HYDRA_GROUPS]
        places = [re.split("[./]", place)[0] for place in (key, override.package or "")]
        if "hydra" in places and (key not in known or override.package):
            raise ConfigError(
                f"{override.input_line}: of Hydra's own keys there are {', '.join(known)} here"
                + _meant(key, known)
            )
    return parsed


def _check_choice(override: Override, loader: ConfigLoader) -> None:
    """Refuse an option that its group does not have."""
    options = loader.get_group_options(override.key_or_group)
    if override.is_sweep_override():
        chosen: Iterable[Any] = override.sweep_string_iterator()
    else:
        chosen = [override.value()]
    for option in chosen:
        if option is not None and str(option) not in options:
            raise ConfigError(
                f"{override.key_or_group}={option}: no such option (there is {', '.join(options)})"
                + _meant(str(option), options)
            )


def _check_key(override: Override, base: DictConfig, groups: Sequence[str]) -> None:
    """Refuse a key that the configuration does not have."""
    key = override.key_or_group
    known = list(_keys(base))
    section, dot, _ = key.partition(".")
    is_new = override.is_add() or override.is_force_add()
    if key in known or (is_new and dot and section in known):
        return
    raise ConfigError(
        f"{override.input_line}: there is no key {key!r}"
        + (_meant_in_section(key, base) or _meant(key, [*groups, *known]))
    )


def _compose(overrides: Sequence[str], base: DictConfig, name: str) -> DictConfig:
    try:
        cfg = compose(name, list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_one_line(error)) from None
    for key in _keys(base):
        _check_type(key, OmegaConf.select(base, key), OmegaConf.select(cfg, key))
    return cfg


def _check_type(key: str, before: Any, after: Any) -> None:
    """Refuse a word where there was a number, a number where there was a truth value."""
    if after is None or before == after or key in WORD_OR_NUMBER:
        return
    if isinstance(before, bool):
        expected, fits = "true or false", isinstance(after, bool)
    elif isinstance(before, int):
        expected = "a whole number"
        fits = isinstance(after, int) and not isinstance(after, bool)
    elif isinstance(before, float):
        expected, fits = "a number", isinstance(after, Real) and not isinstance(after, bool)
    else:
        return
    if not fits:
        raise ConfigError(f"{key}={after}: expected {expected}, such as {before}")


def _keys(node: Any, prefix: str = "") -> Iterable[str]:
    """All dotted keys below ``node``, sections included."""
    if not isinstance(node, DictConfig):
        return
    for key in map(str, node):
        name = f"{prefix}{key}"
        yield name
        if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
            yield from _keys(node[key], f"{name}.")


def _meant_in_section(key: str, base: DictConfig) -> str:
    """For a key of a section that is there: its nearest one, or all and how to add another."""
    section, _, leaf = key.rpartition(".")
    there = OmegaConf.select(base, section) if section else None
    if not isinstance(there, DictConfig):
        return ""
    values = [name for name in _keys(base) if not OmegaConf.is_dict(OmegaConf.select(base, name))]
    near = nearest(leaf, own := list(map(str, there)), cutoff=0.6)
    places = [f"{section}.{near[0]}"] if near else [v for v in values if v.endswith(f".{leaf}")]
    if places:
        return f"; did you mean {places[0]!r}?"
    return f" (there is {', '.join(own)}); +{key}=VALUE adds one that the section knows"


def _meant(key: str, known: Sequence[str]) -> str:
    """The nearest known key; a last part alone (``lr``) finds its place (``optim.lr``)."""
    same_leaf = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2]]
    near = same_leaf[:1] or nearest(key, known, cutoff=0.6)
    if not near:
        leaves = {name.rpartition(".")[2]: name for name in known}
        near = [leaves[leaf] for leaf in nearest(key, leaves, cutoff=0.6)]
    return f"; did you mean {near[0]!r}?" if near else ""


def _one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2])
