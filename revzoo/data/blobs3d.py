"""Generated volumes of balls and boxes with masks: a set for segmentation in three dimensions.

As :mod:`revzoo.data.shapes`: no download, learnt in two minutes on two cores. The form decides the
class; sizes, grey values, noise and the background are random. Boxes are
parallel to the axes.
"""

from typing import Unpack

import numpy as np
import torch

from revzoo.data.augment import Augment
from revzoo.data.images import TensorImages
from revzoo.data.module import ImageData, LoadingOptions, Split

CLASSES = ["background", "ball", "box"]
_COUNTS: dict[Split, int] = {"train": 200, "test": 50}
_SEEDS: dict[Split, int] = {"train": 0, "test": 1}


class Blobs3d(ImageData):
    """200 volumes to train and 50 to test, 1x32x32x32, with a class for each voxel.

    Args:
        **loading: see ``ImageData``. By default batches of 4; volumes are flipped along each axis.
    """

    task = "segmentation"

    def __init__(self, **loading: Unpack[LoadingOptions]) -> None:
        loading.setdefault("batch_size", 4)
        loading.setdefault("eval_batch_size", 10)
        if loading.get("augment") is None:
            loading["augment"] = Augment(crop_padding=0)
        super().__init__(**loading)

    def read(self, split: Split) -> TensorImages | None:
        if split == "val":
            return None
        random = np.random.default_rng(_SEEDS[split])
        pairs = [_draw(random, 32) for _ in range(_COUNTS[split])]
        volumes, masks = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return TensorImages(volumes[:, None], masks, classes=CLASSES)


def _draw(random: np.random.Generator, size: int) -> tuple[np.ndarray, np.ndarray]:
    """A volume and its mask, both bytes (S, S, S)."""
    volume = np.full((size,) * 3, random.uniform(40, 100))
    mask = np.zeros((size,) * 3, dtype=np.uint8)
    grid = np.stack(np.meshgrid(*[np.arange(size) / size] * 3, indexing="ij"), axis=-1)
    for _ in range(int(random.integers(1, 4))):  # later blobs hide earlier ones
        label = int(random.integers(1, 3))
        centre, radius = random.uniform(0.2, 0.8, 3), random.uniform(0.14, 0.24)
        away = grid - centre
        # the box has about the ball's volume
        distance = np.linalg.norm(away, axis=-1) if label == 1 else 1.24 * abs(away).max(axis=-1)
        mask[distance < radius] = label
        volume[distance < radius] = random.uniform(130, 220)
    noisy = volume + random.normal(0, 12, volume.shape)
    return noisy.clip(0, 255).astype(np.uint8), mask
