"""Networks to folders and to the hub: weights, entry and model card."""

from __future__ import annotations

import hashlib
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from revzoo.models.network import ImageNetwork
from revzoo.models.tensors import safetensors_bytes
from revzoo.weights.card import model_card
from revzoo.weights.entry import HUB, WeightsEntry
from revzoo.weights.errors import EntryError
from revzoo.weights.header import metadata_for
from revzoo.weights.hub import CONFIG_FILE, TENSORS_FILE, push_folder
from revzoo.weights.writing import write_atomically

# what stays true of weights when a network made from them is trained on
_INHERITED = ("classes", "mean", "std", "crop_pct")


def save_pretrained(network: ImageNetwork, folder: Path, **facts: Any) -> WeightsEntry:
    """Write ``model.safetensors``, ``config.json`` and ``README.md``; returns the entry.

    Args:
        network: made by ``create_model``.
        folder: made if need be; files of these names in it are replaced.
        facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`: ``license``, ``recipe``,
            ``metrics`` and so on. ``classes``, ``mean``, ``std`` and ``crop_pct`` are those of the
            weights that the network was created with, unless given; ``input_size`` is the
            architecture's.

    Raises:
        EntryError: a fact is none or not valid, or the network was not made by ``create_model``;
            nothing is written.
    """
    return _save(network, folder, facts, source=folder.name)


def push_to_hub(network: ImageNetwork, repository: str, *, private: bool, **facts: Any) -> str:
    """Upload what :func:`save_pretrained` writes to ``owner/name``; returns the address.

    Raises:
        EntryError: as :func:`save_pretrained`.
        HubError: huggingface_hub is missing, or the hub refuses.
    """
    with tempfile.TemporaryDirectory() as folder:
        entry = _save(network, Path(folder), facts, source=HUB + repository.removeprefix(HUB))
        return push_folder(Path(folder), repository, private=private, message=f"Add {entry.name}")


def _save(
    network: ImageNetwork, folder: Path, facts: dict[str, Any], *, source: str
) -> WeightsEntry:
    data, entry = pack(network, file=TENSORS_FILE, facts=facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TENSORS_FILE, data)
    write_atomically(folder / CONFIG_FILE, json_of(entry))
    write_atomically(folder / "README.md", model_card(entry, source=source).encode())
    return entry


def pack(network: ImageNetwork, *, file: str, facts: dict[str, Any]) -> tuple[bytes, WeightsEntry]:
    """The bytes of a safetensors file and the entry that describes it.

    Raises:
        EntryError: as :func:`save_pretrained`.
    """
    if network.spec is None:
        raise EntryError(
            f"this {type(network).__name__} does not know its architecture's name: make it with "
            "create_model"
        )
    architecture, options = network.spec
    described = {
        "name": architecture,
        "options": options,
        "num_classes": network.num_classes,
        "input_size": (network.in_chans, network.image_size, network.image_size),
        **_inherited(network),
        **facts,
    }
    fixed = {"architecture": architecture, "sha256": "0" * 64, "file": file}
    try:
        entry = WeightsEntry(**{**described, **fixed})
    except TypeError as error:
        raise EntryError(f"a fact is no field of an entry: {error}") from error
    data = safetensors_bytes(network.state_dict(), metadata_for(entry))
    return data, replace(entry, sha256=hashlib.sha256(data).hexdigest())


def json_of(entry: WeightsEntry) -> bytes:
    """An entry as its JSON file."""
    return (json.dumps(entry.plain(), indent=2) + "\n").encode()


def _inherited(network: ImageNetwork) -> dict[str, Any]:
    entry = network.entry
    if entry is None:
        return {}
    facts = {name: getattr(entry, name) for name in _INHERITED}
    if entry.num_classes != network.num_classes:
        facts["classes"] = None
    if entry.in_chans != network.in_chans:
        facts["mean"] = facts["std"] = None
    else:
        facts["input_size"] = entry.input_size
    return facts
