"""Plugins: user modules that register models, data sets, callbacks and optimisers.

``--import mymodels`` on the command line imports a module before the configuration is composed.
Installed packages name their plugins as entry points ``revzoo.plugins``. A plugin calls
``revzoo.register_model`` and so on. Configuration files and checkpoints cannot name a module: only
the command line or an installation can import code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from revzoo.cli.schema import CONFIGS, DIGITS, of_plugin
from revzoo.cli.terminal import ConfigError, one_line, status_of


def load_plugins(modules: Sequence[str], plugins: Iterable[EntryPoint]) -> None:
    """Import the entry points and ``modules``, and add their names to the configuration."""
    if modules and sys.path[0] != "" and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with python -m
    # a module that does not exist gets a quick answer
    if all(map(_exists, modules)):
        # before the plugins: they may print, and the status must be gone then
        with status_of("loading torch and Lightning"):
            import_module("revzoo.training.api")
    for plugin in plugins:
        _load(plugin.load, f"the plugin {plugin.name} ({plugin.value})")
    for module in modules:
        # `module=module`: a lambda would see the loop's last value
        _load(lambda module=module: import_module(module), f"--import {module}")
    add_config_nodes()


def _exists(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.modules or (bool(top) and find_spec(top) is not None)


def _load(load: Any, name: str) -> None:
    try:
        load()
    except Exception as error:  # a user's module can raise anything
        meant = name.removesuffix(".py").replace(" ./", " ").replace("/", ".")
        hint = f"; did you mean {meant}?" if name.endswith(".py") else ""
        reason = f"{type(error).__name__}: {one_line(error)}{hint}"
        raise ConfigError(f"{name} failed: {reason}") from error


def add_config_nodes() -> None:
    """Add options ``model=NAME``, ``data=NAME`` and ``optim=NAME`` to Hydra for registered names.

    Names with a configuration file keep it. The options of a data set are the keywords of its
    constructor with their defaults.
    """
    from hydra.core.config_store import ConfigStore

    from revzoo.data.registry import DATA
    from revzoo.models.registry import MODELS
    from revzoo.training.optim.optimizers import OPTIMIZERS, OptimSpec

    store = ConfigStore.instance()
    for name in MODELS:
        if not (CONFIGS / "model" / f"{name}.yaml").exists():
            store.store(group="model", name=name, node={"name": name, "pretrained": False})
    for name, kind in DATA.items():
        # our data sets have files; their keys in the table are import paths
        if not name.startswith("revzoo.data."):
            options = of_plugin(kind, DIGITS).options
            plain = {key: o.default for key, o in options.items() if _is_plain(o.default)}
            # as in our files; only the table turns the name into a class
            store.store(group="data", name=name, node={**plain, "_target_": name})
    defaults = OptimSpec()
    for name in OPTIMIZERS:
        # sgd has files with other names, by schedule
        if name != defaults.name and not (CONFIGS / "optim" / f"{name}.yaml").exists():
            store.store(group="optim", name=name, node={**defaults.plain(), "name": name})


def _is_plain(value: Any) -> bool:
    """Whether a file can hold the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)
