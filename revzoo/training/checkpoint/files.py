"""Writes and reads checkpoint files: a kill never damages a file, reading never runs code.

Lightning's writer may move a file between file systems, which a kill can cut short, and never calls
``fsync``. With its reader, a file chooses which code is imported and which files are read. So we
check its hyperparameters against an exact list: the names of the zoo, whose constructors refuse
unknown options and wrong values, as your own networks should.

NOTE [ A good checkpoint at every instant ]
1. Write the new state to a temporary file in the folder of the checkpoint, and sync it.
2. If the file is ``last.ckpt``, link the old one as ``previous.ckpt``; without hard links, move it.
3. Rename the temporary file to the checkpoint, and sync the folder.
So a kill leaves the old file, the new one or both. No incomplete file has a name in ``.ckpt``. The
same holds for the folders of distributed checkpoints; but no rename replaces a folder, so a kill
between two renames may leave ``best.ckpt`` as ``.best.ckpt.replaced``.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.plugins import CheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from revzoo._checks import UserError, shortened
from revzoo.models.registry import MODELS, WEIGHTS_ARGUMENTS
from revzoo.models.weights_file import read_torch_file
from revzoo.training.lightning_compat import is_first_process
from revzoo.weights.errors import REMEDY, UnreadableWeightsError
from revzoo.weights.source import LAST, PREVIOUS

log = logging.getLogger(__name__)

TEMPORARY = ".saving"  # suffix of unfinished checkpoints
REPLACED = ".replaced"  # and of those that will be removed
GIVE_UP_AFTER = 3600.0  # a run ends after so many seconds without a successful save
HYPERPARAMETERS = ("model", "optim", "channels_last")
SCALARS = (str, int, float, bool, type(None))  # by exact type; no subclasses


# a RuntimeError as well, as torch raises for a state that does not fit
class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or used; the message says why and what to do."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is missing or damaged; another one may be good."""


class UnwritableCheckpointError(CheckpointError):
    """The disk refuses a checkpoint; earlier files are intact."""


def write_checkpoint(state: Mapping[str, Any], path: Path) -> None:
    """Write ``state`` to ``path``; see NOTE [ A good checkpoint at every instant ].

    Raises:
        CheckpointError: ``torch.load(weights_only=True)`` would refuse an object in ``state``.
        UnwritableCheckpointError: the disk refuses the file.
    """
    temporary = temporary_of(path)
    try:
        remove(temporary)  # what a kill has left may be a folder
        path.parent.mkdir(parents=True, exist_ok=True)
        save_plain(state, temporary, path)
        put(temporary, path)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as the latter
        raise unwritable(path, error) from error
    finally:
        remove(temporary)  # after a rename it is gone


def temporary_of(path: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    # always the same name: the next save overwrites what a kill leaves
    return path.with_name(f".{path.name}{TEMPORARY}")


def unwritable(path: Path, error: BaseException) -> UnwritableCheckpointError:
    """The error of a disk that refuses ``path``."""
    return UnwritableCheckpointError(
        f"cannot write {path} ({error}): earlier checkpoints are intact; free space on the "
        "disk, or make the folder writable"
    )


def save_plain(state: Mapping[str, Any], file: Path, path: Path) -> None:
    """Write ``state`` to ``file``, and sync it; ``path`` is the checkpoint's, for the error.

    Raises:
        CheckpointError: ``torch.load(weights_only=True)`` would refuse an object in ``state``.
    """
    torch.save(state, file)
    _sync(file)  # otherwise the disk may store the new name before the content
    if unsafe := get_unsafe_globals_in_checkpoint(file):
        raise CheckpointError(
            f"{path} is not written, since no run could read it: its state holds "
            f"{shortened(sorted(unsafe))}; expected tensors, numbers, strings, lists and "
            "dictionaries only: convert the value in state_dict() or the hyperparameters"
        )


def put(temporary: Path, path: Path) -> None:
    """Rename a whole checkpoint to ``path``, and keep the old one if it is ``last.ckpt``."""
    if temporary.is_dir():
        _sync(temporary)  # its names
    is_last, folders = path.name == LAST, path.is_dir() or temporary.is_dir()
    old = path.with_name(PREVIOUS) if is_last else hidden(path)
    if path.exists() and (is_last or folders):
        remove(old)
        if not folders:
            with suppress(OSError):  # some file systems have no hard links
                old.hardlink_to(path)
        if not old.exists():  # no rename replaces a folder
            path.rename(old)
    temporary.replace(path)
    _sync(path.parent)
    if not is_last:
        remove(old)


def hidden(path: Path) -> Path:
    """The name of a folder that is being removed: a kill leaves no part of it under its own."""
    return path.with_name(f".{path.name}{REPLACED}")


def remove(path: Path) -> None:
    """Remove a checkpoint, a file or a folder, if there is one and the system lets us."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        if path.suffix == ".ckpt":
            remove(hidden(path))
            path = path.rename(hidden(path))
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_checkpoint(
    path: str | Path, *, map_location: Any = "cpu", values: bool = True
) -> dict[str, Any]:
    """Read a checkpoint: plain values and tensors. No code in the file runs.

    Without ``values``, the divided tensors of a distributed checkpoint are empty.

    Raises:
        DamagedCheckpointError: the file is missing, cut off or damaged, or holds other objects.
    """
    try:
        state = read_torch_file(Path(path), map_location=map_location, values=values)
    except UnreadableWeightsError as error:
        raise DamagedCheckpointError(str(error)) from None
    if not isinstance(state, dict) or not isinstance(state.get("state_dict"), dict):
        got = sorted(map(str, state))[:8] if isinstance(state, dict) else type(state).__name__
        raise DamagedCheckpointError(
            f"{path} is not a checkpoint of a run: got {got}, expected a dictionary with "
            "state_dict; give RUN_DIR/checkpoints/best.ckpt"
        )
    return state


def has_saved(folder: Path) -> bool:
    """Whether the folder has a checkpoint to resume from."""
    # a kill between two renames can leave previous.ckpt alone
    return (folder / LAST).exists() or (folder / PREVIOUS).exists()


def read_last(
    folder: Path, check: Callable[[dict[str, Any], Path], None] = lambda state, path: None
) -> tuple[Path, dict[str, Any]]:
    """The newest good state of a run and its path: ``last.ckpt``, or ``previous.ckpt``.

    A damaged ``last.ckpt`` is renamed, so that the next save does not make it ``previous.ckpt``.
    ``check`` gets a content, without the values of divided tensors, and its path; its
    :class:`DamagedCheckpointError` falls back to ``previous.ckpt``, another error refuses both.

    Raises:
        DamagedCheckpointError: both are damaged.
    """
    last, previous = folder / LAST, folder / PREVIOUS
    damages: list[str] = []
    for path in (last, previous) if previous.exists() else (last,):
        try:
            check(state := read_checkpoint(path, values=False), path)
        # another process has renamed it
        except (DamagedCheckpointError, FileNotFoundError) as error:
            damages.append(str(error))
            continue
        if damages and is_first_process():
            what = damages[0].partition(f": {REMEDY}")[0]  # without the remedy: we have one
            log.warning("%s; resuming from %s, the checkpoint before it", what, path)
            if last.exists():
                remove(damaged := last.with_name(f"{LAST}.damaged"))
                last.rename(damaged)
        return path, state
    raise DamagedCheckpointError("; the one before it, too: ".join(damages))


class PlainCheckpointIO(CheckpointIO):
    """Writes and reads the checkpoints of every run for Lightning.

    A failed save is logged as an error, and training continues: earlier checkpoints are good. The
    run ends only if no save has succeeded for :data:`GIVE_UP_AFTER`.
    """

    def __init__(self) -> None:
        self.failed: dict[Path, str] = {}  # for each path whose last save failed, the reason
        self._failing_since: float | None = None

    def write(self, state: Mapping[str, Any], path: Path) -> None:
        write_checkpoint(state, path)

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        path, now = Path(path), time.monotonic()
        try:
            self.write(checkpoint, path)
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

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return read_checkpoint(path, map_location=map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        remove(Path(path))


def check_hyperparameters(values: Any, *, replaced: Container[str] = ()) -> dict[str, Any]:
    """Return ``values`` if they are hyperparameters of :class:`~revzoo.training.Classifier`.

    Keys in ``replaced``, which the caller overrides, may be missing, or unknown to a classifier.

    Raises:
        CheckpointError: naming the key.
    """
    if not isinstance(values, dict) or ("model" not in values and "model" not in replaced):
        raise CheckpointError(
            "the checkpoint has no hyperparameters of a model: it was trained on a module passed "
            "as an instance; create that module again and pass it as model=..."
        )
    for key in values:
        if key not in HYPERPARAMETERS and key not in replaced:
            raise _refused(
                key,
                f"expected only {', '.join(HYPERPARAMETERS)}; pass the parameters of a subclass "
                f"to load_from_checkpoint: {key}=...",
            )
    if "model" in values:
        check_model_options(values["model"])
    return values


def check_model_options(options: Any) -> dict[str, Any]:
    """Return ``options`` if they are the name of a model and plain keywords."""
    name = options.get("name") if isinstance(options, dict) else options
    if not isinstance(options, dict) or not isinstance(name, str) or name not in MODELS:
        raise _refused("model.name", f"got {name!r:.80}, expected one of list_models()")
    for key, value in options.items():
        if key in WEIGHTS_ARGUMENTS:  # checkpoint_path would read a file of the sender's choice
            raise _refused(f"model.{key}", "a checkpoint contains the weights; remove the key")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if type(item) not in SCALARS:
                raise _refused(f"model.{key}", f"got {item!r:.80}, expected numbers or words")
    return options


def _refused(key: object, why: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint's hyperparameter {key} is refused: {why}")
