"""Data modules and transforms by name, for ``data._target_`` and ``data.augment.policy``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from revzoo._checks import check_new_name, check_registered
from revzoo.data.augment import POLICIES
from revzoo.data.cifar import CIFAR10, CIFAR100
from revzoo.data.digits import Digits
from revzoo.data.imagefolder import ImageFolder
from revzoo.data.masks import Masks
from revzoo.data.module import ImageData
from revzoo.data.shapes import Blobs3d, Shapes
from revzoo.data.sharded import Shards
from revzoo.data.table import Table
from revzoo.data.volumes import Volumes

_KINDS: tuple[type[ImageData], ...] = (
    *(Blobs3d, Digits, CIFAR10, CIFAR100, ImageFolder),
    *(Masks, Shapes, Shards, Table, Volumes),
)
DATA = {f"revzoo.data.{kind.__name__}": kind for kind in _KINDS}


def register_data(name: str, kind: type[ImageData]) -> None:
    """Let configurations choose ``kind`` by ``data._target_=name``.

    Args:
        name: a new name, such as ``flowers.Flowers``.
        kind: a subclass of :class:`~revzoo.data.module.ImageData`. The name of the class must be
            new, too: checkpoints keep the state of the data under it.

    Raises:
        ValueError: a name is taken.
        TypeError: ``kind`` is not a subclass of ``ImageData``.

    Example:
        >>> from revzoo.data import ImageFolder
        >>> class Flowers(ImageFolder):
        ...     def __init__(self, root: str, **options):
        ...         super().__init__(root, image_size=64, **options)
        >>> revzoo.register_data("flowers", Flowers)  # then: data._target_=flowers data.root=DIR
    """
    if not (isinstance(kind, type) and issubclass(kind, ImageData)):
        raise TypeError(f"register_data({name!r}, {kind!r}): expected a subclass of ImageData")
    check_new_name("data", name, DATA)
    # Lightning stores a data module's state under type(module).__qualname__
    taken = {other.__name__: key for key, other in DATA.items()}
    if kind.__name__ in taken:
        raise ValueError(
            f"a class {kind.__name__} is already registered, as {taken[kind.__name__]!r}: rename "
            "yours, as checkpoints keep the state of the data under the name of its class"
        )
    DATA[name] = kind


def register_transform(name: str, build: Callable[[], Callable[..., Any]]) -> None:
    """Let configurations choose a transform of training images by ``data.augment.policy=name``.

    Args:
        name: a new name.
        build: a class or function without arguments, which returns the transform. It takes and
            returns an image: bytes (C, H, W), or a Pillow image if the set is read from its files;
            floats in [0, 1] for images of 16 bits. With masks it also takes and returns a
            ``tv_tensors.Mask`` of labels one higher, in which 0 does not count. Transforms of
            ``torchvision.transforms.v2`` take all of these;
            :class:`~revzoo.data.DictTransform` makes one of MONAI's. Volumes are float32
            (C, D, H, W) with masks (D, H, W). Draw from torch's random numbers: they are seeded for
            each batch or image, so a resumed run repeats them.

    Raises:
        ValueError: the name is taken.
        TypeError: ``build`` cannot be called.

    Example:
        >>> from torchvision.transforms import v2
        >>> revzoo.register_transform("upside_down", lambda: v2.RandomVerticalFlip(0.5))
        >>> revzoo.data.Digits(augment={"policy": "upside_down"}).augment.policy
        'upside_down'
    """
    check_registered("transform", name, build, POLICIES)
    POLICIES[name] = build
