"""Memory of this process: used, peak and free, also on a GPU.

The peak on the CPU is the high-water mark ``VmHWM`` in ``/proc/self/status``, since the process
started. (Not ``getrusage``: a child's ``ru_maxrss`` starts at its parent's.)

On Linux the limits are the machine's free memory, the control group (of a container or a batch job)
and ``ulimit -v``. Beyond the first two there is no error: the kernel kills the process.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path

import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Free bytes on ``device``; None if the system does not report them."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    # the tightest limit ends the process
    limits = (_of_machine(), _of_control_groups(), _of_address_space())
    known = [limit for limit in limits if limit is not None]
    return max(0, min(known)) if known else None


def resident_bytes() -> int | None:
    """Resident memory of this process in bytes; None if the system does not report it."""
    return _field_bytes(PROC / "self/status", "VmRSS")


def peak_bytes(device: torch.device) -> int | None:
    """Peak memory in bytes: of the GPU on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_host_bytes()


def peak_host_bytes() -> int | None:
    """The process's peak resident set in bytes; None if the system does not report it."""
    return _field_bytes(PROC / "self/status", "VmHWM")


def reset_peak() -> bool:
    """Reset the peak of this process's memory. Returns whether the system could."""
    try:
        (PROC / "self/clear_refs").write_text("5")  # proc(5): resets VmHWM to current use
    except OSError:
        return False
    return True


def give_back() -> None:
    """Collect garbage, and make glibc return the free pages of its heap to the system.

    The heap keeps the pages of freed tensors, hundreds of MB after a trial, and they would count in
    the next trial (malloc_trim(3)). Other C libraries have no such function.
    """
    gc.collect()  # a trainer and its module refer to each other
    # CDLL(None): the libraries that this process has loaded
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _of_machine() -> int | None:
    return _field_bytes(PROC / "meminfo", "MemAvailable")


def _of_control_groups() -> int | None:
    """The free memory in this process's control group and the groups around it (version 2)."""
    # version 2 has one line, 0::/PATH; version 1 a line for each controller
    paths = [line[3:] for line in _lines(PROC / "self/cgroup") if line.startswith("0::")]
    if not paths:
        return None
    group = CGROUPS / paths[0].lstrip("/")
    # limits of the groups above also hold; a container sees its own group as the root
    folders = [group, *group.parents] if group.is_relative_to(CGROUPS) else [CGROUPS]
    free = [_of_group(folder) for folder in folders if folder.is_relative_to(CGROUPS)]
    return min((bytes_ for bytes_ in free if bytes_ is not None), default=None)


def _of_group(folder: Path) -> int | None:
    limit, used = _lines(folder / "memory.max"), _lines(folder / "memory.current")
    # the root group has no such files
    if not limit or not used or limit[0] == "max":
        return None
    # cached file pages, which the kernel drops before it kills a process
    cached = _field_bytes(folder / "memory.stat", "inactive_file", unit=1) or 0
    return int(limit[0]) - int(used[0]) + cached


def _of_address_space() -> int | None:
    """Free bytes under ``ulimit -v``; None without such a limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _field_bytes(PROC / "self/status", "VmSize")
    return None if limit == resource.RLIM_INFINITY or used is None else limit - used


def _field_bytes(path: Path, name: str, *, unit: int = 1024) -> int | None:
    """The value of field ``name`` in bytes; ``/proc`` prints KiB."""
    for line in _lines(path):
        # /proc writes "VmRSS:  123 kB", a control group "inactive_file 123"
        words = line.replace(":", " ").split()
        if words[:1] == [name]:
            return int(words[1]) * unit
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
