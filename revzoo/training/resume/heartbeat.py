"""Ends a distributed run if one of its processes no longer answers.

A process that is stopped, or whose machine is cut off, leaves the others waiting in a collective
operation: 30 minutes in gloo, 10 in NCCL. A shorter timeout of these would also end a healthy run
in which one process is slow, because it saves or reads from a slow disk. So a thread of each
process counts up in a store, also while its process computes or waits, and looks at the counts of
the others.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytorch_lightning as pl
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

INTERVAL = 2.0  # seconds between two beats
FINISHED = -(2**40)  # added to the count of a process that ends as it should


class Heartbeat:
    """Calls ``end(rank)`` in a thread after ``limit`` seconds without a beat of process ``rank``.

    Args:
        store: shared by all processes, and used only here.
        rank: of this process.
        processes: their number.
        limit: in seconds, of this process's time: if all are stopped together, as by Ctrl-Z, and
            continue, nobody was silent.
        end: called once.
    """

    def __init__(
        self, store: Store, *, rank: int, processes: int, limit: float, end: Callable[[int], None]
    ) -> None:
        self._store, self._rank, self._limit, self._end = store, rank, limit, end
        self._silent = {peer: 0.0 for peer in range(processes) if peer != rank}  # seconds
        self._over = threading.Event()
        # two threads: the store of a stopped process blocks the first
        targets = (self._beat, self._watch)
        self._threads = [threading.Thread(target=t, name="heartbeat", daemon=True) for t in targets]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Tell the others that this process ends as it should."""
        self._over.set()
        for thread in self._threads:
            # an unanswered call of the store must not delay the end
            thread.join(INTERVAL)

    def _beat(self) -> None:
        counts = dict.fromkeys(self._silent, 0)
        try:
            while not self._over.wait(INTERVAL):
                self._store.add(str(self._rank), 1)
                for peer, before in counts.items():
                    counts[peer] = self._store.add(str(peer), 0)
                    if counts[peer] != before or counts[peer] < 0:
                        self._silent[peer] = 0.0
            self._store.add(str(self._rank), FINISHED)
        except RuntimeError:
            # the process with the store has ended: all are silent from now on
            return

    def _watch(self) -> None:
        while not self._over.wait(INTERVAL):
            for peer in self._silent:
                self._silent[peer] += INTERVAL
                if self._silent[peer] > self._limit:
                    self._end(peer)
                    return


def start_heartbeat(
    trainer: pl.Trainer, *, limit: float, end: Callable[[int], None]
) -> Heartbeat | None:
    """The heartbeat of a trainer's processes, all of which call this; None for one process."""
    if trainer.world_size == 1:
        return None
    # Lightning, torchrun and Lightning's support of SLURM set it
    host, first = os.environ["MASTER_ADDR"], trainer.is_global_zero
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if first else None
    port: int = trainer.strategy.broadcast(0 if store is None else store.port)
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False)
    ranks = {"rank": trainer.global_rank, "processes": trainer.world_size}
    return Heartbeat(store, **ranks, limit=limit, end=end)
