"""Checkpoint files: written so that a kill at any instant leaves a good one, read as plain data.

Why not Lightning's own writer: it goes through a temporary file that may be on another file system,
where moving it is a copy that a kill cuts short, and never asks the disk to keep it (no ``fsync``).
Its reader runs a pickle's code unless told otherwise, and for addresses it is told otherwise.

NOTE [ What is good at every instant ]
1. The new state is written to a temporary file in the folder of the checkpoint, and synced.
2. If the file is ``last.ckpt``, the old one gets a second name, ``previous.ckpt``, in one rename.
3. The temporary file takes the checkpoint's name, in one rename; the folder is synced.
Before 3 the old file is complete, after it the new one is; a file that is not complete never has a
name that ends in ``.ckpt``. Where the file system has no hard links, step 2 moves the old file:
then ``previous.ckpt`` alone is complete for the time of one rename.
"""

from __future__ import annotations

import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO
from torch import Tensor

from revzoo.training.distributed import is_first_process
from revzoo.weights.errors import UnreadableWeightsError
from revzoo.weights.torch_file import read_torch_file

log = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"  # folder of a run
BEST, LAST, PREVIOUS = "best.ckpt", "last.ckpt", "previous.ckpt"
TEMPORARY = ".saving"
PLAIN = (str, int, float, bool, type(None), bytes)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or used; the message says what was found, what to do."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint that is not there, or not as a run has saved it: another one may be good."""


def not_plain(value: Any, key: str = "checkpoint") -> Iterator[tuple[str, type]]:
    """The places in ``value`` that hold anything but tensors, plain values and containers of them.

    Exactly these types count: a subclass is written as itself, and reading it runs its code.
    """
    kind = type(value)
    if kind in (dict, OrderedDict, Counter):  # all of which torch reads as plain
        for name, item in value.items():
            if type(name) not in PLAIN:
                yield f"{key}: the key {name!r}", type(name)
            yield from not_plain(item, f"{key}[{name!r}]")
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            yield from not_plain(item, f"{key}[{index}]")
    elif kind is not Tensor and kind not in PLAIN:
        yield key, kind


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write ``state`` to ``path``; see NOTE [ What is good at every instant ].

    Raises:
        CheckpointError: if it holds more than plain values and tensors (nothing is written then),
            or if the disk refuses it (the old file is as it was).
    """
    for key, kind in not_plain(state):
        raise CheckpointError(
            f"{key} is a {kind.__module__}.{kind.__qualname__}: a checkpoint holds tensors, "
            "numbers, strings, lists and dictionaries only; convert it where the state is made"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_stale(path.parent)
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if path.name == LAST and path.exists():
            _keep_previous(path)
        temporary.replace(path)
        _sync_folder(path.parent)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(
            f"cannot write {path} ({error}): free space or give another folder; "
            "the checkpoints that were there are as they were"
        ) from error


def _keep_previous(path: Path) -> None:
    previous = path.with_name(PREVIOUS)
    link = path.with_name(f".{PREVIOUS}{TEMPORARY}")
    try:
        link.hardlink_to(path)
    except OSError:  # no hard links here
        path.replace(previous)
    else:
        link.replace(previous)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def remove_stale(folder: Path) -> None:
    """Remove what a killed run has left unfinished: a run's folder has one writer at a time."""
    for path in folder.glob(f".*.ckpt{TEMPORARY}"):
        path.unlink(missing_ok=True)


def read_checkpoint(path: str | Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """The content of a checkpoint: plain values and tensors. Nothing in the file is executed.

    Raises:
        DamagedCheckpoint: there is none, or it is cut off, damaged, or more than plain data.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedCheckpoint(f"there is no checkpoint {path}: give the path of a .ckpt file")
    try:
        state = read_torch_file(path, map_location=map_location, bare_pickles=False)
    except UnreadableWeightsError as error:
        raise DamagedCheckpoint(str(error)) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        found = sorted(map(str, state))[:8] if isinstance(state, dict) else type(state).__name__
        raise DamagedCheckpoint(
            f"{path} is no checkpoint of a run (found: {found}): expected a dictionary with "
            "state_dict; give RUN_DIR/checkpoints/best.ckpt"
        )
    return state


def has_saved(folder: Path) -> bool:
    """Whether a run has saved a state to go on from."""
    return (folder / LAST).exists() or (folder / PREVIOUS).exists()


def read_last(
    folder: Path, check: Callable[[dict[str, Any]], None] = lambda state: None
) -> tuple[Path, dict[str, Any]]:
    """The newest good state of a run: ``last.ckpt``, or ``previous.ckpt`` where that is damaged.

    A damaged ``last.ckpt`` is set aside under another name, so that it never becomes the previous
    one.

    Args:
        folder: of the checkpoints.
        check: raises a :class:`DamagedCheckpoint` for what is readable and yet no state to go on
            from, and another error for what is to be refused, whatever else is there.

    Returns:
        The path that was read and its content.

    Raises:
        DamagedCheckpoint: if neither is good.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    try:
        return last, _checked(last, check)
    except DamagedCheckpoint as error:
        if not previous.exists():
            raise
        damage = error
    try:
        state = _checked(previous, check)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(f"{damage}; nor can the one before it be used: {error}") from None
    log.warning("%s; going on from %s, which was saved before it", damage, previous)
    if last.exists() and is_first_process():
        last.replace(last.with_name(f"{LAST}.damaged"))
    return previous, state


def _checked(path: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = read_checkpoint(path)
    try:
        check(state)
    except DamagedCheckpoint as error:
        raise DamagedCheckpoint(
            f"{path} is damaged ({error}): restore it from a copy, or begin a new run"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return state


class PlainCheckpointIO(CheckpointIO):
    """What Lightning writes and reads checkpoints with in every run."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        write_checkpoint(checkpoint, Path(path))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The content of the file, on the CPU; always read as plain data."""
        return read_checkpoint(path, map_location=map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)
