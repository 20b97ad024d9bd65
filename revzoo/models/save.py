"""Networks to folders and to the hub: weights, entry and model card."""

from __future__ import annotations

import hashlib
import json
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from revzoo._files import write_atomically
from revzoo.models.tensors import safetensors_bytes
from revzoo.weights.card import model_card
from revzoo.weights.entry import HUB, WeightsEntry
from revzoo.weights.errors import EntryError
from revzoo.weights.header import metadata_for
from revzoo.weights.hub import CONFIG_FILE, TENSORS_FILE, push_folder

# what stays true of weights when a network made from them is trained on
_INHERITED = ("classes", "mean", "std", "crop_pct")


class Spec(NamedTuple):
    """How ``create_model`` made a network: the architecture and the keywords that shape it."""

    architecture: str
    options: Mapping[str, Any]


class Saved(nn.Module):
    """A network that writes itself to a folder or to the hub.

    Attributes:
        num_classes: number of logits.
        in_chans: channels of the images.
        spec: how it was made; None for a network built from its class.
        entry: the weights it was created with, if any.
    """

    num_classes: int
    in_chans: int
    spec: Spec | None = None
    entry: WeightsEntry | None = None

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Side in pixels of the images that the architecture was published for."""

    def save_pretrained(self, folder: str | Path, **facts: Any) -> WeightsEntry:
        """Write ``model.safetensors``, ``config.json`` and ``README.md``; returns the entry.

        Args:
            folder: created if missing; files of these names in it are replaced.
            facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`: ``license``, ``recipe``,
                ``metrics`` and so on. ``classes``, ``mean``, ``std`` and ``crop_pct`` come from
                the weights that the network was created with, unless given; ``input_size`` from
                the architecture.

        Raises:
            EntryError: a fact is unknown or not valid, or ``create_model`` did not make the
                network; nothing is written.
        """
        return _save(self, Path(folder), facts, source=Path(folder).name)

    def push_to_hub(self, repository: str, *, private: bool = False, **facts: Any) -> str:
        """Upload what :meth:`save_pretrained` writes to ``owner/name``; returns the address.

        Raises:
            EntryError: as :meth:`save_pretrained`.
            HubError: huggingface_hub is missing, or the hub refuses.
        """
        with tempfile.TemporaryDirectory() as folder:
            entry = _save(self, Path(folder), facts, source=HUB + repository.removeprefix(HUB))
            message = f"Add {entry.name}"
            return push_folder(Path(folder), repository, private=private, message=message)


def _save(network: Saved, folder: Path, facts: dict[str, Any], *, source: str) -> WeightsEntry:
    data, entry = pack(network, file=TENSORS_FILE, facts=facts)
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / TENSORS_FILE, data)
    write_atomically(folder / CONFIG_FILE, json_of(entry))
    write_atomically(folder / "README.md", model_card(entry, source=source).encode())
    return entry


def pack(network: Saved, *, file: str, facts: dict[str, Any]) -> tuple[bytes, WeightsEntry]:
    """The bytes of a safetensors file and the entry that describes it.

    Raises:
        EntryError: as :meth:`Saved.save_pretrained`.
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


def _inherited(network: Saved) -> dict[str, Any]:
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
