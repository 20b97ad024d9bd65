"""Finds, downloads and verifies the file of an entry, from the web or the Hugging Face hub.

A repository of the hub holds ``config.json`` (the entry), ``model.safetensors`` and ``README.md``
(the card). The package ``huggingface_hub`` (the extra ``hub``) talks to it.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any

from revzoo._checks import package_needed
from revzoo._files import file_name
from revzoo.weights.entry import HUB, WEB, WeightsEntry
from revzoo.weights.errors import DownloadError, HashMismatchError, HubError, UnknownWeightsError

TENSORS_FILE = "model.safetensors"


def cache_folder(cache_dir: str | Path | None = None) -> Path:
    """``cache_dir``, else ``$REVZOO_CACHE``, else ``revzoo`` in the user's cache folder (XDG)."""
    if folder := cache_dir or os.environ.get("REVZOO_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME")  # empty counts as unset, as XDG asks
    return (Path(base) if base else Path.home() / ".cache") / "revzoo"


def read_bytes(entry: WeightsEntry, *, cache_dir: str | Path | None = None) -> bytes:
    """The file of ``entry``: beside it, from the cache, or downloaded into the cache.

    Raises:
        UnknownWeightsError: the file is in neither place and the entry has no url.
        HashMismatchError: the file's hash differs from the entry's.
        DownloadError: the download failed.
        HubError: the file is on the hub, and fetching it failed.
    """
    path = _locate(entry, cache_dir)
    # hash the bytes in use: the file may change between two reads
    data = path.read_bytes()
    sha256 = hashlib.sha256(data).hexdigest()
    if sha256 != entry.sha256:
        raise HashMismatchError(
            f"{path} ({len(data)} bytes) has sha256 {sha256}; {entry.name} expects {entry.sha256}: "
            "the file is damaged, incomplete or a different one. Fetch it again"
        )
    return data


def _locate(entry: WeightsEntry, cache_dir: str | Path | None) -> Path:
    if entry.folder is not None and entry.file is not None:
        beside = entry.folder / entry.file
        if beside.is_file():
            return beside
    if entry.url is not None and entry.url.startswith(HUB):
        return fetch(entry.url, entry.file or TENSORS_FILE, cache_dir=cache_dir)
    # the hash in the name keeps versions of the weights apart
    assert entry.sha256 is not None  # only a publisher's file may lack it, and is read elsewhere
    cached = cache_folder(cache_dir) / f"{file_name(entry.name)}-{entry.sha256[:16]}.safetensors"
    # a damaged file in the cache is downloaded again
    if cached.is_file() and hashlib.sha256(cached.read_bytes()).hexdigest() == entry.sha256:
        return cached
    if entry.url is None:
        raise UnknownWeightsError(
            f"the file of {entry.name} is neither {entry.folder}/{entry.file} nor {cached}, and "
            "the entry has no url: put it there, or give checkpoint_path"
        )
    download(entry.url, cached, sha256=entry.sha256)
    return cached


def download(url: str, target: Path, *, sha256: str | None, timeout: float = 30.0) -> None:
    """Download ``url``, verify it, and move it to ``target`` atomically.

    Args:
        url: http or https.
        target: the file; its folder is created.
        sha256: of the whole file, 64 hexadecimal digits; None if it is not known.
        timeout: the download fails after so many seconds without a byte.

    Raises:
        DownloadError: the address is not http, or the server does not answer with a file.
        HashMismatchError: the connection ended early, or the server has another file.
    """
    if not url.startswith(WEB):
        raise DownloadError(f"{url}: expected an address that begins with https:// or http://")
    from torch.hub import download_url_to_file  # torch is slow to import, and only this needs it

    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with socket_timeout(timeout):
            download_url_to_file(url, str(target), hash_prefix=sha256, progress=False)
    except (OSError, HTTPException, ValueError) as error:  # not chained: a socket's traceback
        raise DownloadError(f"{url} cannot be downloaded ({error}): check the network") from None
    except RuntimeError as error:  # torch.hub's error for a wrong hash
        raise HashMismatchError(
            f"{url}: {error}. The connection ended early, or the server has another file; "
            "nothing was kept. Try again"
        ) from None


@contextmanager
def socket_timeout(seconds: float) -> Iterator[None]:
    """Set the timeout of new connections; torch and torchvision set none."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def fetch(source: str, file: str, *, cache_dir: str | Path | None = None) -> Path:
    """The path of one file of ``hf-hub:owner/name`` or ``hf-hub:owner/name@revision``.

    Raises:
        HubError: huggingface_hub is missing, the name is invalid, or the hub refuses.
    """
    name, _, revision = source.removeprefix(HUB).partition("@")
    hub = _library()
    try:
        path = hub.hf_hub_download(
            repo_id=name, filename=file, revision=revision or None, cache_dir=cache_dir
        )
    except (OSError, ValueError) as error:  # base classes of the library's errors
        raise HubError(f"{source}: {file} could not be fetched from the hub: {error}") from error
    return Path(path)


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise HubError(package_needed("models of the hub need", "huggingface_hub")) from error
