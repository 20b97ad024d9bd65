from pathlib import Path

import pytest
import torch

from revzoo.training import memory
from revzoo.training.memory import peak_bytes, peak_host_bytes


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """A folder in the place of /proc."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUP", tmp_path / "cgroup")
    return tmp_path / "proc"


def test_the_tighter_limit_of_machine_and_container_counts(proc):
    assert memory.free_bytes() is None
    write(proc / "meminfo", "MemTotal: 100 kB\nMemAvailable:   40 kB\n")
    assert memory.free_bytes() == 40 * 1024
    write(memory.CGROUP / "memory.current", "3000\n")
    for limit, free in (("max", 40 * 1024), ("5000", 2000)):
        write(memory.CGROUP / "memory.max", f"{limit}\n")
        assert memory.free_bytes() == free


def test_the_tightest_of_nested_groups_counts(proc):
    """In version 1, as of older machines, the groups of a job were not found."""
    write(proc / "self/cgroup", "4:cpu:/other\n3:memory,hugetlb:/jobs/7\n0::/slice/scope\n")
    for group, free in (("jobs/7", 5000), ("jobs", 4000), ("", 3000)):
        folder = memory.CGROUP / "memory" / group
        write(folder / "memory.limit_in_bytes", f"{free + 900}\n")
        write(folder / "memory.usage_in_bytes", "1000\n")
        write(folder / "memory.stat", "cache 300\ninactive_file 100\n")
        assert memory.free_bytes() == free
    write(memory.CGROUP / "slice/memory.max", "2500\n")
    write(memory.CGROUP / "slice/memory.current", "500\n")
    assert memory.free_bytes() == 2000


def test_the_peak_of_another_system(proc):
    assert peak_host_bytes() is None
    for text, value in (("VmPeak: 5 kB\nVmHWM:\t123 kB\n", 123 * 1024), ("VmPeak: 5 kB\n", None)):
        write(proc / "self/status", text)
        assert peak_host_bytes() == value


@pytest.mark.skipif(peak_host_bytes() is None, reason="no /proc/self/status on this system")
def test_host_peak_grows_with_the_memory_that_is_written():
    before = peak_bytes(torch.device("cpu"))
    ballast = torch.ones(64 * 2**20, dtype=torch.uint8)
    after = peak_bytes(torch.device("cpu"))
    assert before is not None
    assert after is not None
    current = int(Path("/proc/self/statm").read_text().split()[1]) * 4096
    assert after >= current - 2**20
    assert len(ballast) == 64 * 2**20
