"""A distributed process notices that another one no longer answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore

from revzoo.training.resume import heartbeat
from revzoo.training.resume.heartbeat import Heartbeat

INTERVAL, LIMIT = 0.05, 0.5


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", INTERVAL)


def test_a_silent_process_is_named_once() -> None:
    store, silent = HashStore(), list[int]()
    ranks = {"processes": 3, "limit": LIMIT, "end": silent.append}
    first, second = (Heartbeat(store, rank=rank, **ranks) for rank in (0, 1))
    time.sleep(2 * LIMIT)
    first.close()
    second.close()
    assert silent == [2, 2]


def test_slow_and_finished_processes_are_left_alone() -> None:
    store, silent = HashStore(), list[int]()
    ranks = {"processes": 2, "limit": LIMIT, "end": silent.append}
    first, second = (Heartbeat(store, rank=rank, **ranks) for rank in (0, 1))
    time.sleep(2 * LIMIT)
    second.close()
    time.sleep(2 * LIMIT)
    first.close()
    assert silent == []


WAITING = """
import os, signal, sys
import torch
from types import SimpleNamespace
from torch import distributed
from revzoo.training.resume import heartbeat
from revzoo.training.resume import graceful_stop
rank = int(sys.argv[1])
graceful_stop.DEADLINE, heartbeat.INTERVAL = 1.0, 0.1
distributed.init_process_group("gloo", rank=rank, world_size=2)

def broadcast(value):
    values = [value]
    distributed.broadcast_object_list(values)
    return values[0]

trainer = SimpleNamespace(
    world_size=2,
    global_rank=rank,
    is_global_zero=rank == 0,
    strategy=SimpleNamespace(broadcast=broadcast, launcher=None),
)
stop = graceful_stop.GracefulStop()
with stop.listening():
    stop.setup(trainer, None, "fit")
    distributed.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    distributed.all_reduce(torch.ones(1))
"""


def test_a_stopped_process_does_not_hang_the_other() -> None:
    """It waited in gloo for minutes; the store is in process 0."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WAITING, str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, errors = processes[1].communicate(timeout=60)
        assert processes[1].returncode == 1
        assert "process 0 of the run has not answered" in errors
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.communicate()
