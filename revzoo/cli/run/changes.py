"""What may change when a run is resumed or evaluated, and where its data are now.

This imports neither torch nor Lightning, so a refused change gets a quick answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import QuotedString

from revzoo.cli.config.config import parse, quoted_if_needed
from revzoo.cli.config.errors import ConfigError
from revzoo.cli.invocation import command_line, short_path
from revzoo.cli.plugins import recorded_words
from revzoo.weights.source import CHECKPOINTS, LAST

# settings of the machine, which leave the run as it is, up to rounding
ROOT = "data.root"
ACCELERATOR = "trainer.accelerator"


def take_root(overrides: Sequence[str]) -> tuple[list[str], str | None]:
    """Take ``data.root=DIR`` out of overrides: the folder to which the data of a run have moved.

    Raises:
        ConfigError: the value is not a path.
    """
    others = [override for override in overrides if not override.startswith(f"{ROOT}=")]
    root: str | None = None
    for override in parse([override for override in overrides if override not in others]):
        value: Any = override.value()
        root = value.text if isinstance(value, QuotedString) else value
        if not isinstance(root, str) or not root or "${" in root:
            raise ConfigError(f"{override.input_line}: expected the path of a folder")
    return others, root


def moved(data: Mapping[str, Any], root: str | None) -> dict[str, Any]:
    """The section ``data`` with another root, an absolute path; None: with the same.

    Raises:
        ConfigError: such data have no root.
    """
    if root is None:
        return dict(data)
    if "root" not in data:
        raise ConfigError(f"{ROOT}={root}: the data of this run have no folder; leave it out")
    # a user's data set may read from an address
    path = root if "://" in root else str(Path(root).expanduser().absolute())
    return {**data, "root": path}


def check_changes(overrides: Sequence[str], run_dir: Path) -> None:
    """Refuse overrides that would change the results of a resumed run.

    Raises:
        ConfigError: naming the override, and the command of a new run with it.
    """
    changeable = ("memory", "memory.bytes", "precision", ROOT, ACCELERATOR)
    for override in overrides:
        if override.partition("=")[0] not in changeable:
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration; only memory=MODE may change, "
                "with memory.bytes=BUDGET for memory=budget, precision=NAME with "
                "--allow-precision-change, data.root=DIR, where the data are now, and "
                "trainer.accelerator=cpu, gpu or auto, where it runs now. Start a new run for the "
                "rest (with its --config-dir, if it had one): "
                f"{new_run_command(overrides, run_dir)}"
            )


def new_run_command(overrides: Sequence[str], run_dir: Path) -> str:
    """The command of a run with other overrides that starts from a run's last weights, if any."""
    new, weights = list(overrides), run_dir / CHECKPOINTS / LAST
    names = {_name_of(override) for override in new}  # replaced
    if weights.exists():
        new.append(f"+model.checkpoint_path={quoted_if_needed(short_path(weights))}")
        names |= {"model.checkpoint_path", "model.pretrained"}
    first: list[str] = []
    with suppress(ConfigError):  # a damaged record
        first = recorded_words(run_dir, "overrides")
    kept = [o for o in first if _name_of(o) not in names]
    return command_line("train", *kept, *new)


def _name_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")
