"""Image files to bytes.

Pillow decodes, as in torchvision's ``ImageFolder``, because it reads every format that one lists;
and it lets go of the interpreter lock, so a few threads share the work of a whole folder.

Known limits: images of more than 8 bits per channel are refused, since Pillow would clip them
silently; transparency is dropped; an EXIF orientation is not applied (as in torchvision).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as v2f

from revzoo.data.errors import DataError
from revzoo.data.workers import available_cpus

IMAGENET_CROP_PCT = 224 / 256
"""The ``crop_pct`` of torchvision's reference evaluation: 224 cut out of 256 pixels."""

_BLOCK = 256  # images per task of a thread
_WHAT_PILLOW_RAISES = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def open_image(path: str, channels: int) -> Image.Image:
    """Decode one file to RGB (3 channels) or grey (1 channel).

    Raises:
        DataError: the file is corrupt, or has more than 8 bits per channel.
    """
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise DataError(
                    f"{path} has more than 8 bits per channel (Pillow mode {image.mode}): "
                    "convert it to 8 bits"
                )
            return image.convert("RGB" if channels == 3 else "L")
    except _WHAT_PILLOW_RAISES as error:
        raise DataError(
            f"cannot decode image {path} ({type(error).__name__}: {error}): replace or remove it"
        ) from error


def to_square(image: Image.Image, size: int, crop_pct: float = 1.0) -> Image.Image:
    """Resize the shorter side to ``size / crop_pct`` pixels, and cut ``size`` out of the middle.

    ``crop_pct`` is the name of timm (R. Wightman): the share of the shorter side that is kept.
    """
    shorter = round(size / crop_pct)
    if image.size == (size, size) == (shorter, shorter):
        return image
    return v2f.center_crop(v2f.resize(image, [shorter], antialias=True), [size, size])


def square_bytes(image: Image.Image, size: int, crop_pct: float) -> Tensor:
    """An image as :func:`to_square` gives it, uint8 (C, size, size)."""
    return v2f.pil_to_tensor(to_square(image, size, crop_pct))


def common_size(path: str) -> int:
    """The side in pixels of the first image of a folder, which the others are held against.

    Raises:
        DataError: it is not square, or corrupt.
    """
    width, height = open_image(path, 3).size
    if width != height:
        raise DataError(
            f"{path} has {width}x{height} pixels: networks here take squares, set data.image_size "
            "to a side in pixels and images will be resized and cropped to it"
        )
    return width


def decode_all(paths: Sequence[str], *, channels: int, size: int, resize: bool) -> Tensor:
    """Decode a folder into one tensor, uint8 (N, channels, size, size).

    Args:
        paths: the files, in the order of the result.
        channels: 3 or 1.
        size: side in pixels.
        resize: bring other sizes to ``size``; if False, they are an error.

    Raises:
        DataError: a file is corrupt, or has another size and ``resize`` is False.
    """
    images = np.empty((len(paths), channels, size, size), dtype=np.uint8)

    def decode_block(start: int) -> None:
        for row in range(start, min(start + _BLOCK, len(paths))):
            image = open_image(paths[row], channels)
            if not resize and image.size != (size, size):
                raise DataError(
                    f"images differ in size: {paths[row]} has {image.width}x{image.height} pixels, "
                    f"{paths[0]} {size}x{size}: set data.image_size to resize them all"
                )
            # Filled through NumPy: torchvision's conversion costs more than decoding a small image.
            pixels = np.asarray(to_square(image, size)).reshape(size, size, channels)
            images[row] = pixels.transpose(2, 0, 1)

    pool = ThreadPoolExecutor(max_workers=min(4, available_cpus()))
    try:
        for _ in pool.map(decode_block, range(0, len(paths), _BLOCK)):
            pass  # iterating raises the error of the first block that failed
    finally:
        pool.shutdown(cancel_futures=True)
    return torch.from_numpy(images)
