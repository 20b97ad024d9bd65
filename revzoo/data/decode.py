"""Image files to bytes.

Pillow decodes, as in torchvision's ``ImageFolder``: it reads every format that torchvision lists,
and it releases the interpreter lock, so a few threads can share the work of a whole folder.
Unlike torchvision we apply the EXIF orientation, as every viewer does.

Pixels keep their 16 bits, and images may have any number of channels: such images become tensors.
tifffile reads the TIFFs that Pillow would reduce to 8 bits or to fewer channels.

Known limits: of 16-bit PNGs in colour Pillow keeps the upper 8 bits; 32 bits and floats are
refused; with 1 or 3 channels transparency is dropped; of several frames the first is read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional as v2f

from revzoo._checks import number_of, package_needed, shortened
from revzoo.data.errors import DataError

if TYPE_CHECKING:  # folders.py imports this module
    from revzoo.data.folders import Files

IMAGENET_CROP_PCT = 224 / 256
"""The ``crop_pct`` of torchvision's reference evaluation: 224 cut out of 256 pixels."""

FORMATS = ["JPEG", "PNG", "PPM", "BMP", "DIB", "TIFF", "WEBP", "GIF", "ICO", "AVIF", "JPEG2000"]
"""Formats that Pillow may detect. Not PostScript, for which it runs Ghostscript."""

IN_SET = "replace or remove it, or set data.on_error=skip; revzoo check DIR lists all such images"
"""The remedy for a damaged image of a data set."""

Opened: TypeAlias = Image.Image | Tensor
"""A Pillow image of bytes, RGB or grey; or a tensor (C, H, W) of uint8 or uint16."""

_ARRAY, _TIFF = ".npy", (".tif", ".tiff")
_LARGEST = 2**16 - 1  # class number in a mask

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
    return (*usual, *sorted({*found} - {*usual}), _ARRAY)


def open_image(
    path: str,
    channels: int | None,
    *,
    source: str | BinaryIO | None = None,
    remedy: str = "replace or remove it",
) -> Opened:
    """Decode one file.

    Args:
        path: of the file.
        channels: of the result: 3 (RGB) and 1 (grey) convert images of 8 bits into each other;
            any other number must be the file's. None accepts every file.
        source: what to read instead, if the image is a part of a larger file.
        remedy: the advice in the error about a corrupt file.

    Raises:
        DataError: the file is corrupt, has other channels, or values of more than 16 bits.
    """
    with decoding(path, remedy):
        if path.lower().endswith(_ARRAY):
            return _of_array(np.load(path, allow_pickle=False), channels, path)
        is_tiff = path.lower().endswith(_TIFF)
        try:
            with Image.open(source or path, "r", formats()) as image:
                if not (is_tiff and _loses(image, channels)):
                    return converted(image, channels, path)
        except UnidentifiedImageError:
            if not is_tiff:
                raise
        return _of_array(_read_tiff(path), channels, path)


@contextmanager
def decoding(path: str, remedy: str) -> Iterator[None]:
    """Turn any error of a decoder into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # Pillow's decoders raise many types
        fault = f"{type(error).__name__}: {error}"
        what = f"cannot decode image {path} ({fault})"
        reason = fault.replace(repr(path), "").rstrip(" :")  # as Pillow and Python quote it
        raise DataError(f"{what}: {remedy}", reason) from error


def converted(image: Image.Image, channels: int | None, name: str) -> Opened:
    """An image upright, in RGB (3 channels) or grey (1 channel); a tensor for others.

    Raises:
        DataError: the image has other channels, or values of more than 16 bits.
    """
    if image.mode.startswith(("I", "F")) or channels not in (None, 1, 3):
        values = np.asarray(upright(image.copy()))
        return _of_array(values if values.ndim == 2 else np.moveaxis(values, -1, 0), channels, name)
    return upright(image.convert("L" if channels == 1 else "RGB"))  # a copy, also in this mode


def upright(image: Image.Image) -> Image.Image:
    """Turn an image in place by its EXIF orientation."""
    with suppress(Exception):  # Pillow's reader raises many types; a damaged block is no EXIF
        ImageOps.exif_transpose(image, in_place=True)
    return image


def _loses(image: Image.Image, channels: int | None) -> bool:
    """Whether Pillow would lose bits or channels of a TIFF."""
    bands, bits = len(image.getbands()), image.tag_v2.get(258, (8,))  # type: ignore[attr-defined]
    return (bands > 1 and max(bits) > 8) or (channels not in (None, 1, 3) and bands != channels)


def _read_tiff(path: str) -> np.ndarray[Any, Any]:
    """All channels of a TIFF, (H, W) or (C, H, W)."""
    try:
        import tifffile
    except ImportError:
        raise DataError(package_needed(f"{path} needs", "tifffile")) from None
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        values: np.ndarray[Any, Any] = series.asarray()
        return np.moveaxis(values, -1, 0) if series.axes.endswith("S") else values


def _of_array(values: np.ndarray[Any, Any], channels: int | None, name: str) -> Tensor:
    """(H, W) or (C, H, W) as a tensor (channels, H, W) of uint8 or uint16."""
    if values.dtype == np.int32 and values.min() >= 0 and values.max() < 2**16:
        values = values.astype(np.uint16)  # Pillow's mode of a PGM of 16 bits
    if values.dtype.kind != "u" or values.dtype.itemsize > 2:
        fault = f"values of type {values.dtype}: expected 8 or 16 bits (uint8, uint16)"
        raise DataError(f"{name} has {fault}; convert it", fault)
    values = values[None] if values.ndim == 2 else values
    if values.ndim != 3 or not values.size:
        fault = f"the shape {values.shape}: expected (C, H, W) or (H, W)"
        raise DataError(f"{name} has {fault}", fault)
    if channels and len(values) not in ((1, 3) if channels == 3 else (channels,)):
        found = f"{number_of(len(values), 'channel')}, (C, H, W) = {values.shape}"
        fault = f"{found}: expected {channels}"
        raise DataError(f"{name} has {fault}, from data.in_chans or the model", fault)
    native = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))
    pixels = torch.from_numpy(native.copy() if not native.flags.writeable else native)
    repeated = pixels.expand(3, -1, -1) if channels == 3 and len(pixels) == 1 else pixels
    return tv_tensors.Image(repeated)


def read_mask(path: str, *, remedy: str = "replace it") -> np.ndarray[Any, Any]:
    """The pixel values of a mask, uint16 (H, W): grey values, or the numbers of a palette.

    Raises:
        DataError: it is an image in colour, has other values, or cannot be read.
    """
    with decoding(path, remedy):
        if path.lower().endswith(_ARRAY):
            return np.asarray(_of_array(np.load(path, allow_pickle=False), 1, path))[0]
        with Image.open(path, "r", formats()) as image:
            if len(image.getbands()) == 1 and image.mode != "F":
                values = np.asarray(upright(image.copy()))
                if (wrong := values[(values < 0) | (values > _LARGEST)]).size:
                    fault = f"the pixel value {wrong[0]}: expected class numbers up to {_LARGEST}"
                    raise DataError(f"{path} has {fault}; renumber them", fault)
                return values.astype(np.uint16)
            fault = f"a mask in colour (Pillow mode {image.mode})"
            fault += ": expected class numbers, in grey or with a palette"
            raise DataError(f"{path} is {fault}", fault)


def check_mask_size(mask: np.ndarray[Any, Any], path: str, image: Opened, of: str) -> None:
    """Raise a DataError for a mask of another size than its image, which is the file ``of``."""
    height, width = v2f.get_size(image)
    if mask.shape != (height, width):
        fault = f"{mask.shape[1]}x{mask.shape[0]} pixels, its image {width}x{height}"
        raise DataError(f"{path} has {fault} ({of}): give both one size", f"a mask of {fault}")


class SkippedFiles:
    """The unreadable images of a split, for ``data.on_error=skip``.

    Workers and the main process share the list, so a file counts only once, not in every epoch.
    """

    def __init__(
        self, paths: Sequence[str], labels: Sequence[int], *, classes: list[str], at_most: int
    ) -> None:
        self._paths, self._classes, self._at_most = paths, classes, at_most
        self._labels = torch.tensor(labels)
        # flags by row, in shared memory: workers would not share a list
        self._bad = torch.zeros(len(paths), dtype=torch.bool).share_memory_()  # type: ignore[no-untyped-call]

    def add(self, row: int, error: DataError, among: Tensor | None = None) -> None:
        """Skip the file at ``row`` and log why; ``among`` are the rows of the set that reads it.

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


def to_tensor(image: Opened) -> Tensor:
    """The pixels of an image, (C, H, W) of uint8 or uint16."""
    if isinstance(image, Tensor):
        return image.as_subclass(Tensor)
    # torchvision's conversion costs more than decoding a small image
    pixels = torch.from_numpy(np.array(image)).view(image.height, image.width, -1)
    return pixels.permute(2, 0, 1)


def first_image(files: Files, channels: int, skipped: SkippedFiles | None = None) -> Opened:
    """The first readable image; the set compares the others with it."""
    for row, path in enumerate(files.paths):
        try:
            # decoded, not only opened: the header of a damaged file may be fine
            return open_image(path, channels, source=files.source(row), remedy=IN_SET)
        except DataError as error:
            # without a reason, it is a fault of the storage, not of the file
            if skipped is None or not error.reason:
                raise
            skipped.add(row, error)
    count = len(files.paths)
    raise DataError(f"none of the {count} images can be read, such as {files.paths[0]}")
