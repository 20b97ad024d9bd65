"""Memory of this process: peak and free, also on a GPU; advice when it runs out.

The peak on the CPU is the high-water mark ``VmHWM`` in ``/proc/self/status``, since the process
started. (Not ``getrusage``: a child's ``ru_maxrss`` starts at its parent's.)

An out-of-memory error lists what each memory mode would need. An evaluation keeps no activations in
any mode, so only a smaller batch helps there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.memory import is_oom_error
from torch import nn

from revzoo._checks import UserError
from revzoo.core.twins import copied
from revzoo.data import ImageData
from revzoo.profiling.units import in_units
from revzoo.training.optim.optimizers import OptimSpec, build_optimizer

if TYPE_CHECKING:
    from revzoo.training.classifier import Classifier

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
_M_MMAP_THRESHOLD = -3  # of malloc.h


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory in bytes: of the GPU on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_bytes()


def peak_host_bytes() -> int | None:
    """The process's peak resident set in bytes; None if the system does not report it."""
    return _field(PROC / "self/status", "VmHWM")


def free_bytes(device: torch.device | None = None) -> int | None:
    """Free bytes of a GPU, or of the machine or container; None if the system does not say."""
    if device is not None and device.type == "cuda":
        # torch keeps what it has freed, for later tensors
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device is not None and device.type != "cpu":
        return None
    free = _field(PROC / "meminfo", "MemAvailable")
    return min([*_free_in_groups(), *([] if free is None else [free])], default=None)


def _free_in_groups() -> Iterator[int]:
    """Bytes that each control group of the process leaves free: a job's, a container's."""
    groups = ["0::/"]
    with suppress(OSError):
        groups = (PROC / "self/cgroup").read_text().splitlines()
    for controllers, path in (line.split(":", 2)[1:] for line in groups):
        # version 2 names no controllers
        top, limit, used = CGROUP, "memory.max", "memory.current"
        if controllers:
            top, limit, used = CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        if controllers and "memory" not in controllers.split(","):
            continue
        group = top / path.strip("/")  # does not exist if a container shows its group as the top
        for folder in (group, *group.parents):
            with suppress(OSError, ValueError):  # "max" is no limit
                free = int((folder / limit).read_text()) - int((folder / used).read_text())
                with suppress(OSError):  # pages of files, which the system takes back
                    rows = (folder / "memory.stat").read_text().splitlines()
                    free += sum(int(r.split()[1]) for r in rows if r.startswith("inactive_file"))
                yield free


def return_freed_blocks() -> None:
    """Make glibc return blocks of 64 KiB and more when they are freed; it would keep many of them.

    A process then takes what is counted, but about twice the time on a CPU.
    """
    with suppress(AttributeError, OSError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**16)


def optimizer_bytes(model: nn.Module, spec: OptimSpec) -> int:
    """Bytes of the optimiser's state after a step of ``model``; it is counted, not allocated."""
    from revzoo.profiling.plan import state_bytes  # only plans and audits need it

    return state_bytes(build_optimizer(copied(model, lambda t: t.to("meta")), spec))


def _field(path: Path, name: str) -> int | None:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024  # /proc prints KiB
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` reports that a device or the host is out of memory."""
    # Lightning knows the messages: torch has no error type for the host
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or is_oom_error(error)


class NoMemoryError(UserError):
    """Memory ran out; the message says what to change."""


@contextmanager
def memory_errors(
    trainer: pl.Trainer,
    module: Classifier,
    data: ImageData,
    *,
    eval_option: str = "data.eval_batch_size",
) -> Iterator[None]:
    """Turn an out-of-memory error of ``trainer`` into :class:`NoMemoryError` with advice.

    With ``HYDRA_FULL_ERROR=1`` in the environment the error passes unchanged. ``eval_option``, for
    the message, sets ``data.eval_batch_size``.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error) or os.environ.get("HYDRA_FULL_ERROR") == "1":
            raise
        peak = peak_bytes(trainer.strategy.root_device)
        used = f"out of memory at a peak of {in_units(peak)}" if peak else "out of memory"
        # Lightning leaves the module as it was when the error came
        if module.training:
            limit = peak if module.device.type == "cuda" else None
            text = f"step {trainer.global_step}: {used}{memory_advice(module, data, limit)}"
        else:
            size = data.eval_batch_size
            text = f"{used}, evaluating {size} images at once: lower {eval_option}"
        raise NoMemoryError(text) from error


def memory_advice(module: Classifier, data: ImageData, limit: int | None = None) -> str:
    """The activations of a training step in each mode; ``limit``: bytes before memory ran out."""
    smaller = f"lower data.batch_size ({data.batch_size})"
    shape = (data.batch_size, module.hparams["model"]["in_chans"], *data.train_sizes)
    # counting fails if the model is broken or too little memory is left
    with suppress(Exception):
        from revzoo.profiling.audit import audit  # only this error needs it

        audits = audit(module.model, shape).audits
        least = min(audits.values(), key=lambda a: a.activation_bytes)
        # leaves a fifth free, as memory=auto does
        room = 0.8 * (limit or 0) - (least.peak_bytes - least.activation_bytes)
        fits = int(data.batch_size * room / least.activation_bytes)
        fits -= fits % 8 if fits > 8 else 0
        if 0 < fits < data.batch_size:
            smaller += f", to about {fits} in {least.mode}"
        # the present mode is the first
        present, *others = [f"{in_units(a.activation_bytes)} in {m}" for m, a in audits.items()]
        return (
            f". Counted for {data.batch_size} images in float32, activations take {present}; "
            f"{', '.join(others)}. Choose a mode that takes less, memory=MODE, or {smaller}"
        )
    return f"; {smaller}"
