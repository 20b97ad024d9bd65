"""What a sweep searches for: read from the command line, kept as ``sweep.yaml`` in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from revzoo._checks import nearest
from revzoo.cli.config.overrides import ConfigError
from revzoo.cli.run.folder import write_yaml
from revzoo.cli.sweep.space import Parameter, parse, split_space

PLAN_FILE = "sweep.yaml"
DIRECTIONS = ("maximize", "minimize")


@dataclass(frozen=True)
class Plan:
    """A search; see ``revzoo-sweep --help`` for the options.

    Raises:
        ConfigError: for an option out of range.
    """

    given: list[str]
    trials: int = 20
    metric: str = "val/acc"
    direction: str = ""
    sampler_seed: int = 0
    prune: bool = False
    fixed: list[str] = field(init=False)
    space: list[Parameter] = field(init=False)

    def __post_init__(self) -> None:
        fixed, space = split_space(self.given)
        object.__setattr__(self, "fixed", fixed)
        object.__setattr__(self, "space", space)
        if not self.direction:
            direction = "minimize" if self.metric.endswith("loss") else "maximize"
            object.__setattr__(self, "direction", direction)
        for key in ("trials", "sampler_seed"):
            value, least = getattr(self, key), int(key == "trials")
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{key}={value}: expected a whole number >= {least}")
        if self.direction not in DIRECTIONS:
            raise ConfigError(f"direction={self.direction}: expected {' or '.join(DIRECTIONS)}")
        if not isinstance(self.prune, bool):
            raise ConfigError(f"prune={self.prune}: expected true or false")
        if self.metric.startswith("test/"):
            raise ConfigError(
                f"metric={self.metric}: what is chosen by the test split cannot be measured by "
                "it any more; use a figure of the validation, such as val/acc"
            )
        if not space:
            raise ConfigError(
                "nothing to search: give a range, such as optim.lr='tag(log,interval(0.01,1))'"
            )

    def overrides(self, values: Mapping[str, Any]) -> list[str]:
        """The overrides of a run with these values of the parameters."""
        return [*self.fixed, *(f"{p.key}={values[p.key]}" for p in self.space)]

    def plain(self) -> dict[str, Any]:
        """What is recorded."""
        names = ("trials", "metric", "direction", "sampler_seed", "prune")
        return {"overrides": self.given} | {name: getattr(self, name) for name in names}

    def write(self, folder: Path) -> None:
        """Record the plan in the sweep's folder."""
        write_yaml(self.plain(), folder / PLAN_FILE)


def read_plan(arguments: Sequence[str], *, default: Path) -> tuple[Path, Plan]:
    """The sweep's folder and what is searched for; of a folder that has one, only more trials.

    Args:
        arguments: the command line without the program's name.
        default: the folder, if the command line names none.

    Raises:
        ConfigError: for an option out of range, or another search in the folder.
    """
    names = ("dir", "trials", "metric", "direction", "sampler_seed", "prune")
    options: dict[str, Any] = {}
    given: list[str] = []
    for override in parse(arguments):
        if override.key_or_group in names and not override.is_sweep_override():
            value = override.value()
            is_text = override.key_or_group in ("dir", "metric", "direction")
            options[override.key_or_group] = str(value) if is_text else value
        elif meant := nearest(override.key_or_group, names, cutoff=0.75):
            raise ConfigError(
                f"{override.input_line}: there is no key {override.key_or_group!r}; "
                f"did you mean {meant[0]!r}?"
            )
        else:
            given.append(str(override.input_line))
    folder = Path(options.pop("dir", default))
    path = folder / PLAN_FILE
    if not path.exists():
        return folder, Plan(given, **options)
    recorded: dict[str, Any] = OmegaConf.to_container(OmegaConf.load(path))  # type: ignore[assignment]
    before = {**recorded, "overrides": given or recorded["overrides"], **options}
    for name, value in before.items():
        if name != "trials" and value != recorded.get(name):
            raise ConfigError(
                f"{folder} is a sweep with {name}={recorded.get(name)}, not {value}: only trials "
                "may change; give another dir for another search"
            )
    return folder, Plan(before.pop("overrides"), **before)
