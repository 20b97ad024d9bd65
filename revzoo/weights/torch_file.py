"""Reads files of ``torch.save`` as plain data, at most as large as the file.

``torch.load`` checks neither the end of its archive nor its checksums. It also trusts the shapes in
the file: a tensor with stride 0 may repeat one value, so a file of 2 kB takes gigabytes once
something computes with the tensor.

We read three formats:

* ZIP archives (torch 1.6 and later), not compressed, with a CRC-32 of each part, which we verify;
* ZIP archives without CRC-32 (``torch.serialization.set_crc32_options(False)``);
* bare pickles (torch 0.2 to 1.5). The last two have no checksums, so damage may go unnoticed, and
  we log a warning.

:mod:`revzoo.weights.pickles` first refuses pickles that need more memory than their length
suggests. :mod:`revzoo.weights` does not import this module, since it works without torch.
"""

from __future__ import annotations

import io
import logging
import re
import tarfile
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from revzoo.weights.errors import UnreadableWeightsError
from revzoo.weights.pickles import CONTAINERS, check_nesting, check_pickles

_MAGIC = b"PK\x03\x04"  # torch.load reads files that begin with this as archives
_BARE_PICKLES = 5  # magic number, version, machine, content, storages
_REMEDY = "use another copy of it, or another checkpoint of the run"

log = logging.getLogger(__name__)


def read_torch_file(
    path: Path, *, map_location: Any = "cpu", bare_pickles: bool = True, fallback_pickle: Any = None
) -> Any:
    """The content of a file: containers of plain values and dense tensors.

    Args:
        path: a regular file.
        map_location: the device of the tensors, as in ``torch.load``.
        bare_pickles: also read files from before torch 1.6.
        fallback_pickle: a ``pickle_module`` as in ``torch.load``, for files that
            ``weights_only=True`` refuses. It must not run code from the file.

    Raises:
        UnreadableWeightsError: the file is missing or damaged, holds objects whose loading could
            run code, or tensors that need more memory than the file has bytes.
    """
    if not path.is_file():
        raise UnreadableWeightsError(f"there is no file {path}: give the path of a checkpoint")
    # without bare pickles, a file that does not begin like an archive is damaged
    is_archive = not bare_pickles or _is_archive(path)
    if not is_archive and tarfile.is_tarfile(path):
        raise UnreadableWeightsError(
            f"{path} is a tar file, the format of torch 0.1: load and save it with torch 0.2 to 1.5"
        )
    if not (is_archive and check_archive(path)):
        log.warning(
            "%s has no checksums, so damage would go unnoticed: save it again with a recent torch",
            path,
        )
    try:
        content = _load(path, is_archive, map_location, fallback_pickle)
    except Exception as error:  # damaged pickles raise many types
        # not torch's whole message, which recommends weights_only=False
        named = re.search(r"GLOBAL (\S+)", str(error))
        reason = str(error).rpartition("WeightsUnpickler error: ")[2]
        reason = f"it names {named[1]}" if named else " ".join(reason.split())[:200]
        raise UnreadableWeightsError(
            f"{path} is damaged, or holds more than plain values and tensors: it was not loaded, "
            f"since loading it could run code ({type(error).__name__}: {reason}); expected a "
            "state_dict: a dense tensor by each name"
        ) from None
    try:
        check_nesting(content, str(path))
    except UnreadableWeightsError as error:
        raise UnreadableWeightsError(f"{error}: it was not loaded; {_REMEDY}") from None
    check_tensors(_tensors_in(content), path)
    return content


def _load(path: Path, is_archive: bool, map_location: Any, fallback_pickle: Any) -> Any:
    try:
        # torch.load would hang on a hostile pickle, so these go first
        if is_archive:
            with zipfile.ZipFile(path) as archive:
                for content in _pickles_in(archive):
                    check_pickles(io.BytesIO(content))
        else:
            with path.open("rb") as file:
                check_pickles(file, _BARE_PICKLES)
        return torch.load(path, map_location=map_location, weights_only=True)
    except Exception:  # several types, for different unknown objects
        if fallback_pickle is None:
            raise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the source code of a pickled model is missing
        return torch.load(
            path, map_location=map_location, weights_only=False, pickle_module=fallback_pickle
        )


def _is_archive(path: Path) -> bool:
    """Whether ``torch.load`` reads the file as an archive, and not as a bare pickle."""
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def check_archive(path: Path) -> bool:
    """Refuse an incomplete or damaged archive; returns whether it has checksums.

    Raises:
        UnreadableWeightsError: the archive is truncated, damaged or compressed (``torch.save``
            never compresses), or its parts overlap and are larger than the file.
    """
    size = path.stat().st_size
    try:
        with zipfile.ZipFile(path) as archive:
            # set_crc32_options(False) writes 0 for every part
            has_checksums = any(entry.CRC for entry in archive.infolist())
            fault = _fault_of(archive, size, has_checksums=has_checksums)
    except Exception as error:  # damaged archives raise many types
        fault = f"is cut off or not a checkpoint ({size:,} bytes, {error})"
    if fault:
        raise UnreadableWeightsError(f"{path} {fault}: it was not loaded; {_REMEDY}")
    return has_checksums


def _fault_of(archive: zipfile.ZipFile, size: int, *, has_checksums: bool) -> str | None:
    entries = archive.infolist()
    if any(entry.filename.endswith("/constants.pkl") for entry in entries):
        return "is a TorchScript archive, which holds a program; save the module's state_dict"
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return "is compressed, which files of torch.save never are"
    if sum(entry.file_size for entry in entries) > size:  # overlapping entries share bytes
        return f"would take more memory than its {size:,} bytes, unlike files of torch.save"
    damaged = archive.testzip() if has_checksums else None
    return damaged and f"is damaged: the checksum of {damaged} does not match"


def _pickles_in(archive: zipfile.ZipFile) -> Iterator[bytes]:
    for entry in archive.infolist():
        if entry.filename.endswith(".pkl"):
            if not entry.CRC:  # no checksum in the file; with None, read() does not verify it
                entry.CRC = None  # type: ignore[assignment]
            yield archive.read(entry)


def _tensors_in(content: Any) -> Iterator[tuple[str, Tensor]]:
    """All tensors in the containers, with the nearest string key above each."""
    pending, seen = [("", content)], set()  # by id: check_nesting allows shared containers
    while pending:
        name, value = pending.pop()
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, CONTAINERS) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else ((name, item) for item in value)
            pending += [(key if isinstance(key, str) else name, item) for key, item in items]


def check_tensors(tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Refuse tensors that are not dense, or need more memory than the file has bytes.

    Allocates nothing.

    Raises:
        UnreadableWeightsError: names the tensor.
    """
    size, total, seen = path.stat().st_size, 0, set()
    for name, tensor in tensors:
        if not is_dense(tensor):
            raise UnreadableWeightsError(
                f"{path} does not hold only tensors: {name or 'one'} is {tensor.layout} "
                f"{tensor.dtype} on {tensor.device}; expected a state_dict: a dense tensor by each "
                "name"
            )
        storage = tensor.untyped_storage()
        held, needed = storage.nbytes(), tensor.numel() * tensor.element_size()
        if storage._cdata not in seen:  # tied weights share a storage, which counts once
            seen.add(storage._cdata)
            total += held
        # needed > held: expand() makes a tensor of any size from one number
        if needed > held or total > size:
            raise UnreadableWeightsError(
                f"{path}: {name or 'a tensor'} of shape {tuple(tensor.shape)} takes {needed:,} "
                f"bytes, more than the file has for it ({min(held, size):,}): it was not loaded; "
                f"{_REMEDY}. If you made it with expand(), save tensor.clone()"
            )


def is_dense(value: Any) -> bool:
    """Whether ``value`` is a strided tensor in memory, not quantised, meta or nested."""
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_quantized or value.is_meta or value.is_nested)
    )
