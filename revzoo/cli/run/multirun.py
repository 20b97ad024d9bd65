"""Several runs from one command line (``-m seed=0,1``), each a plain run in a process of its own.

Hydra enumerates the jobs and makes their folders. What is done in each folder is the same as
without ``-m``: a job may be distributed (``trainer=ddp``), and one that fails fails alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.errors import CompactHydraException

from revzoo.cli.config.overrides import ConfigError
from revzoo.cli.run.subprocess import quoted, run_program
from revzoo.training.callbacks.graceful_stop import RunStopped
from revzoo.training.distributed import started_together


def run_job(hydra_cfg: HydraConf, run_dir: Path) -> None:
    """Run a job of a multirun, in its folder, as the command line without ``-m`` would.

    Raises:
        CompactHydraException: the job has failed; Hydra tells so when all jobs have ended.
        SystemExit: with 143 or 130 after SIGTERM or Ctrl-C; the job has ended before.
    """
    own = [o for o in hydra_cfg.overrides.hydra if not o.startswith(("hydra.mode=", "hydra.run."))]
    overrides = [*hydra_cfg.overrides.task, *own, f"hydra.run.dir={quoted(run_dir)}"]
    try:
        status = run_program([*this_program(), *own_configuration(sys.argv[1:]), *overrides])
    except RunStopped as stopped:
        sys.exit(stopped.status)
    if status:
        raise CompactHydraException(f"revzoo: {run_dir}: the run has ended with status {status}")


def this_program() -> list[str]:
    """The command that has started this process, without its arguments."""
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        return [sys.executable, "-m", spec.name]
    return [sys.executable, str(Path(sys.argv[0]).absolute())]


def own_configuration(arguments: Sequence[str]) -> list[str]:
    """The options of a command line that say which configuration is composed."""
    args = get_args_parser().parse_args(list(arguments))
    found = {
        "--config-name": args.config_name,
        "--config-path": args.config_path,
        "--config-dir": args.config_dir,
    }
    return [part for option, value in found.items() if value for part in (option, value)]


def check_started_together(overrides: Sequence[str], *, several: bool) -> None:
    """Refuse processes of ``torchrun`` or ``srun`` that would not find each other.

    Args:
        overrides: of the command line.
        several: whether it asks for several runs (``-m``, ``revzoo-sweep``).

    Raises:
        ConfigError: naming what to add.
    """
    count = started_together()
    if count == 1:
        return
    if several:
        raise ConfigError(
            f"several runs are started one by one, but there are {count} processes of this program "
            "already, and each would start them all: leave out torchrun or srun"
        )
    if not any(override.startswith("hydra.run.dir=") for override in overrides):
        raise ConfigError(
            f"{count} processes were started together and need one folder: add "
            "hydra.run.dir=outputs/NAME, with a name that no other run has"
        )
