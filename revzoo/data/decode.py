"""Image files to bytes.

Pillow decodes, as in torchvision's ``ImageFolder``: it reads every format that torchvision lists,
and it releases the interpreter lock, so a few threads can share the work of a whole folder.
Unlike torchvision we apply the EXIF orientation, as every viewer does.

Known limits: grey images of more than 8 bits are refused, since Pillow would clip them silently
(in 16-bit RGB it keeps the upper 8 bits); transparency is dropped; of several frames the first is
read.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import cache

import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional as v2f

from revzoo._checks import number_of, shortened
from revzoo.data.errors import DataError

IMAGENET_CROP_PCT = 224 / 256
"""The ``crop_pct`` of torchvision's reference evaluation: 224 cut out of 256 pixels."""

FORMATS = ["JPEG", "PNG", "PPM", "BMP", "DIB", "TIFF", "WEBP", "GIF", "ICO", "AVIF", "JPEG2000"]
"""Formats that Pillow may detect. Not PostScript, for which it runs Ghostscript."""

IN_SET = "replace or remove it, or set data.on_error=skip; revzoo check DIR lists all such images"
"""The remedy for a damaged image of a data set."""

log = logging.getLogger(__name__)


@cache
def formats() -> tuple[str, ...]:
    """Those of :data:`FORMATS` that this build of Pillow can decode."""
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@cache
def suffixes() -> tuple[str, ...]:
    """The suffixes of image files, in lower case, the usual ones first."""
    kinds = (*formats(), "MPO")  # several JPEGs in a file, which Pillow opens as a JPEG
    found = (s for s, kind in Image.registered_extensions().items() if kind in kinds)
    usual = (".jpg", ".png")
    return (*usual, *sorted({*found} - {*usual}))


def open_image(path: str, channels: int, *, remedy: str = "replace or remove it") -> Image.Image:
    """Decode one file to RGB (3 channels) or grey (1 channel).

    Args:
        path: of the file.
        channels: of the result.
        remedy: the advice in the error about a corrupt file.

    Raises:
        DataError: the file is corrupt, or :func:`converted` refuses the image.
    """
    try:
        with Image.open(path, "r", formats()) as image:
            return converted(image, channels, path)
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        fault = f"{type(error).__name__}: {error}"
        what = f"cannot decode image {path} ({fault})"
        reason = fault.replace(repr(path), "").rstrip(" :")  # as Pillow and Python quote it
        raise DataError(f"{what}: {remedy}", reason) from error


def converted(image: Image.Image, channels: int, name: str) -> Image.Image:
    """An image upright, in RGB (3 channels) or grey (1 channel)."""
    if image.mode.startswith(("I", "F")):  # Pillow's 16 and 32 bits, and floats
        fault = f"more than 8 bits per channel (Pillow mode {image.mode})"
        raise DataError(f"{name} has {fault}: convert it to 8 bits", f"{fault}: convert to 8 bits")
    pixels = image.convert("RGB" if channels == 3 else "L")  # a copy, also in this mode
    with suppress(Exception):  # Pillow's reader raises many types; a damaged block is no EXIF
        ImageOps.exif_transpose(pixels, in_place=True)
    return pixels


class SkippedFiles:
    """The unreadable images of a split, for ``data.on_error=skip``.

    Workers and the main process share the list, so a file counts only once, not in every epoch.

    Args:
        paths: all files of the split.
        labels: of the files.
        classes: names, by label.
        at_most: largest number of images to skip.
    """

    def __init__(
        self, paths: Sequence[str], labels: Sequence[int], *, classes: list[str], at_most: int
    ) -> None:
        self._paths, self._classes, self._at_most = paths, classes, at_most
        self._labels = torch.tensor(labels)
        # flags by row, in shared memory: workers would not share a list
        self._bad = torch.zeros(len(paths), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def add(self, row: int, error: DataError, among: Tensor | None = None) -> None:
        """Skip the file at ``row`` and log why.

        Args:
            row: of the file.
            error: of the decoder.
            among: the rows of the set that reads it; None for the whole split.

        Raises:
            DataError: more than ``at_most`` files are skipped, or all images of a class.
        """
        if not self._bad[row]:
            self._bad[row] = True
            log.warning("skipped: %s (%s)", self._paths[row], error.reason)
        rows = torch.arange(len(self._paths)) if among is None else among
        mates = rows[self._labels[rows] == self._labels[row]]
        if self._bad[mates].all():
            name = self._classes[int(self._labels[row])]
            raise DataError(
                f"none of the {number_of(len(mates), 'image')} of class {name} can be read, such "
                f"as {self._paths[row]}: replace them (`revzoo check data DIR` lists all), or "
                "remove the folder of the class from every split"
            )
        files = self.files()
        if len(files) > self._at_most:
            raise DataError(
                f"more than data.max_errors={self._at_most} images cannot be read: "
                f"{shortened(files)}. Replace or remove them (`revzoo check DIR` lists all), "
                "or raise data.max_errors"
            )

    def files(self) -> list[str]:
        """The paths of the skipped files."""
        return [self._paths[row] for row in self._bad.nonzero().flatten().tolist()]


def to_square(image: Image.Image, size: int, crop_pct: float = 1.0) -> Image.Image:
    """Resize the shorter side to ``size / crop_pct`` pixels, and crop the centre to ``size``.

    ``crop_pct`` is timm's name (R. Wightman) for the share of the shorter side that is kept.
    """
    shorter = round(size / crop_pct)
    if image.size == (size, size) == (shorter, shorter):  # nothing to do: keep every pixel
        return image
    return v2f.center_crop(v2f.resize(image, [shorter], antialias=True), [size, size])


def common_size(paths: Sequence[str], skipped: SkippedFiles | None = None) -> int:
    """Side in pixels of the first readable image; the set compares the others with it."""
    for row, path in enumerate(paths):
        try:
            # decoded, not only opened: the header of a damaged file may be fine
            width, height = open_image(path, 3, remedy=IN_SET).size
        except DataError as error:
            if skipped is None:
                raise
            skipped.add(row, error)
            continue
        if width != height:
            raise DataError(
                f"{path} has {width}x{height} pixels: expected a square; "
                "set data.image_size to a side in pixels to resize and crop the images to it, "
                "such as data.image_size=64"
            )
        return width
    raise DataError(f"none of the {len(paths)} images can be read, such as {paths[0]}")
