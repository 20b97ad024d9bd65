"""A search space from the command line, in Hydra's grammar for sweeps.

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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    RangeSweep,
    Sweep,
)

from revzoo.cli.config.config import TRAIN, ConfigFiles, compose, parse
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.status import status_of


@dataclass(frozen=True)
class Parameter:
    """One dimension of a space: choices, or numbers from ``low`` to ``high``, both included.

    Attributes:
        key: as on the command line, with ``+`` if it adds a key.
        choices: the values as text; empty for a range of numbers.
        low: the smallest number; an int if all numbers are ints.
        high: the largest number.
        step: distance of neighbouring numbers; None for a continuous range.
        log: sample the logarithm uniformly.
    """

    key: str
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    step: float | None = None
    log: bool = False

    @property
    def outermost(self) -> tuple[str | float, ...]:
        """All choices, or the two ends of the range."""
        return self.choices or (self.low, self.high)


def split_space(overrides: Sequence[str]) -> tuple[list[str], list[Parameter]]:
    """The overrides of every trial, and the parameters to search.

    Raises:
        ConfigError: a range is empty or impossible.
    """
    fixed, space = [], []
    for override in parse(overrides):
        if override.is_sweep_override():
            space.append(_parameter(override))
        else:
            fixed.append(str(override.input_line))
    return fixed, space


def _parameter(override: Override) -> Parameter:
    key = str(override.input_line).partition("=")[0]
    sweep = override.value()
    # Hydra expands a glob with the names of a group's files, which may change
    if isinstance(sweep, Glob):
        raise ConfigError(f"{override.input_line}: name the options, such as choice(a, b)")
    assert isinstance(sweep, Sweep)
    if sweep.tags - {"log"}:
        raise ConfigError(f"{override.input_line}: the only tag is log, as in tag(log, ...)")
    log = "log" in sweep.tags
    if isinstance(sweep, ChoiceSweep):
        if log:
            raise ConfigError(f"{override.input_line}: tag(log, ...) goes with interval and range")
        # text: the values go into a command line again
        return Parameter(key, choices=tuple(override.sweep_string_iterator()))
    if isinstance(sweep, IntervalSweep):
        assert sweep.start is not None
        assert sweep.end is not None
        parameter = Parameter(key, low=sweep.start, high=sweep.end, log=log)
    else:
        parameter = _stepped(key, sweep, log=log)
    if not parameter.low < parameter.high or (log and parameter.low <= 0):
        zero = "0 < " if log else ""
        raise ConfigError(f"{override.input_line}: expected {zero}first number < last number")
    return parameter


def _stepped(key: str, sweep: RangeSweep, *, log: bool) -> Parameter:
    if log:
        raise ConfigError(f"{key}: a range has steps: use tag(log, int(interval(1, 64)))")
    # `parse` has limited the number of values
    count = len(list(sweep.range()))
    assert sweep.start is not None
    last = sweep.start + sweep.step * max(0, count - 1)
    # a falling range searches the same numbers
    low, high = sorted((sweep.start, last))
    return Parameter(key, low=low, high=high, step=abs(sweep.step))


def check_space(
    fixed: Sequence[str], space: Sequence[Parameter], source: ConfigFiles = TRAIN
) -> None:
    """Check a configuration for each choice and each end of a range, one parameter at a time.

    Raises:
        ValueError: no trial could run; names the key or the value.
    """
    # one parameter at a time: all combinations would be too many
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


def _samples(space: Sequence[Parameter]) -> Iterator[list[str]]:
    first = [f"{p.key}={p.outermost[0]}" for p in space]
    yield first
    for index, parameter in enumerate(space):
        for value in parameter.outermost[1:]:
            yield [*first[:index], f"{parameter.key}={value}", *first[index + 1 :]]
