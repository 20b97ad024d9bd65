"""Networks to folders and to the hub: weights, entry and model card."""

from __future__ import annotations

import hashlib
import json
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from revzoo._files import write_atomically
from revzoo.models.tensors import safetensors_bytes
from revzoo.weights.card import model_card
from revzoo.weights.entry import HUB, WeightsEntry
from revzoo.weights.errors import EntryError
from revzoo.weights.header import metadata_for
from revzoo.weights.hub import CONFIG_FILE, TENSORS_FILE, push_folder

if TYPE_CHECKING:
    from torchvision.transforms import v2

# what an entry says of the data; it describes a network as long as nothing of that has changed
_OF_DATA = ("classes", "mean", "std", "crop_pct", "input_size")
_NEEDED = ("classes", "mean", "std")


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
        trained_on: fields of an entry that describe the data it was trained on since it was
            created, empty if those are unknown; None if it was not trained. Training sets it.
        fresh_head: whether the classifier was replaced since ``entry`` or ``trained_on`` was set.
    """

    num_classes: int
    in_chans: int
    spec: Spec | None = None
    trained_on: Mapping[str, Any] | None = None
    fresh_head: bool = False
    _entry: WeightsEntry | None = None

    @property
    def entry(self) -> WeightsEntry | None:
        """The weights that the network was created with, if any."""
        return self._entry

    @entry.setter
    def entry(self, entry: WeightsEntry | None) -> None:
        self._entry, self.fresh_head = entry, False

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Side in pixels of the images that the architecture was published for."""

    def transforms(self, size: int | None = None) -> v2.Compose:
        """What turns an image into an input of this network, as when its weights were evaluated.

        Args:
            size: side of the result in pixels; None for the weights'.

        Returns:
            A torchvision transform of a Pillow image, or of a tensor (..., C, H, W) of bytes or of
            floats in [0, 1], to float32 (..., C, size, size).

        Raises:
            ValueError: the network has no weights that say their ``mean`` and ``std``.

        Example:
            >>> model = revzoo.create_model("revnet38.cifar10", pretrained=True)
            >>> model.transforms()(torch.zeros(3, 48, 40)).shape
            torch.Size([3, 32, 32])
        """
        from revzoo.weights.transforms import eval_transforms  # torchvision: slow to import

        facts = self.facts
        if facts.get("mean") is None or facts.get("std") is None:
            raise ValueError(
                f"this {type(self).__name__} has no weights that say how their images were "
                'normalised: create it with pretrained=True ("revnet38.cifar10"), or train it on '
                "data of revzoo"
            )
        if self.in_chans != len(facts["mean"]):
            raise ValueError(
                f"this network takes {self.in_chans} channels, its weights were trained on "
                f"{len(facts['mean'])}: normalise the images yourself"
            )
        side = size or facts.get("input_size", (self.image_size,))[-1]
        shape = (self.in_chans, side, side)
        kept = {name: facts.get(name) for name in ("mean", "std", "crop_pct")}
        return eval_transforms(input_size=shape, **kept)  # type: ignore[arg-type]

    @property
    def facts(self) -> Mapping[str, Any]:
        """What is known of the data of the weights: fields of an entry; empty if nothing is."""
        if self.trained_on is not None:
            return self.trained_on
        return {} if self.entry is None else {n: getattr(self.entry, n) for n in _OF_DATA}

    def save_pretrained(self, folder: str | Path, **facts: Any) -> WeightsEntry:
        """Write ``model.safetensors``, ``config.json`` and ``README.md``; returns the entry.

        Args:
            folder: created if missing; files of these names in it are replaced.
            facts: fields of :class:`~revzoo.weights.entry.WeightsEntry`: ``license``, ``recipe``,
                ``metrics`` and so on. ``classes``, ``mean``, ``std``, ``crop_pct`` and
                ``input_size`` come from the data it was trained on or, if it was not trained, from
                the weights that it was created with.

        Raises:
            EntryError: a fact is unknown or not valid; ``create_model`` did not make the network;
                or its classifier, image channels or data changed since its weights were loaded
                and ``facts`` do not describe the new ones. Nothing is written.
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
        **_known(network, given=facts),
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


def _known(network: Saved, *, given: Mapping[str, Any]) -> dict[str, Any]:
    """The known facts about the data of the network's weights.

    Raises:
        EntryError: the weights it was created with say something that is no longer true, and
            ``given`` does not say what is.
    """
    entry, trained_on = network.entry, network.trained_on
    facts = dict(network.facts)
    untrue: tuple[str, ...] = ()
    if trained_on is not None:
        untrue = () if trained_on or entry is None else _NEEDED
    elif entry is not None and entry.num_classes != network.num_classes:
        untrue = _NEEDED
    elif entry is not None and entry.in_chans != network.in_chans:
        untrue = ("mean", "std")
    if network.fresh_head and facts:
        untrue = _NEEDED
    if missing := [name for name in untrue if name not in given]:
        raise EntryError(
            f"the network was changed or trained since its weights were loaded, and their "
            f"{', '.join(missing)} may be wrong now: give save_pretrained "
            f"{', '.join(f'{name}=...' for name in missing)} of the data it was trained on (None "
            "if unknown)"
        )
    if network.in_chans != facts.get("input_size", (network.in_chans,))[0]:
        del facts["input_size"]
    return facts
