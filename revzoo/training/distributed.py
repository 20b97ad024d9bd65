"""The processes of a distributed run: the rank before Lightning knows it, and a common end.

Lightning, ``torchrun`` and SLURM's ``srun`` start processes and set their rank in the environment.
The first process creates the run's folder, locks it and writes to it.
"""

from __future__ import annotations

import os
import subprocess
from typing import TypeVar

import pytorch_lightning as pl
from torch import distributed

from revzoo.training.lightning_compat import started_processes, stop_watching

T = TypeVar("T")

WAIT = 10.0  # seconds until a process that should end is killed
# in Lightning's order; SLURM's comes last because batch scripts set it too
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this process writes files: rank 0 of node 0, or the only process."""
    # read from the environment: the folder is created before Lightning starts the processes
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    # LOCAL_RANK counts from 0 on each node
    return int(rank) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0


def started_together() -> int:
    """The number of processes that ``torchrun`` or ``srun`` started; 1 without these."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def process_count() -> int:
    """The number of processes in the process group; 1 before there is one."""
    initialized = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if initialized else 1


def gathered(value: T) -> list[T]:
    """The values of all processes, by rank; each must call this, with plain data."""
    values = [value] * process_count()
    if len(values) > 1:
        distributed.all_gather_object(values, value)
    return values


def end_together(trainer: pl.Trainer, *, ask: bool) -> None:
    """Leave the process group; wait for the processes that Lightning has started from this one.

    Args:
        trainer: of a run that has ended.
        ask: send them SIGTERM, since they may not know that the run ends.

    Kills processes that have not ended after :data:`WAIT` seconds.
    """
    started = started_processes(trainer)
    # before any process ends: the watchdog would kill this one
    stop_watching(trainer)
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()  # Lightning leaves groups of other backends
    for process in started:
        if ask:
            process.terminate()
    for process in started:
        try:
            process.wait(WAIT)
        except subprocess.TimeoutExpired:
            # it hangs in a collective operation, which no signal handler interrupts
            process.kill()
            process.wait()
