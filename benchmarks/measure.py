"""Shared by the benchmark scripts: interleaved timing, peak memory, the head of a report.

Times are compared as ratios within one run. Every round runs all candidates one after the other,
so a slow moment of a shared machine hits all of them. With one thread on the CPU we measure the
thread's time, which stops while other programs have the core. On the CPU, memory is the growth of
the resident peak (VmHWM) during the step, in a fresh process for each candidate, with malloc set to
return freed blocks; on a GPU it is the allocator's peak.
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

from revzoo.profiling.clock import now

MIB = 2**20


class Timing(NamedTuple):
    """Median seconds per call; median and quartiles of the ratio to the first candidate."""

    seconds: float
    ratio: float
    low: float
    high: float


def interleaved(candidates: dict[str, Callable[[], object]], rounds: int) -> dict[str, Timing]:
    """Time the candidates in turn; ratios are to the first candidate of the same round."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for fn in candidates.values():  # warm up the allocator and the choice of kernels
        fn()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for _ in range(rounds):
        for name, fn in candidates.items():
            start = now(device)
            fn()
            samples[name].append(now(device) - start)
    base = samples[next(iter(samples))]
    timings = {}
    for name, seconds in samples.items():
        ratios = [s / b for s, b in zip(seconds, base, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        timings[name] = Timing(statistics.median(seconds), statistics.median(ratios), low, high)
    return timings


def growth(fn: Callable[[], object]) -> int:
    """Bytes by which memory peaks above its current use while ``fn`` runs once."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fn()
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present use
    before = _status("VmRSS")
    fn()
    return _status("VmHWM") - before


def step_growth(run: Callable[[], object], script: str, arguments: Sequence[str]) -> int:
    """Bytes by which memory peaks in a step that is not the first.

    A GPU's allocator counts tensors, so ``run`` is measured here. On a CPU, ``script`` is run in a
    fresh process with ``arguments``, and prints the bytes.
    """
    if torch.cuda.is_available():
        run()  # gradients and workspaces
        return growth(run)
    return int(in_own_process(script, arguments).split()[-1])


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: peak memory needs Linux")


def in_own_process(script: str, arguments: Sequence[str]) -> str:
    """Run ``script`` with ``arguments`` in a fresh interpreter and return its output."""
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
    """The head of a report: command, commit, versions and device.

    Args:
        root: a folder in the command that the report replaces by DIR.
    """
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    else:
        threads = torch.get_num_threads()
        device = f"CPU, {_processor()}, {threads} thread{'s' * (threads != 1)}"
    command = " ".join(["python", *sys.argv])
    if root is not None:
        command = command.replace(str(root), "DIR")
    return (
        f"- Command: `{command}`\n"
        f"- Commit: {commit or 'not recorded'}, {time.strftime('%Y-%m-%d')}\n"
        f"- Versions: Python {platform.python_version()}, torch {torch.__version__}\n"
        f"- Device: {device}\n"
    )


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
