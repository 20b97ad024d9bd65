"""Forks a process that saves checkpoints, kills it, looks at what is left, again and again.

A program of its own: torch is imported once, and no thread is there to be lost in a fork.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from revzoo.training.checkpoint.files import LAST, PREVIOUS, read_checkpoint, write_checkpoint


def save_forever(folder: Path, number: int, pipe: int) -> None:
    """Say after each checkpoint that it is safe."""
    while True:
        weights = torch.full((200_000,), float(number))
        write_checkpoint({"state_dict": {"w": weights}, "number": number}, folder / LAST)
        os.write(pipe, number.to_bytes(4, "big"))
        number += 1


def newest(folder: Path) -> int:
    """The newest state; whatever has the name of a checkpoint must be complete."""
    numbers = [-1]
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            found = read_checkpoint(folder / name)
            assert (found["state_dict"]["w"] == found["number"]).all()
            numbers.append(found["number"])
    return max(numbers)


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)  # a fork would wait for ever for the threads that it has lost
    rng, unfinished = random.Random(seed), 0
    for _ in range(kills):
        before = newest(folder)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            save_forever(folder, before + 1, writing)
        time.sleep(rng.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writing)
        with os.fdopen(reading, "rb") as file:
            said = file.read()
        acknowledged = int.from_bytes(said[-4:], "big") if said else before
        found = newest(folder)
        assert found >= acknowledged, (found, acknowledged)
        unfinished += any(folder.glob(".*"))
    sys.stdout.write(f"{kills} kills, {found + 1} saved, {unfinished} kills in the middle of one\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
