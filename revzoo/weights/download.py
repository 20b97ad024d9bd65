"""Downloads that arrive whole or not at all.

``torch.hub.download_url_to_file`` checks at most a prefix of the hash, cannot resume, and leaves
nothing to resume from. Here bytes are hashed as they come, an interrupted download goes on where it
stopped if the server still has the same file, and the target appears in one step, verified.

NOTE [ Resuming ]
    Bytes go to ``NAME.part``; ``NAME.part.json`` keeps the URL and the server's validator (a strong
    ETag, else Last-Modified). The next attempt asks for the rest with ``If-Range``: a server that
    has another file by now answers 200 with all of it, and the download starts anew. The hash over
    all bytes decides in the end; where it is wrong nothing is kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from revzoo.weights.errors import DownloadError, HashMismatchError

_CHUNK = 1 << 20  # bytes
RANGE_NOT_SATISFIABLE = 416


def download(url: str, target: Path, *, sha256: str, timeout: float = 30.0) -> None:
    """Put the file at ``url`` at ``target``; several processes may ask for it at once.

    Args:
        url: http or https.
        target: where the file will be; its folder is made.
        sha256: of the whole file, 64 hexadecimal digits.
        timeout: seconds without a byte after which the download fails.

    Raises:
        DownloadError: no http address, an answer that is an error, a connection that fails or ends
            early; what has come is kept for the next attempt.
        HashMismatchError: the server's file is another one; nothing is kept.
    """
    if urlsplit(url).scheme not in ("http", "https"):
        raise DownloadError(f"{url}: expected an address that begins with https:// or http://")
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    with _locked(target):
        if target.exists() and sha256_of(target) == sha256:
            return  # another process has just fetched it
        try:
            found = _fetch(url, part, timeout)
        except (OSError, http.client.HTTPException) as error:
            raise DownloadError(f"{url}: {error}; try again to resume") from error
        if found != sha256:
            _discard(part)
            raise HashMismatchError(
                f"{url} has sha256 {found}, expected {sha256}: the file there is another one, and "
                "was not kept"
            )
        part.replace(target)
        _discard(part)


def sha256_of(path: Path) -> str:
    """The hash of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch(url: str, part: Path, timeout: float) -> str:
    """Complete ``part``; returns the hash of all of it (NOTE [ Resuming ])."""
    start, headers = _resume_at(url, part)
    try:
        response = urlopen(Request(url, headers=headers), timeout=timeout)
    except HTTPError as error:
        error.close()
        if error.code == RANGE_NOT_SATISFIABLE and start:
            _discard(part)  # it is longer than the server's file
            return _fetch(url, part, timeout)
        raise DownloadError(f"{url}: the server answered {error.code} {error.reason}") from error
    with response:
        continues = response.status == 206 and _first_byte(response) == start
        if response.status == 206 and not continues:
            _discard(part)
            raise DownloadError(f"{url}: the server sent another part than asked for; try again")
        return _write(url, part, response, start if continues else 0)


def _write(url: str, part: Path, response: Any, start: int) -> str:
    """Write the answer's bytes from ``start`` on; returns the hash of the whole file."""
    digest = hashlib.sha256()
    if start:
        with part.open("rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    else:
        part.unlink(missing_ok=True)
        validator = {"url": url, "validator": _validator(response)}
        _note(part).write_text(json.dumps(validator), encoding="utf-8")
    length = response.headers.get("Content-Length")
    received = 0
    with part.open("ab") as file:
        while chunk := response.read(_CHUNK):
            file.write(chunk)
            digest.update(chunk)
            received += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    if length is not None and received != int(length):
        raise DownloadError(
            f"{url}: the connection ended after {start + received} of {start + int(length)} bytes; "
            "try again to resume"
        )
    return digest.hexdigest()


def _resume_at(url: str, part: Path) -> tuple[int, dict[str, str]]:
    """How many bytes are there already, and the headers that ask for the others."""
    headers = {"User-Agent": "revzoo", "Accept-Encoding": "identity"}
    try:
        noted = json.loads(_note(part).read_text(encoding="utf-8"))
        size = part.stat().st_size
    except (OSError, ValueError):
        return 0, headers
    if not size or noted.get("url") != url or not noted.get("validator"):
        return 0, headers
    return size, headers | {"Range": f"bytes={size}-", "If-Range": noted["validator"]}


def _validator(response: Any) -> str | None:
    """What identifies the server's file: weak tags do not (RFC 9110, section 13.1.5)."""
    etag: str | None = response.headers.get("ETag")
    if etag and not etag.startswith("W/"):
        return etag
    modified: str | None = response.headers.get("Last-Modified")
    return modified


def _first_byte(response: Any) -> int | None:
    unit, _, span = response.headers.get("Content-Range", "").partition(" ")
    first = span.partition("-")[0]
    return int(first) if unit == "bytes" and first.isdigit() else None


def _note(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _discard(part: Path) -> None:
    part.unlink(missing_ok=True)
    _note(part).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One process at a time; where the system has no such lock, none."""
    with target.with_name(target.name + ".lock").open("w") as file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield
