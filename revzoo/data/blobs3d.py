"""Generated volumes of balls and boxes with masks: a set for segmentation in three dimensions.

As :mod:`revzoo.data.shapes`: no download, learnt in two minutes on two cores. The form decides the
class; sizes, grey values, noise and the background are random. Boxes are parallel to the axes.
"""

from typing import ClassVar

import numpy as np

from revzoo.data.shapes import Generated

SIZE = 32


class Blobs3d(Generated):
    """200 volumes to train and 50 to test, 1x32x32x32, with a class for each voxel.

    Args:
        **loading: see ``ImageData``. By default batches of 4; volumes are flipped along each axis.
    """

    names: ClassVar = ["background", "ball", "box"]
    counts: ClassVar = {"train": 200, "test": 50}
    batch_sizes = (4, 10)

    @staticmethod
    def draw(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        volume = np.full((SIZE,) * 3, random.uniform(40, 100))
        mask = np.zeros((SIZE,) * 3, dtype=np.uint8)
        grid = np.stack(np.meshgrid(*[np.arange(SIZE) / SIZE] * 3, indexing="ij"), axis=-1)
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
