"""Generated images and volumes with masks: two sets for segmentation.

As the digits, they need no download, and a network learns them in two minutes on two cores.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Unpack

import numpy as np
import torch
from PIL import Image, ImageDraw

from revzoo.data.augment import Augment
from revzoo.data.images import TensorImages
from revzoo.data.module import ImageData, LoadingOptions, Split

_SEEDS: dict[Split, int] = {"train": 0, "test": 1}
_SHARP = 4  # shapes are drawn this much larger, and their masks and images reduced


class Generated(ImageData):
    """Images or volumes with masks, drawn when they are read; they are flipped, not cropped.

    Attributes:
        names: of the classes.
        counts: of the images of each split.
        batch_sizes: of training and of evaluation, by default.
    """

    task = "segmentation"
    names: ClassVar[list[str]]
    counts: ClassVar[Mapping[Split, int]]
    batch_sizes: ClassVar[tuple[int, int]]

    def __init__(self, **loading: Unpack[LoadingOptions]) -> None:
        loading.setdefault("batch_size", self.batch_sizes[0])
        loading.setdefault("eval_batch_size", self.batch_sizes[1])
        if loading.get("augment") is None:
            loading["augment"] = Augment(crop_padding=0)
        super().__init__(**loading)

    @staticmethod
    @abstractmethod
    def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """An image (C, *sizes) and its mask (*sizes), both bytes."""

    def read(self, split: Split) -> TensorImages | None:
        if split == "val":
            return None
        random = np.random.default_rng(_SEEDS[split])
        pairs = [self.draw(random) for _ in range(self.counts[split])]
        images, masks = (torch.from_numpy(np.stack(part)) for part in zip(*pairs, strict=True))
        return TensorImages(images, masks, classes=self.names)


class Shapes(Generated):
    """1,000 images of circles, squares and triangles to train and 200 to test, 3x48x48.

    Each pixel has a class, which the form decides; colours, sizes, angles, noise and the background
    are random.

    Args:
        **loading: see ``ImageData``. By default batches of 16.
    """

    names: ClassVar = ["background", "circle", "square", "triangle"]
    counts: ClassVar = {"train": 1000, "test": 200}
    batch_sizes = (16, 50)

    @staticmethod
    def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        side = 48 * _SHARP
        mask = Image.new("L", (side, side))
        image = Image.new("RGB", (side, side), _colour(random, 40, 120))
        for _ in range(int(random.integers(1, 4))):  # later shapes hide earlier ones
            label = int(random.integers(1, 4))
            centre, radius = random.uniform(0.15, 0.85, 2) * side, random.uniform(0.12, 0.25) * side
            corners = {1: 48, 2: 4, 3: 3}[label]  # a polygon of 48 corners is a circle
            turns = random.uniform() + np.arange(corners) / corners
            angles = 2 * math.pi * turns
            points = centre[:, None] + radius * np.stack([np.cos(angles), np.sin(angles)])
            polygon = [tuple(point) for point in points.T]
            ImageDraw.Draw(mask).polygon(polygon, fill=label)
            ImageDraw.Draw(image).polygon(polygon, fill=_colour(random, 100, 230))
        pixels = np.asarray(image.reduce(_SHARP), dtype=np.float64)
        noisy = (pixels + random.normal(0, 12, pixels.shape)).clip(0, 255).astype(np.uint8)
        labels = np.asarray(mask)[_SHARP // 2 :: _SHARP, _SHARP // 2 :: _SHARP]
        return np.moveaxis(noisy, -1, 0).copy(), labels.copy()


def _colour(random: np.random.Generator, low: int, high: int) -> tuple[int, ...]:
    return tuple(int(value) for value in random.integers(low, high, 3))


class Blobs3d(Generated):
    """200 volumes of balls and boxes to train and 50 to test, 1x32x32x32, a class for each voxel.

    The form decides the class; sizes, grey values, noise and the background are random. Boxes are
    parallel to the axes.

    Args:
        **loading: see ``ImageData``. By default batches of 4; volumes are flipped along each axis.
    """

    names: ClassVar = ["background", "ball", "box"]
    counts: ClassVar = {"train": 200, "test": 50}
    batch_sizes = (4, 10)

    @staticmethod
    def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        volume = np.full((32,) * 3, random.uniform(40, 100))
        mask = np.zeros((32,) * 3, dtype=np.uint8)
        grid = np.stack(np.meshgrid(*[np.arange(32) / 32] * 3, indexing="ij"), axis=-1)
        for _ in range(int(random.integers(1, 4))):  # later blobs hide earlier ones
            label = int(random.integers(1, 3))
            centre, radius = random.uniform(0.2, 0.8, 3), random.uniform(0.14, 0.24)
            away = grid - centre
            # the box has about the ball's volume
            distance = (
                np.linalg.norm(away, axis=-1) if label == 1 else 1.24 * abs(away).max(axis=-1)
            )
            mask[distance < radius] = label
            volume[distance < radius] = random.uniform(130, 220)
        noisy = volume + random.normal(0, 12, volume.shape)
        return noisy.clip(0, 255).astype(np.uint8)[None], mask
