"""Data modules: real images, split, loaded, augmented and normalised.

Start reading at ``module.py``, which holds the rules for every set.
"""

from revzoo.data.augment import Augment as Augment
from revzoo.data.augment import DictTransform as DictTransform
from revzoo.data.cifar import CIFAR10 as CIFAR10
from revzoo.data.cifar import CIFAR100 as CIFAR100
from revzoo.data.digits import Digits as Digits
from revzoo.data.errors import DataError as DataError
from revzoo.data.imagefolder import ImageFolder as ImageFolder
from revzoo.data.masks import Masks as Masks
from revzoo.data.module import ImageData as ImageData
from revzoo.data.registry import DATA as DATA
from revzoo.data.registry import register_data as register_data
from revzoo.data.registry import register_transform as register_transform
from revzoo.data.shapes import Blobs3d as Blobs3d
from revzoo.data.shapes import Shapes as Shapes
from revzoo.data.sharded import Shards as Shards
from revzoo.data.table import Table as Table
from revzoo.data.volumes import Volumes as Volumes
