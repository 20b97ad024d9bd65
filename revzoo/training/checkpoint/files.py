"""Writes and reads checkpoint files: a kill never damages a file, reading never runs code.

Why not Lightning's writer: its temporary file may be on another file system, so that a move is a
copy, which a kill can cut short; and it never calls ``fsync``. Its reader runs the code of pickles
unless ``weights_only=True``, and ignores that option for URLs.

NOTE [ A good checkpoint at every instant ]
1. Write the new state to a temporary file in the folder of the checkpoint, and sync it.
2. If the file is ``last.ckpt``, give the old one a second name, ``previous.ckpt``, in one rename.
3. Rename the temporary file to the checkpoint, and sync the folder.
Before step 3 the old file is complete, after it the new file. The name of an incomplete file never
ends in ``.ckpt``. Without hard links, step 2 moves the old file: until the next rename, only
``previous.ckpt`` is complete.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import CheckpointIO
from torch import Tensor, nn

from revzoo._checks import UserError
from revzoo.models.weights_file import check_dense, check_finite, check_fit
from revzoo.training.distributed import is_first_process
from revzoo.weights.errors import UnreadableWeightsError
from revzoo.weights.run_files import LAST, PREVIOUS
from revzoo.weights.torch_file import (
    PLAIN,
    REMEDY,
    described,
    leaves,
    place,
    read_torch_file,
)

log = logging.getLogger(__name__)

TEMPORARY = ".saving"  # suffix of unfinished files
RETRY_AFTER = (1.0, 4.0)  # seconds between the attempts to write a checkpoint
GIVE_UP_AFTER = 3600.0  # a run ends after so many seconds without a successful save


# a RuntimeError as well, as torch raises for a state that does not fit
class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or used; the message says why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is missing or damaged; another one may be good."""


class UnwritableCheckpointError(CheckpointError):
    """The disk refuses a checkpoint; earlier files are intact."""


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write ``state`` to ``path``; see NOTE [ A good checkpoint at every instant ].

    A failed write is repeated after :data:`RETRY_AFTER`: network file systems report errors
    (``EIO``, ``ESTALE``) that disappear within a second.

    Raises:
        CheckpointError: ``state`` holds more than plain values and tensors. No file is written.
        UnwritableCheckpointError: each attempt failed. The old file is intact.
    """
    try:
        for keys, value in leaves(state, "checkpoint"):
            # a subclass, such as nn.Parameter, is another type: pickle writes its class
            if type(value) not in (Tensor, *PLAIN):
                raise UnreadableWeightsError(f"{place('checkpoint', keys)}: {described(value)}")
    except UnreadableWeightsError as error:
        raise CheckpointError(
            f"{error}; a checkpoint holds tensors, numbers, strings, lists and dictionaries only: "
            "convert the value before saving"
        ) from None
    for seconds in (*RETRY_AFTER, None):
        try:
            _write(state, path)
            return
        except (OSError, RuntimeError) as error:
            # not the disk's fault: another attempt would fail in the same way
            if not isinstance(error, OSError) and not _is_from_writer(error):
                raise
            if seconds is None:
                raise UnwritableCheckpointError(
                    f"cannot write {path} ({error}): earlier checkpoints are intact; free space on "
                    "the disk, or make the folder writable"
                ) from error
            log.warning("cannot write %s (%s): trying again in %g s", path, error, seconds)
            time.sleep(seconds)


def _is_from_writer(error: RuntimeError) -> bool:
    """Whether torch's archive writer failed: it reports a full disk as a RuntimeError."""
    return any(mark in str(error) for mark in ("enforce fail", "PytorchStreamWriter"))


def _write(state: Mapping[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # first: a killed run may have left a file as large as this one will be
    remove_stale(path.parent)
    temporary = path.with_name(f".{path.name}{TEMPORARY}")
    try:
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            # otherwise the disk may store the new name before the content
            os.fsync(file.fileno())
        # a kill before the rename below leaves a good previous.ckpt
        if path.name == LAST and path.exists():
            _keep_previous(path)
        temporary.replace(path)
        # a rename changes the folder, which has its own cache
        _sync_folder(path.parent)
    finally:
        # after a rename it is gone; the disk may refuse as before
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _keep_previous(path: Path) -> None:
    previous = path.with_name(PREVIOUS)
    link = path.with_name(f".{PREVIOUS}{TEMPORARY}")
    try:
        link.hardlink_to(path)  # last.ckpt keeps its name: a kill here loses nothing
    except OSError:  # the file system has no hard links
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
    """Remove unfinished files of a killed run. Safe: a run's folder has one writer at a time."""
    for path in folder.glob(f".*.ckpt{TEMPORARY}"):
        path.unlink(missing_ok=True)


def read_checkpoint(path: str | Path, *, map_location: Any = "cpu") -> dict[str, Any]:
    """Read a checkpoint: plain values and tensors. No code in the file runs.

    Raises:
        DamagedCheckpointError: the file is missing, cut off or damaged, holds more than plain data,
            nests containers too deeply, or has a tensor that is larger than its stored values.
    """
    path = Path(path)
    if not path.is_file():
        raise DamagedCheckpointError(
            f"there is no checkpoint {path}: expected the path of a .ckpt file"
        )
    try:
        state = read_torch_file(path, map_location=map_location)
    except UnreadableWeightsError as error:
        raise DamagedCheckpointError(str(error)) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        # the keys show the kind of the file
        got = sorted(map(str, state))[:8] if isinstance(state, dict) else type(state).__name__
        raise DamagedCheckpointError(
            f"{path} is not a checkpoint of a run: got {got}, expected a dictionary with "
            "state_dict; give RUN_DIR/checkpoints/best.ckpt"
        )
    return state


def load_tensors(
    module: nn.Module, state: Mapping[str, Any], where: str, *, strict: bool = True
) -> None:
    """Load the ``state_dict`` of a checkpoint after checking its names, shapes and values.

    Why not torch's ``load_state_dict`` alone: it raises many types of errors for wrong names and
    values, and accepts NaN, and complex numbers for real ones.

    Args:
        module: its state may hold more than tensors (``get_extra_state``); that part is loaded
            unchecked.
        state: possibly from an untrusted file.
        where: the file, for errors.
        strict: whether the names must be exactly ``module``'s.

    Raises:
        CheckpointError: names or shapes do not fit, a value is not a tensor, or a tensor has NaN or
            Inf. ``module`` is unchanged.
    """
    # check everything before the first tensor changes
    known = module.state_dict()
    expected = {key: value for key, value in known.items() if isinstance(value, Tensor)}
    tensors = {key: value for key, value in state.items() if key in expected or key not in known}
    try:
        check_dense(tensors, where)
        if not strict:
            # names may differ, but shapes of shared names may not
            shared = expected.keys() & tensors.keys()
            expected, tensors = ({key: d[key] for key in shared} for d in (expected, tensors))
        check_fit(expected, tensors, where)
        check_finite(tensors, where, expected)
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:  # from torch, or a WeightsError
        raise CheckpointError(str(error)) from None


def has_saved(folder: Path) -> bool:
    """Whether the folder has a checkpoint to resume from."""
    # a kill between two renames can leave previous.ckpt alone
    return (folder / LAST).exists() or (folder / PREVIOUS).exists()


def read_last(
    folder: Path, check: Callable[[dict[str, Any]], None] = lambda state: None
) -> tuple[Path, dict[str, Any]]:
    """The newest good state of a run: ``last.ckpt``, or ``previous.ckpt`` if that is damaged.

    A damaged ``last.ckpt`` is renamed, so that the next save does not make it ``previous.ckpt``.

    Args:
        folder: of the checkpoints.
        check: raises a :class:`DamagedCheckpointError` to fall back to the previous checkpoint, and
            another error to refuse both.

    Returns:
        The path that was read and its content.

    Raises:
        DamagedCheckpointError: both are damaged.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    try:
        return last, _checked(last, check)
    except DamagedCheckpointError as error:
        if not previous.exists():
            raise
        # Python deletes the name of an exception after its handler
        damage = error
    try:
        state = _checked(previous, check)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(f"{damage}; the one before it, too: {error}") from None
    what = str(damage).partition(f": {REMEDY}")[0]  # without the remedy: we have one
    log.warning("%s; resuming from %s, the checkpoint before it", what, previous)
    # the other processes only read
    if last.exists() and is_first_process():
        last.replace(last.with_name(f"{LAST}.damaged"))
    return previous, state


def _checked(path: Path, check: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    state = read_checkpoint(path)
    try:
        check(state)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{path} is damaged ({error}): restore it from a copy, or the run's configuration, if "
            "someone has changed that; or begin a new run"
        ) from None
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    return state


class PlainCheckpointIO(CheckpointIO):
    """Writes and reads the checkpoints of every run for Lightning.

    A failed save is logged as an error, and training continues: earlier checkpoints are good. The
    run ends only if no save has succeeded for :data:`GIVE_UP_AFTER`.

    Attributes:
        failed: for each path whose last save failed, the reason.
    """

    def __init__(self) -> None:
        self.failed: dict[Path, str] = {}
        self._failing_since: float | None = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write ``checkpoint``, or record the reason of a failure in ``failed``.

        Raises:
            CheckpointError: it is not plain data, or saving has failed for too long.
        """
        path, now = Path(path), time.monotonic()
        try:
            write_checkpoint(checkpoint, path)
        except UnwritableCheckpointError as error:
            self.failed[path] = str(error)
            # a success in between starts the hour again
            self._failing_since = self._failing_since or now
            if now - self._failing_since > GIVE_UP_AFTER:
                raise
            log.error("%s. The run continues without this checkpoint", error)
        else:
            self.failed.pop(path, None)
            self._failing_since = None

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read the file as plain data, onto the CPU by default."""
        return read_checkpoint(path, map_location=map_location or "cpu")

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def was_saved(trainer: pl.Trainer, path: Path) -> bool:
    """Whether the last save to ``path`` succeeded; the same answer in all processes."""
    # a user's trainer may have another plugin
    saved = path not in getattr(trainer.strategy.checkpoint_io, "failed", {})
    return trainer.strategy.broadcast(saved)  # only process 0 writes
