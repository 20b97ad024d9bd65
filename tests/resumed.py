"""Resumes a run as ``revzoo train --resume`` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from revzoo.cli.config import check_machine
from revzoo.cli.run import train as train_module
from revzoo.cli.run.folder import CONFIG_FILE, errors_naming, resumed_config
from revzoo.cli.terminal import user_errors


def resume(
    run_dir: Path, overrides: Sequence[str] = (), *, allow_precision_change: bool = False
) -> dict[str, float]:
    """Check the changes, and continue the run; return its figures."""
    with user_errors():
        config = resumed_config(
            run_dir.absolute(), overrides, allow_precision_change=allow_precision_change
        )
        with errors_naming(run_dir.absolute() / CONFIG_FILE):
            check_machine(config)
        return train_module.resume(run_dir, config, overrides)
