"""Forks a process that saves checkpoints, kills it, and checks the files that are left; repeatedly.

A separate program: it imports torch once and has no threads that a fork would lose.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from revzoo.training.checkpoint.files import read_checkpoint, write_checkpoint
from revzoo.weights.source import LAST, PREVIOUS


def save_forever(folder: Path, number: int, pipe: int) -> None:
    """Save checkpoints, and report each after it is written."""
    while True:
        weights = torch.full((200_000,), float(number))
        write_checkpoint({"state_dict": {"w": weights}, "number": number}, folder / LAST)
        os.write(pipe, number.to_bytes(4, "big"))
        number += 1


def newest(folder: Path) -> int:
    """The newest state; every file with the name of a checkpoint must be complete."""
    numbers = [-1]
    for name in (LAST, PREVIOUS):
        if (folder / name).exists():
            found = read_checkpoint(folder / name)
            assert (found["state_dict"]["w"] == found["number"]).all()
            numbers.append(found["number"])
    return max(numbers)


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(
        1
    )  # a forked process would wait for ever for threads that it does not have
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
            acknowledgements = file.read()
        acknowledged = int.from_bytes(acknowledgements[-4:], "big") if acknowledgements else before
        found = newest(folder)
        assert found >= acknowledged, (found, acknowledged)
        unfinished += any(folder.glob(".*"))
    sys.stdout.write(f"{kills} kills, {found + 1} saved, {unfinished} kills in the middle of one\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
