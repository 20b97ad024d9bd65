"""Data modules by name: the values of ``data._target_`` in a configuration."""

from __future__ import annotations

from revzoo._checks import check_new_name
from revzoo.data.cifar import CIFAR10, CIFAR100
from revzoo.data.digits import Digits
from revzoo.data.imagefolder import ImageFolder
from revzoo.data.masks import Masks
from revzoo.data.module import ImageData
from revzoo.data.shapes import Shapes
from revzoo.data.table import Table

DATA: dict[str, type[ImageData]] = {
    "revzoo.data.Digits": Digits,
    "revzoo.data.CIFAR10": CIFAR10,
    "revzoo.data.CIFAR100": CIFAR100,
    "revzoo.data.ImageFolder": ImageFolder,
    "revzoo.data.Masks": Masks,
    "revzoo.data.Shapes": Shapes,
    "revzoo.data.Table": Table,
}


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
