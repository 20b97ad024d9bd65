"""The header of a safetensors file: its strings, including an entry.

A file is 8 bytes (the header's length, little endian), the header (JSON), then the tensors
(https://github.com/huggingface/safetensors#format). Its ``__metadata__`` maps strings to strings;
``entry`` there is the JSON of an entry without the file's hash, name and url.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from revzoo.weights.entry import WeightsEntry, entry_from, parse_json, read_entry
from revzoo.weights.errors import UnreadableWeightsError
from revzoo.weights.hub import CONFIG_FILE

KEY = "entry"
# fields that the file cannot hold (its hash), or that change when someone renames or moves the file
_OUTSIDE = ("sha256", "file", "url", "default")


def metadata_of(data: bytes, where: str) -> dict[str, str]:
    """The strings in the header of a safetensors file's bytes.

    Raises:
        UnreadableWeightsError: there is no such header.
    """
    size = int.from_bytes(data[:8], "little")
    try:
        # ValueError: no JSON; TypeError, AttributeError: JSON, but no object
        if len(data) < 8 + size:
            raise ValueError(f"{len(data)} bytes, but a header of {size}")
        metadata = dict(parse_json(data[8 : 8 + size]).get("__metadata__", {}))
    except (ValueError, TypeError, AttributeError) as error:
        raise UnreadableWeightsError(
            f"{where} is not a complete safetensors file: {error}. Fetch it again"
        ) from error
    return {str(key): str(value) for key, value in metadata.items()}


def with_sorted_strings(data: bytes) -> bytes:
    """The same file, with the strings of its header in alphabetical order.

    safetensors writes them in random order, so two files of the same weights would differ.
    """
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header["__metadata__"] = dict(sorted(header.get("__metadata__", {}).items()))
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def metadata_for(entry: WeightsEntry) -> dict[str, str]:
    """The header's strings for the file that ``entry`` will describe."""
    fields = {key: value for key, value in entry.plain().items() if key not in _OUTSIDE}
    return {
        "format": "pt",  # as safetensors.torch writes it, for programs that ask
        # apart from the entry: reading tensors needs these two, but not a valid entry
        "architecture": entry.architecture,
        "in_chans": str(entry.in_chans),
        KEY: json.dumps(fields),
    }


def entry_of_file(path: Path) -> WeightsEntry:
    """The entry of a safetensors file: beside it (``NAME.json``, ``config.json``), or inside it.

    Raises:
        EntryError: the entry is not valid.
        UnreadableWeightsError: the file is damaged, or has no entry.
    """
    if (entry := entry_beside(path)) is not None:
        return entry
    data = path.read_bytes()
    try:
        fields = parse_json(metadata_of(data, str(path))[KEY])
    except (KeyError, ValueError):
        fields = None
    if not isinstance(fields, Mapping):
        raise UnreadableWeightsError(
            f"{path} does not describe its model, and there is no {path.stem}.json beside it: put "
            "one there, or use create_model(ARCHITECTURE, checkpoint_path=...)"
        )
    fixed: dict[str, Any] = {"sha256": hashlib.sha256(data).hexdigest(), "file": path.name}
    return entry_from({**fields, **fixed}, where=str(path), folder=path.parent)


def entry_beside(path: Path) -> WeightsEntry | None:
    """The entry beside a safetensors file that names it; None if there is none.

    Raises:
        EntryError: the entry is not valid.
    """
    for beside in (path.with_suffix(".json"), path.with_name(CONFIG_FILE)):
        if _file_in(beside) == path.name:
            return read_entry(beside)
    return None


def _file_in(path: Path) -> Any:
    """The file that an entry names; None if the JSON is not an entry, as ``config.json`` may be."""
    try:
        return parse_json(path.read_text(encoding="utf-8"))["file"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
