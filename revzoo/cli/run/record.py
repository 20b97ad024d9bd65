"""Reads the record in a run's folder, and says what may change in a resume or an evaluation.

This imports neither torch nor Lightning, so a refused change gets a quick answer.
"""

from __future__ import annotations

import json
import logging
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import QuotedString
from omegaconf import OmegaConf

from revzoo._files import check_regular, write_atomically
from revzoo.cli.check import check
from revzoo.cli.config import compose, parse, quoted_if_needed, read_yaml
from revzoo.cli.invocation import command_line, short_path
from revzoo.cli.plugins import imported
from revzoo.cli.terminal import USER_ERRORS, ConfigError, one_line
from revzoo.weights.source import CHECKPOINTS, LAST

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SESSIONS_FILE = "sessions.jsonl"  # each line records the imports and overrides of a session
SUMMARY_FILE = "summary.json"
METRICS_FILE = "metrics.csv"
LOG_FILE = "train.log"
LOCK_FILE = ".lock"
# settings of the machine, which leave the run as it is, up to rounding
ROOT = "data.root"
MACHINE = ("trainer.accelerator", "trainer.cuda_graph")


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


def resumed_config(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_precision_change: bool = False
) -> dict[str, Any]:
    """The checked configuration with which a run resumes.

    Args:
        run_dir: the run's folder.
        overrides: ``memory=MODE``, ``memory.bytes=BUDGET``, ``precision=NAME``,
            ``data.root=DIR``, ``trainer.accelerator=NAME`` and ``trainer.cuda_graph``.
        allow_precision_change: whether the precision may change, and with it the figures.

    Raises:
        ValueError: the run cannot resume, or not with these changes; the message says why.
    """
    # before any file is opened: a FIFO would block
    check_files(run_dir)
    # before the configuration, which may use names that a plugin registers
    check_imports(run_dir)
    config = recorded_config(run_dir)
    check_changes(overrides, run_dir)
    others, root = take_root(overrides)
    composed = compose(others).config if others else {}
    # a file that someone may have edited; the device and its precision may be of another place
    with errors_naming(run_dir / CONFIG_FILE):
        check(config | _of_device(config, others, composed))
    if overrides:
        config |= _changes(
            config, others, composed, root, allow_precision_change=allow_precision_change
        )
        check(config)
    return config


def check_changes(overrides: Sequence[str], run_dir: Path) -> None:
    """Refuse overrides that would change the results of a resumed run.

    Raises:
        ConfigError: naming the override, and the command of a new run with it.
    """
    changeable = ("memory", "memory.bytes", "precision", ROOT, *MACHINE)
    for override in overrides:
        if override.partition("=")[0] not in changeable:
            raise ConfigError(
                f"{override}: a resumed run keeps its configuration; only memory=MODE may change, "
                "with memory.bytes=BUDGET for memory=budget, precision=NAME with "
                "--allow-precision-change, data.root=DIR, where the data are now, "
                "trainer.accelerator=cpu, gpu or auto, where it runs now, and trainer.cuda_graph. "
                "Start a new run for the rest (with its --config-dir, if it had one): "
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


def _of_device(
    config: Mapping[str, Any], overrides: Sequence[str], composed: Mapping[str, Any]
) -> dict[str, Any]:
    """The sections that the overrides replace because the run moves to another device or graph."""
    keys = [key for o in overrides if (key := o.partition("=")[0]) in MACHINE]
    if not keys or not isinstance(config.get("trainer"), Mapping):  # edited: a check names it
        return {}
    names = [key.partition(".")[2] for key in keys]
    changed = {"trainer": config["trainer"] | {name: composed["trainer"][name] for name in names}}
    if any(override.startswith("precision=") for override in overrides):
        changed["precision"] = composed["precision"]
    return changed


def _changes(
    config: Mapping[str, Any],
    overrides: Sequence[str],
    composed: Mapping[str, Any],
    root: str | None,
    *,
    allow_precision_change: bool,
) -> dict[str, Any]:
    """The sections that the overrides, already composed, and ``data.root`` replace."""
    # whole sections: memory=budget brings its own keys
    sections = {re.split("[.=]", override)[0] for override in overrides} - {"trainer"}
    changed = {section: composed[section] for section in sections}
    changed |= _of_device(config, overrides, composed)
    changed["data"] = moved(config["data"], root)
    precision = changed.get("precision", config["precision"])
    if precision != config["precision"] and not allow_precision_change:
        raise ConfigError(
            f"the run uses precision.trainer={config['precision']['trainer']}, "
            f"{precision['trainer']} would change its figures: add --allow-precision-change "
            "to accept this"
        )
    return changed


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


def check_files(run_dir: Path) -> None:
    """Check that the files that a run reads or appends to are regular files, not a FIFO, say.

    Raises:
        ValueError: naming the file.
    """
    names = (CONFIG_FILE, SESSIONS_FILE, SUMMARY_FILE, METRICS_FILE, LOG_FILE, LOCK_FILE)
    check_regular(*(run_dir / name for name in names))


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Turn all errors in the block into one line that names the file.

    A configuration edited by hand may hold any value anywhere, but the checks expect the types of a
    composed configuration.

    Raises:
        ConfigError: for any error in the block.
    """
    try:
        yield
    except USER_ERRORS as error:  # their message is complete; other errors need their type
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except Exception as error:
        raise ConfigError(
            f"{path} is damaged ({type(error).__name__}: {one_line(error)}): restore it from a copy"
        ) from error
