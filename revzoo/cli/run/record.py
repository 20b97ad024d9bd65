"""What a run has recorded in its folder, and what may change when it is resumed or evaluated.

This imports neither torch nor Lightning, so a refused change gets a quick answer.
"""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import QuotedString
from omegaconf import OmegaConf

from revzoo._files import check_regular, write_atomically
from revzoo.cli.config import parse, quoted_if_needed, read_yaml
from revzoo.cli.invocation import command_line, short_path
from revzoo.cli.plugins import imported
from revzoo.cli.terminal import ConfigError, one_line
from revzoo.weights.source import CHECKPOINTS, LAST

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SESSIONS_FILE = "sessions.jsonl"  # each line records the imports and overrides of a session
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


def run_of(checkpoint: str | Path) -> Path:
    """The folder of a checkpoint's run, if it is in one: ``RUN_DIR/checkpoints/best.ckpt``."""
    return Path(checkpoint).absolute().parent.parent


def write_yaml(values: Mapping[str, Any], path: Path) -> None:
    """Write plain containers as YAML, atomically."""
    write_atomically(path, OmegaConf.to_yaml(OmegaConf.create(dict(values))).encode())


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """Read ``config.yaml``.

    Raises:
        ConfigError: there is no such file, or it is not a YAML mapping.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        for folder in run_dir.parents[:2]:  # of RUN_DIR/checkpoints/last.ckpt
            if (folder / CONFIG_FILE).is_file():
                raise ConfigError(f"{run_dir}: expected the folder of the run, --resume {folder}")
        raise ConfigError(
            f"there is no {path}: give the folder of a run, such as outputs/MODEL-DATA/TIME"
        )
    return read_yaml(path)


def check_imports(run_dir: Path) -> None:
    """Check that the user has passed ``--import`` for each plugin of a run.

    A file alone must not cause an import.

    Raises:
        ConfigError: naming the missing modules.
        ValueError: ``sessions.jsonl`` is not a regular file.
    """
    try:
        # the last session: a resumed run may have added a plugin
        recorded = recorded_words(run_dir, "imports", session=-1)
    except ConfigError as error:
        log.warning("%s. If it used plugins, add --import MODULE", error)
        return  # an unknown name raises later
    if missing := [name for name in recorded if name not in imported]:
        arguments = shlex.join(word for name in missing for word in ("--import", name))
        raise ConfigError(
            f"{run_dir} was trained with plugins: add {arguments}, if you trust these modules"
        )


def recorded_words(run_dir: Path, key: str, *, session: int = 0) -> list[str]:
    """The ``imports`` or ``overrides`` of a session of a run; none without the record.

    Raises:
        ConfigError: the record is damaged.
        ValueError: ``sessions.jsonl`` is not a regular file.
    """
    path = run_dir / SESSIONS_FILE
    check_regular(path)
    if not path.is_file():
        return []
    try:
        words = json.loads(path.read_text().splitlines()[session]).get(key, [])
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise ValueError(f"{key}: {words!r:.40}, expected a list of words")
    except (OSError, ValueError, IndexError, AttributeError) as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        raise ConfigError(f"{path} is damaged ({reason})") from None
    return words
