"""The Hugging Face hub, through the package ``huggingface_hub`` (the extra ``hub``).

A repository holds ``config.json`` (the entry), ``model.safetensors`` and ``README.md`` (the card).
:mod:`revzoo.weights.files` compares the weights with the SHA-256 of the entry.
"""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

from revzoo._checks import package_needed
from revzoo.weights.entry import HUB
from revzoo.weights.errors import HubError

CONFIG_FILE = "config.json"
TENSORS_FILE = "model.safetensors"


def fetch(source: str, file: str, *, cache_dir: str | Path | None = None) -> Path:
    """The path of one file of ``hf-hub:owner/name`` or ``hf-hub:owner/name@revision``.

    Raises:
        HubError: huggingface_hub is missing, the name is invalid, or the hub refuses.
    """
    name, _, revision = source.removeprefix(HUB).partition("@")
    _check_repository(name)
    hub = _library()
    try:
        path = hub.hf_hub_download(
            repo_id=name, filename=file, revision=revision or None, cache_dir=cache_dir
        )
    except (OSError, ValueError) as error:  # base classes of the library's errors
        raise HubError(f"{source}: {file} could not be fetched from the hub: {error}") from error
    return Path(path)


def fetch_folder(source: str, *, cache_dir: str | Path | None = None, tensors: bool) -> Path:
    """A folder with the entry of ``hf-hub:owner/name`` and, if ``tensors``, its weights.

    Raises:
        HubError: as :func:`fetch`.
    """
    config = fetch(source, CONFIG_FILE, cache_dir=cache_dir)
    if tensors:  # the library puts all files of one revision into one folder
        fetch(source, TENSORS_FILE, cache_dir=cache_dir)
    return config.parent


def push_folder(folder: Path, repository: str, *, private: bool, message: str) -> str:
    """Upload the files of ``folder`` to ``owner/name``, created if missing; returns its address.

    huggingface_hub handles the login (``hf auth login``, or ``HF_TOKEN``).

    Raises:
        HubError: huggingface_hub is missing, the name is invalid, or the hub refuses.
    """
    name = repository.removeprefix(HUB)
    _check_repository(name)
    api = _library().HfApi()
    try:
        api.create_repo(repo_id=name, private=private, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message=message)
    except (OSError, ValueError) as error:
        raise HubError(f"{repository}: the hub refused the upload: {error}") from error
    return f"https://huggingface.co/{name}"


def _check_repository(name: str) -> None:
    if not re.fullmatch(r"[^/]+/[^/]+", name):
        raise HubError(f"{name!r} is not a repository of the hub: expected owner/name")


def _library() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise HubError(package_needed("models of the hub need", "huggingface_hub")) from error
