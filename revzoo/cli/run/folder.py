"""The files of a run beside its checkpoints and logs.

``config.yaml`` is the resolved configuration; ``sessions.jsonl`` has a line for each start of the
run, with the command's overrides, the versions and the state of the checkout; ``summary.json`` has
the final figures, also for a run that was stopped or failed.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from revzoo._files import check_regular, write_atomically
from revzoo.cli.config.build import METRICS_FILE
from revzoo.cli.config.errors import ConfigError, one_line
from revzoo.cli.config.yaml_files import read_yaml, write_yaml
from revzoo.cli.plugins import SESSIONS_FILE, import_arguments, imported
from revzoo.cli.program import command_line
from revzoo.cli.run.errors import USER_ERRORS
from revzoo.cli.run.lock import LOCK_FILE
from revzoo.training.callbacks.registry import best_checkpoint_path
from revzoo.training.checkpoint.files import CHECKPOINTS, has_saved
from revzoo.training.checkpoint.state import RunState
from revzoo.training.distributed import is_first_process

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
SUMMARY_FILE = "summary.json"
LOG_FILE = "train.log"
LIBRARIES = ("torch", "torchvision", "pytorch-lightning")


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write the configuration, every reference resolved, as ``config.yaml``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_yaml(config, run_dir / CONFIG_FILE)


def recorded_config(run_dir: Path) -> dict[str, Any]:
    """The configuration of a run, as it was last started or resumed.

    Raises:
        ConfigError: if there is none, or it is no YAML mapping.
    """
    path = run_dir / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(
            f"there is no {path}: give the folder of a run, such as outputs/MODEL-DATA/TIME"
        )
    return read_yaml(path)


@contextmanager
def errors_naming(path: Path) -> Iterator[None]:
    """Errors in the block name the file that is wrong, whatever kind they are.

    A configuration that was edited by hand may hold anything anywhere, and the checks of a section
    expect the types that a composed configuration has.

    Raises:
        ConfigError: in one line.
    """
    try:
        yield
    except USER_ERRORS as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except Exception as error:
        raise ConfigError(
            f"{path} is not as a run has written it ({type(error).__name__}: {one_line(error)}): "
            "restore it from a copy"
        ) from error


def check_files(run_dir: Path) -> None:
    """Refuse a folder in which a file that a run reads or appends to is something else, as a FIFO.

    Raises:
        ValueError: naming it.
    """
    names = (CONFIG_FILE, SESSIONS_FILE, SUMMARY_FILE, METRICS_FILE, LOG_FILE, LOCK_FILE)
    check_regular(*(run_dir / name for name in names))


def check_unused(run_dir: Path) -> None:
    """Refuse to begin a run in the folder of another one.

    Raises:
        ConfigError: with the command that resumes the other run.
        ValueError: as :func:`check_files`.
    """
    check_files(run_dir)
    if is_first_process() and (run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            f"{run_dir} already holds a run: resume it with --resume {run_dir}, or give another "
            "hydra.run.dir"
        )


def way_on(run_dir: Path) -> str:
    """How the user continues a run that was stopped."""
    if not (run_dir / CONFIG_FILE).exists():
        return "the run had not begun: start it anew"
    saved = has_saved(run_dir / CHECKPOINTS)
    note = "" if saved else " (nothing is saved yet: from the start)"
    return f"to resume: {command_line('train', '--resume', run_dir, *import_arguments())}{note}"


def discard_folder(run_dir: Path, *, log_name: str) -> None:
    """Remove what Hydra has written, and the folders that are empty then; nothing else.

    The working directory stays, empty or not.
    """
    for path in (*run_dir.glob(".hydra/*.yaml"), run_dir / log_name, run_dir / LOCK_FILE):
        path.unlink(missing_ok=True)
    for folder in (run_dir / ".hydra", run_dir, *list(run_dir.parents)[:2]):
        if folder.resolve() == Path.cwd():
            return
        try:
            folder.rmdir()
        except OSError:
            return


def record_session(run_dir: Path, *, overrides: Sequence[str], from_step: int) -> None:
    """Add a line to ``sessions.jsonl`` for a run that starts now, at optimiser step ``from_step``.

    The line's ``git`` is null where the package does not run from a checkout.
    """
    session = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(overrides),
        "imports": imported(),
        "from_step": from_step,
        "versions": versions(),
        "git": git_state(),
    }
    with (run_dir / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(session) + "\n")


def versions() -> dict[str, str]:
    """Versions of the libraries that a run's figures depend on."""
    return {name: version(name) for name in LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """The commit of the checkout that this package is in, and whether files were changed."""
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD", at=root)
        changed = _git("status", "--porcelain", "--untracked-files=no", at=root)
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def _git(*arguments: str, at: Path) -> str:
    command = ["git", "-C", str(at), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout


def describe_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    *,
    seconds: float,
    figures: Mapping[str, float],
    stopped: str | None = None,
) -> dict[str, Any]:
    """The figures of a run as plain values.

    Args:
        trainer: the run's, after training.
        module: what was trained.
        seconds: the time of the training, in all sessions of the run; see
            :func:`seconds_before`.
        figures: metrics by name.
        stopped: what has ended the run, if it did not end by itself.
    """
    device = module.device
    best = best_checkpoint_path(trainer)
    root = os.path.realpath(trainer.default_root_dir)  # as Lightning resolves the checkpoint's path
    return {
        "metrics": dict(figures),
        "epochs": trainer.current_epoch,
        "steps": trainer.global_step,
        "train_seconds": round(seconds, 3),
        "parameters": sum(p.numel() for p in module.parameters()),
        "checkpoint": os.path.relpath(best, root) if best else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "stopped": stopped,
        "notes": [note for state in RunState.of(trainer) for note in state.notes.values()],
    }


def seconds_before(run_dir: Path) -> float:
    """The training time, in seconds, that the run's summary says; 0 where there is none.

    A session that was killed has left no summary, and is not counted.
    """
    try:
        seconds = json.loads((run_dir / SUMMARY_FILE).read_text())["train_seconds"]
        return float(seconds)
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, TypeError, KeyError) as error:
        log.warning(
            "%s does not say the training time so far (%r): it is counted from 0",
            run_dir / SUMMARY_FILE,
            error,
        )
        return 0.0


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json``; a figure that is not finite stays readable as a word."""
    text = json.dumps(summary, indent=2, sort_keys=True)
    write_atomically(run_dir / SUMMARY_FILE, f"{text}\n".encode())
