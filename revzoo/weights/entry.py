"""The description of one set of trained weights: network, file, training, measurements.

An entry is a JSON object with the fields of :class:`WeightsEntry`. It lies beside its file, in the
package, in a folder made by ``save_pretrained`` or in a repository of the hub; and, without the
file's hash, name and url, in the header of the file (``__metadata__``, key ``entry``; see
https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path
from typing import Any, get_type_hints

from revzoo._checks import expected_type, is_count, is_number
from revzoo.weights.errors import EntryError, UnreadableWeightsError

CONFIG_FILE = "config.json"  # of an entry in a folder of save_pretrained, or on the hub
HUB = "hf-hub:"
WEB = ("https://", "http://")
KEY = "entry"
# fields that the file cannot hold (its hash), that the network shows, or that change when someone
# renames or moves the file
_OUTSIDE = ("sha256", "file", "url", "default", "parameters", "mib")
_LISTS = ("input_size", "classes", "mean", "std")
_NAME = re.compile(r"([a-z]+:)?[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?")  # timm:resnet50.tag


def _imagenet_classes() -> tuple[str, ...]:
    """The 1,000 names, in the order of the sorted folders of ILSVRC-2012."""
    from torchvision.models import ResNet18_Weights  # slow to import

    return tuple(ResNet18_Weights.IMAGENET1K_V1.meta["categories"])


CLASS_SETS = {"imagenet-1k": _imagenet_classes}


@dataclass(frozen=True, kw_only=True)
class WeightsEntry:
    """The description of one set of weights.

    Attributes:
        name: ``architecture.dataset_recipe``, e.g. ``revnet38.cifar10``; also the JSON file's stem.
        architecture: name for ``create_model``.
        options: further keywords of ``create_model`` that the network was built with.
        num_classes: rows of the classifier.
        input_size: channels, height and width of the training images; channels and three sizes of
            volumes, channels and length of signals.
        sha256: of the whole file, 64 hexadecimal digits; None if its publisher states none.
        file: name of a safetensors file, beside the entry or in the hub's repository.
        url: ``https://...`` of the file, or ``hf-hub:owner/name``. A publisher's own file of
            ``torch.save`` (``.pth``, ``.tar``, ...) is cached as safetensors.
        default: whether the architecture's name without a tag selects this entry.
        classes: names of the classes by label.
        class_set: instead of ``classes``, a list that a library has: ``imagenet-1k``. A model with
            these weights has the names in ``model.entry.classes``.
        mean: per channel, of pixels scaled to [0, 1].
        std: as ``mean``.
        crop_pct: for evaluation, resize the shorter side to ``input_size / crop_pct`` and crop the
            centre to ``input_size``; 1 keeps all of it.
        license: SPDX identifier of the weights' licence.
        citation: the paper, or the repository.
        parameters: their number, in millions.
        mib: activations that training keeps for an image of ``input_size``, by memory mode.
        recipe: the exact command that trained them.
        metrics: measured figures by name, as fractions of one.
        measured_on: set, split, number of images and precision of the measurement.
        folder: of the file that the entry was read from; not in the JSON.

    Raises:
        EntryError: lists all invalid fields.
    """

    name: str
    architecture: str
    num_classes: int
    input_size: tuple[int, ...]
    sha256: str | None = None
    file: str | None = None
    url: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False
    classes: tuple[str, ...] | None = None
    class_set: str | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    license: str | None = None
    citation: str | None = None
    parameters: float | None = None
    mib: Mapping[str, float] = field(default_factory=dict)
    recipe: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    measured_on: str | None = None
    folder: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in _LISTS:
            value = getattr(self, name)
            # the class is frozen, and JSON has lists only
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if isinstance(self.metrics, Mapping):  # JSON knows no numbers of NumPy
            items = self.metrics.items()
            plain = {k: v if isinstance(v, int) or not is_number(v) else float(v) for k, v in items}
            object.__setattr__(self, "metrics", plain)
        # the other rules rely on the types
        if faults := [*self._wrong_types()] or [*self._faults()]:
            listed = "; ".join(f"{n}={getattr(self, n)!r:.200}, expected {e}" for n, e in faults)
            raise EntryError(f"the entry of weights {self.name!r} is not valid: {listed}")

    @property
    def is_published_file(self) -> bool:
        """Whether the file is a publisher's own, not of this package's format."""
        web = self.url is not None and self.url.startswith(WEB)
        return web and not str(self.url).endswith(".safetensors")

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.input_size[0]

    def with_classes(self) -> WeightsEntry:
        """This entry, with the names of its ``class_set`` as ``classes``."""
        if self.class_set is None:
            return self
        return replace(self, classes=CLASS_SETS[self.class_set](), class_set=None)

    def plain(self) -> dict[str, Any]:
        """The fields as plain containers for JSON, without empty fields."""
        values = asdict(self).items()
        # `in` compares with ==, so it would drop 0, too; no field may be 0
        return {k: v for k, v in values if k != "folder" and v not in (None, {}, False)}

    def _wrong_types(self) -> Iterator[tuple[str, str]]:
        """Fields of another type, and what is expected."""
        for name, hint in get_type_hints(WeightsEntry).items():
            if expected := expected_type(getattr(self, name), hint):
                yield name, expected

    def _faults(self) -> Iterator[tuple[str, str]]:
        """Fields with a wrong value, and what is expected."""
        return ((name, expected) for name, valid, expected in self._rules() if not valid)

    def _rules(self) -> Iterator[tuple[str, bool, str]]:
        named = _NAME.fullmatch(self.name) and self.name.partition(".")[0] == self.architecture
        yield "name", bool(named), f"the architecture, or {self.architecture}.NAME of your own"
        is_hash = re.fullmatch("[0-9a-f]{64}", self.sha256 or "")
        known = bool(is_hash) or (self.sha256 is None and self.is_published_file)
        yield "sha256", known, "64 hexadecimal digits in lower case"
        placed = self.url.startswith((*WEB, HUB)) if self.url else self.file is not None
        yield "url", placed, f"https://... or {HUB}owner/name, or a file beside the entry"
        # an entry from the hub must not reach files outside its folder
        name = Path(self.file or "").name
        beside = self.file is None or (name == self.file and name.endswith(".safetensors"))
        yield "file", beside, "the name of a .safetensors file, without folders"
        yield "num_classes", is_count(self.num_classes), "a whole number >= 1"
        words = self.classes
        complete = words is None or len(words) == self.num_classes
        names = all(isinstance(word, str) for word in words or ())
        yield "classes", complete and names, f"names, num_classes={self.num_classes} of them"
        known = self.class_set is None or (self.class_set in CLASS_SETS and words is None)
        yield "class_set", known, f"one of {', '.join(CLASS_SETS)}, without classes"
        sized = 2 <= len(self.input_size) <= 4 and all(map(is_count, self.input_size))
        yield "input_size", sized, "[channels, height, width], or 1 or 3 sizes"
        for name, least in (("mean", -inf), ("std", 0)):
            values = getattr(self, name)
            valid = values is None or (sized and len(values) == self.in_chans)
            valid = valid and all(is_number(v) and least < v < inf for v in values or ())
            above = " above 0" if least == 0 else ""
            yield name, valid, f"numbers{above}, one for each channel"
        share = self.crop_pct is None or 0 < self.crop_pct <= 1
        yield "crop_pct", share, "a share above 0, up to 1"
        numbers = all(is_number(value) and abs(value) < inf for value in self.metrics.values())
        yield "metrics", numbers, "finite numbers"
        counted = all(is_number(value) and 0 < value < inf for value in self.mib.values())
        yield "mib", counted, "a positive number for each memory mode"


def read_entry(path: Path) -> WeightsEntry:
    """Read an entry from a JSON file.

    Raises:
        EntryError: the file is not a JSON object, or has unknown, missing or invalid fields.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise EntryError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise EntryError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return entry_from(values, where=str(path), folder=path.parent)


def entry_from(values: Mapping[str, Any], *, where: str, folder: Path) -> WeightsEntry:
    """Make an entry from plain ``values``; ``where`` names their file, ``folder`` holds it."""
    known = {f.name for f in fields(WeightsEntry)} - {"folder"}
    needed = {"name", "architecture", "num_classes", "input_size"}
    unknown, missing = sorted(values.keys() - known), sorted(needed - values.keys())
    if unknown or missing:
        raise EntryError(
            f"{where}: unknown fields {unknown}, missing fields {missing}; the fields are "
            f"{', '.join(sorted(known))}"
        )
    try:
        return WeightsEntry(**values, folder=folder)
    except EntryError as error:
        raise EntryError(f"{where}: {error}") from None


def metadata_of(data: bytes) -> dict[str, str]:
    """The strings in the header of a safetensors file's bytes; damaged ones raise any error."""
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(header.get("__metadata__", {}))


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
        fields = dict(json.loads(metadata_of(data)[KEY]))
    except Exception:  # damaged headers raise many types
        raise UnreadableWeightsError(
            f"{path} is damaged or does not describe its model, and there is no {path.stem}.json "
            "beside it: put one there, or use create_model(ARCHITECTURE, checkpoint_path=...)"
        ) from None
    fields |= {"sha256": hashlib.sha256(data).hexdigest(), "file": path.name}
    return entry_from(fields, where=str(path), folder=path.parent)


def entry_beside(path: Path) -> WeightsEntry | None:
    """The entry beside a safetensors file that names it; None if there is none.

    Raises:
        EntryError: the entry is not valid.
    """
    for beside in (path.with_suffix(".json"), path.with_name(CONFIG_FILE)):
        # config.json may be another program's
        with suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(beside.read_text(encoding="utf-8"))["file"] == path.name:
                return read_entry(beside)
    return None
