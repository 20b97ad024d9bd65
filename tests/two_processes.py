"""Runs a function in two processes that talk over gloo."""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes

WORLD = 2


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(worker, *args, count=WORLD):
    """Run ``worker(rank, *args)`` in processes with the environment of the first call."""
    start_processes(worker, args, nprocs=count, start_method="forkserver")


def _worker(rank, task, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=WORLD)
    torch.save(task(rank), Path(folder) / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may outlive the interpreter, which then aborts now and then


def run(task):
    """The result of ``task(rank)`` in each of two processes."""
    with tempfile.TemporaryDirectory() as folder:
        start(_worker, task, _free_port(), folder)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(WORLD)]
