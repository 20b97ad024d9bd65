"""The description of one set of trained weights: network, file, training, measurements.

An entry is a JSON object with the fields of :class:`WeightsEntry`. It lies beside its file, in the
package, in a folder made by ``save_pretrained`` or in a repository of the hub.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints
from urllib.parse import urlsplit

from revzoo._checks import expected_type, is_count, is_number
from revzoo.weights.errors import EntryError
from revzoo.weights.limits import (
    MAX_OPTION,
    MAX_SIDE,
    MAX_VALUE,
    is_crop,
    is_mean,
    is_option,
    is_scale,
    is_side,
)

HUB = "hf-hub:"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_CHECKED_BELOW = ("num_classes", "input_size", "crop_pct")  # in more detail than by their type
_NAME = re.compile(r"([a-z]+:)?[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?")  # timm:resnet50.tag


@dataclass(frozen=True, kw_only=True)
class WeightsEntry:
    """The description of one set of weights.

    Attributes:
        name: ``architecture.dataset_recipe``, e.g. ``revnet38.cifar10``; also the JSON file's stem.
        architecture: name for ``create_model``.
        options: further keywords of ``create_model`` that the network was built with.
        num_classes: rows of the classifier.
        input_size: channels, height and width of the training images.
        sha256: of the whole file, 64 hexadecimal digits.
        file: name of a safetensors file, beside the entry or in the hub's repository.
        url: ``https://...`` of the file, or ``hf-hub:owner/name``.
        default: whether the architecture's name without a tag selects this entry.
        classes: names of the classes by label.
        mean: per channel, of pixels scaled to [0, 1].
        std: as ``mean``.
        crop_pct: for evaluation, resize the shorter side to ``input_size / crop_pct`` and crop the
            centre to ``input_size``; 1 keeps all of it.
        license: SPDX identifier of the weights' licence.
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
    sha256: str
    file: str | None = None
    url: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    default: bool = False
    classes: tuple[str, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop_pct: float | None = None
    license: str | None = None
    recipe: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    measured_on: str | None = None
    folder: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("input_size", "classes", "mean", "std"):
            value = getattr(self, name)
            # the class is frozen, and JSON has lists only
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if isinstance(self.metrics, Mapping):  # JSON knows no numbers of NumPy
            items = self.metrics.items()
            plain = {k: v if isinstance(v, int) or not is_number(v) else float(v) for k, v in items}
            object.__setattr__(self, "metrics", plain)
        if faults := "; ".join(self._faults()):
            raise EntryError(f"the entry of weights {self.name!r} is not valid: {faults}")

    @property
    def in_chans(self) -> int:
        """Channels of the images."""
        return self.input_size[0]

    def plain(self) -> dict[str, Any]:
        """The fields as plain containers for JSON, without empty fields."""
        values = asdict(self).items()
        # `in` compares with ==, so it would drop 0, too; no field may be 0
        return {k: v for k, v in values if k != "folder" and v not in (None, {}, False)}

    def _faults(self) -> Iterator[str]:
        wrong_types = list(self._faults_of_type())
        if wrong_types:  # the other checks rely on the types
            yield from wrong_types
            return
        if not _NAME.fullmatch(self.name):
            yield f"name={self.name!r}, expected architecture.dataset_recipe"
        elif self.name.partition(".")[0] != self.architecture:
            yield (
                f"name={self.name!r}, expected the architecture and a name of your own, "
                f"{self.architecture}.NAME"
            )
        if not _SHA256.fullmatch(self.sha256):
            yield f"sha256={self.sha256!r}, expected 64 hexadecimal digits in lower case"
        if not all(map(is_option, self.options.values())):
            yield f"options={dict(self.options)!r:.200}, expected no number beyond {MAX_OPTION}"
        if not all(map(_is_finite, self.metrics.values())):
            yield f"metrics={dict(self.metrics)}, expected finite numbers"
        yield from self._faults_of_place()
        yield from self._faults_of_shape()

    def _faults_of_type(self) -> Iterator[str]:
        for name, hint in get_type_hints(WeightsEntry).items():
            value = getattr(self, name)
            if name not in _CHECKED_BELOW and (expected := expected_type(value, hint)):
                yield f"{name}={value!r}, expected {expected}"
        if not isinstance(self.input_size, tuple):
            yield f"input_size={self.input_size!r}, expected [channels, height, width]"
        if isinstance(self.classes, tuple) and not all(map(_is_text, self.classes)):
            yield "classes holds items that are not names"

    def _faults_of_place(self) -> Iterator[str]:
        if self.file is None and self.url is None:
            yield "file and url are both missing: give one"
        # an entry from the hub must not reach files outside its folder
        if self.file is not None and (
            Path(self.file).name != self.file or not self.file.endswith(".safetensors")
        ):
            yield f"file={self.file!r}, expected the name of a .safetensors file, without folders"
        if self.url is not None and not (self.url.startswith(HUB) or is_web_address(self.url)):
            yield f"url={self.url!r}, expected https://... or {HUB}owner/name"

    def _faults_of_shape(self) -> Iterator[str]:
        if not is_count(self.num_classes):
            yield f"num_classes={self.num_classes!r}, expected a positive whole number"
        elif self.classes is not None and len(self.classes) != self.num_classes:
            yield f"classes has {len(self.classes)} names, expected num_classes={self.num_classes}"
        if len(self.input_size) != 3 or not all(map(is_count, self.input_size)):
            yield f"input_size={self.input_size}, expected [channels, height, width]"
            return
        sides = self.input_size[1:]
        if not all(map(is_side, self.input_size)):
            yield f"input_size={self.input_size}, expected numbers of at most {MAX_SIDE}"
        for name, is_valid, what in (
            ("mean", is_mean, "numbers"),
            ("std", is_scale, "numbers above 0"),
        ):
            values = getattr(self, name)
            if values is not None and len(values) != self.in_chans:
                yield f"{name}={values}, expected {self.in_chans} numbers, one per channel"
            elif values is not None and not all(map(is_valid, values)):
                yield f"{name}={values}, expected {what}, at most {MAX_VALUE:g}"
        crop = self.crop_pct
        if crop is not None and not is_crop(crop, max(sides)):
            yield (
                f"crop_pct={crop!r}, expected a share above 0, up to 1, and at least side / "
                f"{MAX_SIDE}"
            )


def read_entry(path: Path) -> WeightsEntry:
    """Read an entry from a JSON file.

    Raises:
        EntryError: the file is not a JSON object, or has unknown, missing or invalid fields.
    """
    try:
        values = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EntryError(f"{path} is not a readable JSON file: {error}") from error
    if not isinstance(values, dict):
        raise EntryError(f"{path} holds a {type(values).__name__}, expected a JSON object")
    return entry_from(values, where=str(path), folder=path.parent)


def entry_from(values: Mapping[str, Any], *, where: str, folder: Path) -> WeightsEntry:
    """Make an entry from plain ``values``; ``where`` names their file, ``folder`` holds it.

    Raises:
        EntryError: a field is unknown, missing or invalid.
    """
    known = {f.name for f in fields(WeightsEntry)} - {"folder"}
    needed = {"name", "architecture", "num_classes", "input_size", "sha256"}
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


def parse_json(text: str | bytes) -> Any:
    """Parse JSON.

    Raises:
        ValueError: the text is not JSON, or nested too deep.
    """
    try:
        return json.loads(text)
    except RecursionError:  # a file of "[[[[..." raises it
        raise ValueError("its lists or objects are nested too deep") from None


def is_web_address(url: str) -> bool:
    """Whether ``url`` is an http or https address with a host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # half of an IPv6 address
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _is_text(value: Any) -> bool:
    # surrogates, as in names that are not UTF-8, cannot be written
    return isinstance(value, str) and not re.search("[\ud800-\udfff]", value)


def _is_finite(value: Any) -> bool:
    # not math.isfinite, which raises for integers beyond the floats: JSON may hold any number
    return is_number(value) and abs(value) <= sys.float_info.max
