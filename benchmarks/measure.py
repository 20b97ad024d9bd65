"""What the benchmark scripts share: interleaved timing, peak memory, the report's header.

Times are compared as ratios within one run: every round runs all candidates one after the other,
so that a slow moment of a shared machine hits them alike. Memory is measured in a process of its
own per candidate: on the CPU as growth of the resident peak (VmHWM) over what was resident before
the step, with malloc told to give freed blocks back; on a GPU as the allocator's peak.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

MIB = 2**20


class Timing(NamedTuple):
    """Seconds per call and the ratio to the first candidate, medians with quartiles."""

    seconds: float
    ratio: float
    low: float
    high: float


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time the candidates in turns; ratios are taken within each round, to the first one."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for fn in candidates.values():  # warm up: allocator, kernels' choice of algorithm
        fn()
    for _ in range(rounds):
        for name, fn in candidates.items():
            synchronize()
            start = time.perf_counter()
            fn()
            synchronize()
            samples[name].append(time.perf_counter() - start)
    base = samples[next(iter(samples))]
    timings = {}
    for name, seconds in samples.items():
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        timings[name] = Timing(statistics.median(seconds), statistics.median(ratios), low, high)
    return timings


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def growth(fn: Callable[[], object]) -> int:
    """Bytes by which the peak of memory rises above the present use while ``fn`` runs once."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present use
    before = _status("VmRSS")
    fn()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory needs Linux")


def in_own_process(script: str, arguments: Sequence[str]) -> str:
    """Run ``script`` with ``arguments`` in a fresh interpreter; returns what it printed."""
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    result = subprocess.run(
        [sys.executable, script, *arguments],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return result.stdout


def environment(*, root: Path | None = None) -> str:
    """Command, commit, versions and device, as the head of a report.

    Args:
        root: a folder that the command names and the report calls DIR.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        device = f"CPU, {_processor()}, {torch.get_num_threads()} threads"
    command = " ".join(["python", *sys.argv])
    if root is not None:
        command = command.replace(str(root), "DIR")
    return (
        f"- Command: `{command}`\n"
        f"- Commit {commit or 'unknown'}, {time.strftime('%Y-%m-%d')}\n"
        f"- Python {platform.python_version()}, torch {torch.__version__}\n"
        f"- {device}\n"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
