"""Decoded images on disk: the next run on the same files starts without decoding them.

An entry is a safetensors file with all pixels of a split. Its name is a hash of the paths, sizes
and times of the files and of their preparation, so a changed file makes a new entry. An entry is
written whole or not at all, and readable by its user alone. The least recently used entries go
when all together exceed :data:`LIMIT`.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from revzoo._checks import is_first_process
from revzoo._files import remove_oldest, replacing
from revzoo.weights.files import cache_folder

AUTO = "auto"
"""The value of ``cache_dir`` for the user's cache folder."""

LIMIT = 16 * 2**30
"""Bytes of all entries."""

WORTH = 1.0
"""Seconds of decoding from which an entry is written."""

_SUFFIX = ".safetensors"
_FORMAT = 2  # of the entries and of the decoders: raise it when they give other pixels

log = logging.getLogger(__name__)


def entry_of(cache_dir: str | None, paths: Iterable[str], preparation: object) -> Path | None:
    """The path of the entry of these files; None if the cache is off or a file is missing."""
    if cache_dir is None:
        return None
    folder = cache_folder() / "images" if cache_dir == AUTO else Path(cache_dir).expanduser()
    digest = hashlib.sha256(repr((_FORMAT, preparation)).encode())
    try:
        for path in paths:
            facts = os.stat(path)  # noqa: PTH116  # a Path for each of a million files takes seconds
            digest.update(os.fsencode(path) + b"\0%d %d\0" % (facts.st_size, facts.st_mtime_ns))
    except OSError:
        return None
    return folder / f"{digest.hexdigest()[:40]}{_SUFFIX}"


def load(entry: Path | None) -> dict[str, Tensor]:
    """The tensors of an entry; empty without one, or if it is damaged."""
    if entry is None or not entry.is_file():
        return {}
    try:
        tensors = load_file(entry)
        os.utime(entry)  # the time of the last use
    except (OSError, SafetensorError) as error:
        log.warning("the decoded images in %s cannot be read (%s): decoding again", entry, error)
        return {}
    return tensors


def store(entry: Path | None, tensors: Mapping[str, Tensor]) -> None:
    """Write an entry, and remove the oldest ones above :data:`LIMIT`. A full disk only warns."""
    size = sum(tensor.nbytes for tensor in tensors.values())
    if entry is None or size > LIMIT or not is_first_process():
        return
    try:
        entry.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if shutil.disk_usage(entry.parent).free < 2 * size:
            return
        with replacing(entry) as file:
            save_file(dict(tensors), file)
        # also what a run that was killed while it wrote has left
        remove_oldest(entry.parent.glob(f"*{_SUFFIX}"), LIMIT, keep=entry)
    except OSError as error:
        log.warning("the decoded images are not kept for the next run: %s", error)
