"""Data modules: real images, split, loaded, augmented and normalised.

Start reading at ``module.py``, which holds the rules for every set.
"""

from revzoo.data.augment import Augment, DictTransform
from revzoo.data.cifar import CIFAR10, CIFAR100
from revzoo.data.digits import Digits
from revzoo.data.errors import DataError
from revzoo.data.imagefolder import ImageFolder
from revzoo.data.masks import Masks
from revzoo.data.module import ImageData
from revzoo.data.registry import DATA, register_data, register_transform
from revzoo.data.shapes import Blobs3d, Shapes
from revzoo.data.sharded import Shards
from revzoo.data.table import Table
from revzoo.data.volumes import Volumes

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "DATA",
    "Augment",
    "Blobs3d",
    "DataError",
    "DictTransform",
    "Digits",
    "ImageData",
    "ImageFolder",
    "Masks",
    "Shapes",
    "Shards",
    "Table",
    "Volumes",
    "register_data",
    "register_transform",
]
