"""Distributed checkpoints: a folder to which each process has written its parts of the tensors.

``meta.pt`` holds the state as a checkpoint in one file does. Instead of each divided tensor it has
an empty one on the device ``"meta"``, and the checksums of the files with its parts. These are
safetensors of :mod:`torch.distributed.checkpoint`, whose own format is pickled and can run code.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.utils._pytree import KeyPath, tree_map_with_path

from revzoo.weights.errors import REMEDY, UnreadableWeightsError
from revzoo.weights.source import PLAIN_PART, is_distributed

FILES = "*.safetensors"
Keys = tuple[Any, ...]


def take_apart(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """``state`` with empty tensors instead of the divided ones, and these by :func:`name_of`."""
    divided: dict[str, Tensor] = {}

    def emptied(path: KeyPath, value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        divided[name_of(keys_in(path))] = value
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return tree_map_with_path(emptied, state), divided


def is_empty(value: Any) -> bool:
    """Whether ``value`` stands for a divided tensor."""
    return isinstance(value, Tensor) and value.is_meta


def keys_in(path: KeyPath) -> Keys:
    """The keys and positions of torch's ``path``."""
    return tuple(getattr(step, "key", getattr(step, "idx", step)) for step in path)


def name_of(keys: Keys) -> str:
    """The name of a tensor in the files: ``state_dict.model.head.weight``."""
    return ".".join(map(str, keys))


def checksum(path: Path) -> int:
    """The CRC-32 of a file."""
    total = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            total = zlib.crc32(block, total)
    return total


def check_whole(folder: Path, content: Any) -> dict[str, Any]:
    """The state in ``content`` of ``meta.pt``, after a check of the files that it names.

    Raises:
        UnreadableWeightsError: it names none, or one is missing, damaged or of another checkpoint.
    """
    parts: Mapping[str, Any] = content if isinstance(content, dict) else {}
    state, named = parts.get("state"), parts.get("checksums")
    if not isinstance(state, dict) or not isinstance(named, dict):
        raise UnreadableWeightsError(
            f"{folder / PLAIN_PART} does not describe a distributed checkpoint: it lacks the state "
            f"or the checksums: {REMEDY}"
        )
    files = {file.name: file for file in folder.glob(FILES)}
    for name in sorted({*map(str, named), *files}):
        if (file := files.get(name)) is None or not file.is_file():  # a pipe would block
            what = "is not a file in the folder"
        elif type(known := named.get(name)) is not int or known != checksum(file):
            what = "is damaged, or of another save"
        else:
            continue
        raise UnreadableWeightsError(f"{folder} is not whole: {name} {what}: {REMEDY}")
    return state


def filled(state: Any, folder: Path, make: Callable[[Keys, Any], Any]) -> Any:
    """``state`` with ``make(keys, value)`` for each value; reads what it makes of an empty tensor.

    A process reads only its part of a ``DTensor``, without the others.

    Raises:
        UnreadableWeightsError: the files in ``folder`` lack a tensor, or its shape differs.
    """
    tensors: dict[str, Tensor] = {}
    reader = HuggingFaceStorageReader(str(folder))

    def made(path: KeyPath, value: Any) -> Any:
        keys = keys_in(path)
        if not is_empty(value):
            return make(keys, value)
        # torch leaves values without a part as they are in memory
        if (name := name_of(keys)) in tensors or not is_whole(value, saved.get(name)):
            raise ValueError(f"the parts of {name} are not those of {tuple(value.shape)}")
        tensors[name] = make(keys, value)
        return tensors[name]

    try:
        saved = reader.read_metadata().state_dict_metadata if is_distributed(folder) else {}
        state = tree_map_with_path(made, state)
        if tensors:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # on purpose
                state_dict_loader.load(tensors, storage_reader=reader, no_dist=True)
    except torch.OutOfMemoryError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        reason = " ".join(str(error).split())[-200:]
        raise UnreadableWeightsError(
            f"{folder} does not hold the tensors that it names ({reason}): {REMEDY}"
        ) from None
    return state


def is_whole(value: Tensor, saved: Any) -> bool:
    """Whether the ``saved`` parts are the rows of a tensor like ``value``, each row once."""
    rows = 0
    for part in sorted(saved.chunks if saved else (), key=lambda part: (part.offsets, part.sizes)):
        first, *others = part.offsets
        if first != rows or any(others) or part.sizes[1:] != value.shape[1:]:
            return False
        rows += part.sizes[0]
    return value.shape[:1] == (rows,)


def whole(device: Any, _: Keys, value: Any) -> Any:
    """A tensor on ``device`` for an empty one; another value as it is."""
    return torch.empty_like(value, device=device) if is_empty(value) else value
