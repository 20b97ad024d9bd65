"""A search space from the command line, in Hydra's grammar for sweeps, as optuna's distributions.

=====================================  =========================================================
``optim=onecycle,muon``                one of these; the same as ``choice(onecycle, muon)``
``optim.lr=interval(0.01, 1)``         a number from 0.01 to 1
``optim.lr=tag(log,interval(0.01,1))`` the same, evenly by orders of magnitude
``seed=int(interval(0, 9))``           an integer from 0 to 9
``trainer.max_epochs=range(5,30,5)``   5, 10, 15, 20 or 25, as Python's range
=====================================  =========================================================

All other overrides apply to every trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep

from revzoo._checks import package_needed
from revzoo.cli.config import TRAIN, ConfigFiles, compose, parse
from revzoo.cli.terminal import ConfigError, status_of


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


def split_space(overrides: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The overrides of every trial, and a distribution for each key to search.

    Raises:
        ConfigError: a range is empty or impossible, or optuna is not installed.
    """
    parsed = parse(overrides)
    fixed = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    space: dict[str, Any] = {}
    for override in parsed:
        if override.is_sweep_override():
            # with + if it adds a key
            key = str(override.input_line).partition("=")[0]
            try:
                space[key] = _distribution(override)
            except ValueError as error:
                raise ConfigError(f"{override.input_line}: {error}") from error
    return fixed, space


def _distribution(override: Override) -> Any:
    distributions, sweep = load_optuna().distributions, override.value()
    tags: set[str] = getattr(sweep, "tags", set())
    if tags - {"log"}:
        raise ValueError("the only tag is log, as in tag(log, ...)")
    options: dict[str, Any] = {"log": True} if tags else {}
    if isinstance(sweep, ChoiceSweep) and not tags:
        # text: the values go into a command line again
        return distributions.CategoricalDistribution(tuple(override.sweep_string_iterator()))
    if isinstance(sweep, RangeSweep) and not tags:
        # `parse` has limited their number; a falling range has the same numbers
        values = sorted(sweep.range())
        if len(values) < 2:
            raise ValueError("expected two numbers or more")
        low, high, options = values[0], values[-1], {"step": values[1] - values[0]}
    elif isinstance(sweep, IntervalSweep):
        low, high = sweep.start, sweep.end
    else:  # Hydra expands a glob with the names of a group's files, which may change
        raise ValueError("expected choice(a, b), range, interval or tag(log, interval(a, b))")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = distributions.IntDistribution if whole else distributions.FloatDistribution
    return kind(low, high, **options)


def check_space(
    fixed: Sequence[str], space: Mapping[str, Any], source: ConfigFiles = TRAIN
) -> None:
    """Check a configuration for each choice and each end of a range, one key at a time.

    Raises:
        ValueError: no trial could run; names the key or the value.
    """
    composed = [compose([*fixed, *trial], source).config for trial in _samples(space)]
    # import torch after checking the keys
    with status_of("loading torch and Lightning"):
        from revzoo.cli.run.build import check_parts
        from revzoo.cli.run.machine import check_machine

    for config in composed:
        check_machine(config)
        check_parts(config)
        if (config.get("tuner") or {}).get("then") == "stop":
            raise ConfigError(
                "tuner.then=stop does not train, so there is no figure to compare: remove the "
                "tuner, or give tuner.then=use"
            )


def _samples(space: Mapping[str, Any]) -> Iterator[list[str]]:
    # one key at a time: all combinations would be too many
    values = {key: getattr(d, "choices", None) or (d.low, d.high) for key, d in space.items()}
    first = {key: outermost[0] for key, outermost in values.items()}
    for key, outermost in values.items():
        for value in outermost:
            yield [f"{name}={v}" for name, v in {**first, key: value}.items()]
