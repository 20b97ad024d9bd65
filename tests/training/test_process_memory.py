from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from revzoo.training import process_memory
from revzoo.training.process_memory import peak_bytes, peak_host_bytes


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /proc."""
    monkeypatch.setattr(process_memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(process_memory, "CGROUPS", tmp_path / "cgroup")
    return tmp_path / "proc"


def test_the_machine(proc: Path) -> None:
    assert process_memory._of_machine() is None
    write(proc / "meminfo", "MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    assert process_memory._of_machine() == 40 * 1024


def test_the_narrowest_control_group_counts(proc: Path) -> None:
    groups = process_memory.CGROUPS
    write(proc / "self/cgroup", "0::/batch/job\n")
    for name, limit, used in (("batch", "5000", "3000"), ("batch/job", "max", "1000")):
        write(groups / name / "memory.max", limit)
        write(groups / name / "memory.current", used)
    write(groups / "batch/memory.stat", "anon 7\ninactive_file 500\n")
    assert process_memory._of_control_groups() == 2500
    write(groups / "batch/job/memory.max", "1200")
    assert process_memory._of_control_groups() == 200


def test_without_control_groups_there_is_no_limit(proc: Path) -> None:
    assert process_memory._of_control_groups() is None


def test_the_address_space(proc: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(proc / "self/status", "VmSize:\t10 kB\nVmRSS:\t4 kB\n")
    limit = 50 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert process_memory._of_address_space() == 40 * 1024
    assert process_memory.resident_bytes() == 4 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert process_memory._of_address_space() is None


def test_the_peak_of_another_system(proc: Path) -> None:
    assert not process_memory.reset_peak()
    assert peak_host_bytes() is None
    for text, value in (("VmPeak: 5 kB\nVmHWM:\t123 kB\n", 123 * 1024), ("VmPeak: 5 kB\n", None)):
        write(proc / "self/status", text)
        assert peak_host_bytes() == value


def test_the_peak_is_reset() -> None:
    if not process_memory.reset_peak():
        pytest.skip("this system cannot")
    block = bytearray(b"1" * 2**26)
    grown = peak_host_bytes()
    del block
    process_memory.reset_peak()
    assert grown is not None
    assert (peak_host_bytes() or 0) < grown - 2**25


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"_of_machine": 30, "_of_control_groups": None, "_of_address_space": 20}
    for name, value in limits.items():
        monkeypatch.setattr(process_memory, name, lambda value=value: value)
    assert process_memory.free_bytes(torch.device("cpu")) == 20


def test_free_pages_of_the_heap_are_returned() -> None:
    """glibc keeps freed blocks below a live one, as after a trial."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    blocks = [bytearray(b"1" * 2**16) for _ in range(2**11)]
    last = bytearray(b"1" * 2**16)
    full = process_memory.resident_bytes()
    blocks.clear()
    process_memory.give_back()
    left = process_memory.resident_bytes()
    assert full is not None
    assert left is not None
    assert len(last) == 2**16
    assert left < full - 2**26


@pytest.mark.skipif(peak_host_bytes() is None, reason="no /proc/self/status on this system")
def test_host_peak_grows_with_the_memory_that_is_written() -> None:
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = peak_bytes(torch.device("cpu"))
    assert before is not None
    assert after is not None
    current = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert after >= current - 2**20
    assert len(ballast) == 64 * 2**20
