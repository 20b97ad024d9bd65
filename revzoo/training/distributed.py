"""The processes of a run: which one this is, before Lightning knows, and how they end together.

Lightning, ``torchrun`` or SLURM's ``srun`` start the processes; each says so in the environment.
One process of a run makes its folder, locks it and writes to it.
"""

from __future__ import annotations

import os
import subprocess

import pytorch_lightning as pl
from torch import distributed

from revzoo.training.lightning_compat import started_processes, stop_watching

# as Lightning looks for them; those that are set by srun in batch scripts, too, come last
RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID")


def is_first_process() -> bool:
    """Whether this process is the one that writes: rank 0 of node 0, or the only one."""
    rank = next((os.environ[name] for name in RANKS if name in os.environ), "0")
    return int(rank) == 0 and int(os.environ.get("NODE_RANK", "0")) == 0


def started_together() -> int:
    """How many processes ``torchrun`` or ``srun`` has started for this command; 1 if neither."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    return int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))


def end_together(trainer: pl.Trainer, *, ask: bool, wait: float = 10.0) -> None:
    """Leave the process group; wait for the processes that Lightning has started from this one.

    Args:
        trainer: of a run that has ended.
        ask: send them SIGTERM: this process may be the only one that knows of the end.
        wait: seconds, after which they are killed.
    """
    started = started_processes(trainer)
    stop_watching(trainer)
    if distributed.is_initialized() and distributed.get_backend() == "gloo":
        distributed.destroy_process_group()  # Lightning itself leaves groups of other kinds
    for process in started:
        if ask:
            process.terminate()
    for process in started:
        try:
            process.wait(wait)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
