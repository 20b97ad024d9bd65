"""From an entry to verified bytes: beside the entry, in the cache, from its address."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from revzoo.weights.download import download, sha256_of
from revzoo.weights.entry import HUB, WeightsEntry
from revzoo.weights.errors import HashMismatchError, UnknownWeightsError
from revzoo.weights.hub import fetch


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """``cache_dir``, else ``$REVZOO_CACHE``, else ``revzoo`` in the user's cache folder (XDG)."""
    if cache_dir is not None:
        return Path(cache_dir)
    if own := os.environ.get("REVZOO_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "revzoo"


def read_bytes(entry: WeightsEntry, *, cache_dir: str | Path | None = None) -> bytes:
    """The file of ``entry``: beside it, from the cache, or downloaded into the cache.

    Raises:
        UnknownWeightsError: it is in neither place and has no address.
        HashMismatchError: it is another file than the entry describes.
        DownloadError: it could not be downloaded.
        HubError: it is on the hub, which cannot be used.
    """
    path = _locate(entry, cache_dir)
    data = path.read_bytes()
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise HashMismatchError(
            f"{path} ({len(data)} bytes) has sha256 {found}; {entry.name} expects {entry.sha256}: "
            "the file is damaged, incomplete or another one. Fetch it again"
        )
    return data


def _locate(entry: WeightsEntry, cache_dir: str | Path | None) -> Path:
    if entry.folder is not None and entry.file is not None:
        beside = entry.folder / entry.file
        if beside.is_file():
            return beside
    if entry.url is not None and entry.url.startswith(HUB):
        return fetch(entry.url, entry.file or "model.safetensors", cache_dir=cache_dir)
    # the hash in the name: another version of the weights is another file
    cached = cache_folder(cache_dir) / f"{entry.name}-{entry.sha256[:16]}.safetensors"
    if cached.is_file() and sha256_of(cached) == entry.sha256:
        return cached
    if entry.url is None:
        raise UnknownWeightsError(
            f"the file of {entry.name} is neither {entry.folder}/{entry.file} nor {cached}, and "
            "the entry has no url: put it there, or give checkpoint_path"
        )
    download(entry.url, cached, sha256=entry.sha256)
    return cached
