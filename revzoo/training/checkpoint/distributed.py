"""Writes distributed checkpoints: each process its own parts of the tensors, to one folder.

See :mod:`revzoo.models.checkpoint_folder` for what a folder holds, and NOTE [ A good checkpoint at
every instant ] for kills.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import distributed
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from revzoo.models.checkpoint_folder import FILES, checksum, take_apart
from revzoo.training.checkpoint.files import (
    CheckpointError,
    PlainCheckpointIO,
    UnwritableCheckpointError,
    put,
    read_checkpoint,
    remove,
    save_plain,
    temporary_of,
    unwritable,
)
from revzoo.training.lightning_compat import gathered
from revzoo.weights.source import PLAIN_PART

T = TypeVar("T")


class DistributedCheckpointIO(PlainCheckpointIO):
    """Writes folders; reads them without the values of divided tensors. All processes save."""

    def write(self, state: Mapping[str, Any], path: Path) -> None:
        write_distributed(state, path)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: Any = None) -> Any:
        return read_checkpoint(path, values=False)


def write_distributed(state: Mapping[str, Any], path: Path) -> None:
    """Write ``state`` to the folder ``path``. All processes call this; all raise, or none.

    Raises:
        CheckpointError: see :func:`~revzoo.training.checkpoint.files.write_checkpoint`.
        UnwritableCheckpointError: the disk refuses a file, or the machines do not share the folder.
    """
    temporary, rank = temporary_of(path), distributed.get_rank()
    plain, divided = take_apart(state)
    if rank == 0:
        remove(temporary)  # what a kill has left
    named: dict[str, int] = {}

    def sums() -> dict[str, int]:
        own = temporary.glob(f"shard-{rank + 1:05}-{FILES}")
        return {file.name: checksum(file) for file in own}

    def finish() -> None:
        if wrong := named.keys() ^ {file.name for file in temporary.glob(FILES)}:
            raise UnwritableCheckpointError(
                f"{path} is not written: another machine has written {min(wrong)}, and this one "
                "does not see it, or an earlier save has left it; give hydra.run.dir on a file "
                f"system that all machines share, or remove {temporary}"
            )
        save_plain({"state": plain, "checksums": named}, temporary / PLAIN_PART, path)
        put(temporary, path)

    try:
        writer = HuggingFaceStorageWriter(str(temporary), save_distributed=True)
        state_dict_saver.save(divided, storage_writer=writer)
        for own_sums in together(path, sums):
            named.update(own_sums)
        together(path, lambda: finish() if rank == 0 else None)
    except CheckpointException as error:  # the same in all processes
        cause, _ = next(iter(error.failures.values()))
        raise unwritable(path, cause) from None
    finally:
        if rank == 0:
            remove(temporary)


def together(path: Path, work: Callable[[], T]) -> list[T]:
    """The results of ``work`` in all processes, or the first error of one of them in each."""
    result: Any = None
    error: Exception | None = None
    try:
        result = work()
    except CheckpointError as refused:
        error = refused
    except (OSError, RuntimeError) as refused:
        error = unwritable(path, refused)
    outcomes = gathered((result, error))
    for _, error in outcomes:
        if error is not None:
            raise error
    return [result for result, _ in outcomes]
