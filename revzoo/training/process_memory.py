"""Memory of this process: peak and free, also on a GPU.

The peak on the CPU is the high-water mark ``VmHWM`` in ``/proc/self/status``, since the process
started. (Not ``getrusage``: a child's ``ru_maxrss`` starts at its parent's.)
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


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
    # version 2 of control groups; "max" is no limit
    with suppress(OSError, ValueError):
        limit, used = (int((CGROUP / f"memory.{n}").read_text()) for n in ("max", "current"))
        with suppress(OSError):  # pages of files, which the system takes back
            lines = (CGROUP / "memory.stat").read_text().splitlines()
            used -= sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file"))
        free = limit - used if free is None else min(free, limit - used)
    return free


def _field(path: Path, name: str) -> int | None:
    with suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024  # /proc prints KiB
    return None
