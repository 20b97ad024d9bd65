"""Saves checkpoints until it is killed, and says after each one that it is safe."""

import sys
from pathlib import Path

import torch

from revzoo.training.checkpoints import LAST, write_checkpoint

folder, first = Path(sys.argv[1]), int(sys.argv[2])
while True:
    write_checkpoint(
        {"state_dict": {"w": torch.full((200_000,), float(first))}, "number": first}, folder / LAST
    )
    sys.stdout.write(f"{first}\n")
    sys.stdout.flush()
    first += 1
