from __future__ import annotations

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from revzoo.training.callbacks.footprint import peak_host_bytes
from revzoo.training.tuning import memory_limit


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_machine(tmp_path: Path) -> None:
    write(tmp_path / "meminfo", "MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    assert memory_limit._of_machine(tmp_path) == 40 * 1024
    assert memory_limit._of_machine(tmp_path / "elsewhere") is None


def test_the_narrowest_control_group_counts(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "self/cgroup", "0::/batch/job\n")
    for name, limit, used in (("batch", "5000", "3000"), ("batch/job", "max", "1000")):
        write(groups / name / "memory.max", limit)
        write(groups / name / "memory.current", used)
    write(groups / "batch/memory.stat", "anon 7\ninactive_file 500\n")
    assert memory_limit._of_control_groups(proc, groups) == 2500
    write(groups / "batch/job/memory.max", "1200")
    assert memory_limit._of_control_groups(proc, groups) == 200


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit._of_control_groups(tmp_path, tmp_path) is None


def test_the_address_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "self/status", "VmSize:\t10 kB\nVmRSS:\t4 kB\n")
    limit = 50 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    assert memory_limit._of_address_space(tmp_path) == 40 * 1024
    assert memory_limit.resident_bytes(tmp_path) == 4 * 1024
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    assert memory_limit._of_address_space(tmp_path) is None


def test_the_peak_is_reset(tmp_path: Path) -> None:
    assert not memory_limit.reset_peak(tmp_path)
    if not memory_limit.reset_peak():
        pytest.skip("this system cannot")
    block = bytearray(b"1" * 2**26)
    grown = peak_host_bytes()
    del block
    memory_limit.reset_peak()
    assert grown is not None
    assert (peak_host_bytes() or 0) < grown - 2**25


def test_the_smallest_limit_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"_of_machine": 30, "_of_control_groups": None, "_of_address_space": 20}
    for name, value in limits.items():
        monkeypatch.setattr(memory_limit, name, lambda value=value: value)
    assert memory_limit.free_bytes(torch.device("cpu")) == 20


def test_free_pages_of_the_heap_are_returned() -> None:
    """glibc keeps freed blocks below a live one, as after a trial."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("not glibc")
    blocks = [bytearray(b"1" * 2**16) for _ in range(2**11)]
    last = bytearray(b"1" * 2**16)
    full = memory_limit.resident_bytes()
    blocks.clear()
    memory_limit.give_back()
    left = memory_limit.resident_bytes()
    assert full is not None
    assert left is not None
    assert len(last) == 2**16
    assert left < full - 2**26
