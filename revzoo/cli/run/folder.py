"""The files of a run, except for its checkpoints and logs.

- ``config.yaml``: the resolved configuration.
- ``sessions.jsonl``: a line for each start of the run, with overrides, versions and git state.
- ``summary.json``: the final figures, even if the run was stopped or failed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from omegaconf import DictConfig, OmegaConf

from revzoo._checks import check_number
from revzoo._files import json_bytes, write_atomically
from revzoo._version import __version__
from revzoo.cli.invocation import command_line
from revzoo.cli.plugins import imported
from revzoo.cli.run.record import (
    CONFIG_FILE,
    LOCK_FILE,
    SESSIONS_FILE,
    SUMMARY_FILE,
    check_files,
    write_yaml,
)
from revzoo.cli.terminal import ConfigError
from revzoo.training.callbacks.checkpoints import best_checkpoint_path, best_figures
from revzoo.training.checkpoint.files import has_saved
from revzoo.training.distributed import is_first_process
from revzoo.training.lightning_compat import callbacks_of, epochs_of_run
from revzoo.training.resume.run_state import RunState
from revzoo.weights.source import CHECKPOINTS

log = logging.getLogger(__name__)

MAX_SECONDS = 1e10  # of training; 300 years
LIBRARIES = ("torch", "torchvision", "pytorch-lightning")


def write_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """Write the resolved configuration as ``config.yaml``."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_yaml(config, run_dir / CONFIG_FILE)


def check_unused(run_dir: Path) -> None:
    """Check that the folder of a new run does not contain a run.

    Raises:
        ConfigError: it contains a run; the message has the command that resumes it.
        ValueError: as :func:`check_files`.
    """
    check_files(run_dir)
    # the others would see the file that process 0 has just written
    if is_first_process() and (run_dir / CONFIG_FILE).exists():
        raise ConfigError(
            f"{run_dir} already holds a run: resume it with --resume {run_dir}, or choose another "
            "hydra.run.dir"
        )


def is_timed(section: DictConfig) -> bool:
    """Whether the folder of ``hydra.run`` or ``hydra.sweep`` has the time in its name."""
    plain: Any = OmegaConf.to_container(section, resolve=False)
    return "${now:" in str(plain["dir"])


def new_folder(folder: Path) -> Path:
    """Create ``folder``; if it exists, ``folder-2``, ``folder-3`` and so on instead.

    Two runs that start in the same second have the same name for their folders.
    """
    path = folder
    for number in itertools.count(2):
        with suppress(FileExistsError):
            path.mkdir(parents=True)
            break
        path = folder.with_name(f"{folder.name}-{number}")
    return path


def resume_hint(run_dir: Path) -> str:
    """The command that continues a stopped run, for a message."""
    if not (run_dir / CONFIG_FILE).exists():
        return "training had not started: run the command again"
    saved = has_saved(run_dir / CHECKPOINTS)
    note = "" if saved else " (no checkpoint yet: from the start)"
    return f"to resume: {command_line('train', '--resume', run_dir)}{note}"


def discard_folder(run_dir: Path, *, log_name: str) -> None:
    """Remove the files that Hydra has written, then empty folders; keep the working directory."""
    # only files that a run can write before it fails to start
    for path in (*run_dir.glob(".hydra/*.yaml"), run_dir / log_name, run_dir / LOCK_FILE):
        path.unlink(missing_ok=True)
    # outputs/MODEL-DATA/TIME: two parents may be new, too
    for folder in (run_dir / ".hydra", run_dir, *list(run_dir.parents)[:2]):
        if folder.resolve() == Path.cwd():
            return
        try:
            folder.rmdir()
        except OSError:
            return


def record_session(run_dir: Path, *, overrides: Sequence[str], from_step: int) -> None:
    """Add a line to ``sessions.jsonl`` for a start of the run at optimiser step ``from_step``.

    ``git`` is null if the package is not in a checkout.
    """
    session = {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "overrides": list(overrides),
        # a resumed run must repeat them, see check_imports
        "imports": imported,
        "from_step": from_step,
        "versions": versions(),
        "git": git_state(),
    }
    # appended: earlier sessions stay
    with (run_dir / SESSIONS_FILE).open("a") as file:
        file.write(json.dumps(session) + "\n")


def versions() -> dict[str, str]:
    """Versions of this package and the libraries that a run's figures depend on."""
    return {"revzoo": __version__} | {name: version(name) for name in LIBRARIES}


def git_state() -> dict[str, Any] | None:
    """The commit of this package's checkout, and the changed files."""
    # revzoo/cli/run/folder.py
    root = Path(__file__).parents[3]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git("rev-parse", "HEAD", at=root)
        # data and outputs are untracked, and listing them may take long
        changed = _git("status", "--porcelain", "--untracked-files=no", at=root)
    except (OSError, subprocess.SubprocessError):
        return None
    # git prints two letters and a space before each path
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def _git(*arguments: str, at: Path) -> str:
    command = ["git", "-C", str(at), *arguments]
    # a time limit: the checkout may be on a slow network disk
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
        module: the trained module.
        seconds: training time in all sessions of the run; see :func:`seconds_before`.
        figures: metrics by name.
        stopped: the signal or error that ended the run; None for a normal end.
    """
    device = module.device
    best = best_checkpoint_path(trainer)
    root = os.path.realpath(trainer.default_root_dir)  # Lightning resolves checkpoint paths, too
    return {
        "metrics": dict(figures),
        "epochs": epochs_of_run(trainer),
        "steps": trainer.global_step,
        # a resumed run adds to it, see seconds_before
        "train_seconds": round(seconds, 3),
        "parameters": sum(p.numel() for p in module.parameters()),
        # relative, since users move folders
        "checkpoint": os.path.relpath(best, root) if best else None,
        # from its validation; metrics has the last figures
        "best": best_figures(trainer) if best else {},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "versions": versions(),
        "stopped": stopped,
        "notes": [
            note for state in callbacks_of(trainer, RunState) for note in state.notes.values()
        ],
    }


def seconds_before(run_dir: Path) -> float:
    """The training time of earlier sessions in seconds, from the run's summary; 0 without one.

    A killed session writes no summary and does not count.
    """
    try:
        seconds = json.loads((run_dir / SUMMARY_FILE).read_text())["train_seconds"]
        check_number("train_seconds", seconds, high=MAX_SECONDS)
        return float(seconds)
    except FileNotFoundError:
        return 0.0
    except (OSError, ValueError, TypeError, KeyError) as error:
        path = run_dir / SUMMARY_FILE
        log.warning("%s lacks the training time so far (%r): counting from 0", path, error)
        return 0.0


def write_summary(summary: Mapping[str, Any], run_dir: Path) -> None:
    """Write ``summary.json``; figures that are not finite become ``NaN`` or ``Infinity``."""
    # sorted: two summaries can be compared line by line
    write_atomically(run_dir / SUMMARY_FILE, json_bytes(summary, sort_keys=True))
